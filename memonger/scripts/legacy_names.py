"""Names that NumPy and Python have removed, for scripts that were written before.

Most scripts of MXNet were written for NumPy 1.13 to 1.19 and Python 3.5 to 3.8. ``memonger run``
gives them the names that they know, unless NumPy or Python has a name still, or has it anew.
"""

from __future__ import annotations

import importlib.util
import sys
import time
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Callable, Mapping, Sequence

#: Names of Python's module ``time``; ``clock`` was removed in Python 3.8.
OF_TIME: Mapping[str, object] = {"clock": time.process_time}


def names_of_numpy() -> dict[str, object]:
    """Return what names of NumPy 1.13 to 1.19 meant that a later one may lack."""
    import numpy

    from memonger.support.numpy1 import LOST

    def asfarray(a: object, dtype: object = numpy.float64) -> object:
        kind = numpy.dtype(dtype)  # type: ignore[call-overload]
        is_inexact = issubclass(kind.type, numpy.inexact)
        return numpy.asarray(a, dtype=kind if is_inexact else numpy.float64)

    return {
        **{name: value for name, value in LOST.items() if name != "compat"},
        # Python's types (removed in NumPy 1.24).
        **{"object": object, "str": str, "unicode": str, "complex": complex, "long": int},
        # Other names of types (1.24 and 2.0).
        **{"bool8": numpy.bool_, "int0": numpy.intp, "uint0": numpy.uintp, "void0": numpy.void},
        **{"object0": numpy.object_, "str0": numpy.str_, "bytes0": numpy.bytes_},
        **{"float_": numpy.float64, "string_": numpy.bytes_, "unicode_": numpy.str_},
        **{"complex_": numpy.complex128, "cfloat": numpy.complex128},
        **{"singlecomplex": numpy.complex64, "longfloat": numpy.longdouble},
        **{"longcomplex": numpy.clongdouble, "clongfloat": numpy.clongdouble},
        **{"infty": numpy.inf, "Infinity": numpy.inf},
        # Functions (1.18, 1.23 and 2.0).
        "rank": numpy.ndim,
        "alen": lambda a: len(numpy.atleast_1d(a)),
        "asscalar": lambda a: a.item(),
        "asfarray": asfarray,
        "cumproduct": numpy.cumprod,
        "mat": numpy.asmatrix,
        "row_stack": numpy.vstack,
    }


class LegacyNames:
    """The names that were used of those that are supplied in this process.

    NumPy's are supplied when the script imports it: what it sets before must hold.
    """

    def __init__(self) -> None:
        self._used: dict[str, None] = {}
        self._supply(time, OF_TIME)
        if "numpy" in sys.modules:
            self._supply(sys.modules["numpy"], names_of_numpy())
        else:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find NumPy by the other finders, and supply its names after its import."""
        if name != "numpy":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self._supply(module, names_of_numpy())

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _supply(self, module: ModuleType, meaning: Mapping[str, object]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names that are about to go, or to come back
            lacking = {name: meaning[name] for name in meaning if not hasattr(module, name)}
        usual: Callable[[str], object] | None = vars(module).get("__getattr__")

        def find(name: str) -> object:
            if name in lacking:
                self._used[f"{module.__name__}.{name}"] = None
                return lacking[name]
            if usual is not None:
                return usual(name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        vars(module)["__getattr__"] = find

    def __str__(self) -> str:
        if not self._used:
            return ""
        return (
            f"supplied {', '.join(self._used)}, which NumPy or Python has removed since; "
            "--no-legacy-names leaves them out"
        )
