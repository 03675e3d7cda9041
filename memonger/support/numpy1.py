"""NumPy 1.23 for MXNet's own modules, on later NumPys and Pythons.

MXNet was last released in 2022, for NumPy 1.23 and Python 3.10. `OldNumPyLoader` gives each of its
modules builtins of its own (Python's reference, ``exec``: "you can control what builtins are
available"). In them ``import`` hands out views of numpy and multiprocessing that are as they were,
and ``str`` writes attributes as then. numpy itself, which users see, stays as it is.
"""

from __future__ import annotations

import builtins
import functools
import multiprocessing
import sys
from importlib.abc import InspectLoader, Loader
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType, SimpleNamespace
from typing import Callable, Mapping, Sequence

import numpy

from memonger.support.types import ArrayLike, Context, DTypeLike, NDArray

_VERSION = tuple(map(int, numpy.__version__.split(".")[:2]))
#: Whether a Python float takes the type of the NumPy scalar that it meets (NEP 50), and a scalar
#: within a tuple is written with the name of its type.
IS_NUMPY_2 = _VERSION >= (2, 0)


def _call(name: str, **fixed: object) -> object:
    def call(*args: object, **kwargs: object) -> object:
        return getattr(numpy, name)(*args, **fixed, **kwargs)

    return call


def _in1d(
    ar1: ArrayLike, ar2: ArrayLike, assume_unique: bool = False, invert: bool = False
) -> object:
    return numpy.isin(numpy.ravel(ar1), ar2, assume_unique, invert)


def _expired(name: str) -> object:
    def expired(*args: object, **kwargs: object) -> object:
        raise RuntimeError(
            f"{name} left NumPy in version 1.20 (NEP 32); the package numpy_financial has it"
        )

    return expired


#: What NumPy 1.23 has and a later one lacks, as it is in 1.23: all that MXNet 1.6 to 1.9 reads
#: (``python/mxnet``: ``numpy/utils.py``, ``numpy/fallback.py``, ``numpy_dispatch_protocol.py``,
#: ``ndarray/numpy/_op.py``, ``test_utils.py``, ``gluon/contrib/estimator/event_handler.py``).
LOST: dict[str, object] = {
    "Inf": numpy.inf,
    "PINF": numpy.inf,
    "NINF": -numpy.inf,
    "NaN": numpy.nan,
    "NAN": numpy.nan,
    "PZERO": 0.0,
    "NZERO": -0.0,
    "bool": bool,
    "int": int,
    "float": float,
    "alltrue": _call("all"),
    "sometrue": _call("any"),
    "product": _call("prod"),
    "round_": _call("round"),
    "msort": _call("sort", axis=0),
    "trapz": _call("trapezoid"),
    "in1d": _in1d,
    **{name: _expired(name) for name in ("mirr", "npv", "pmt", "ppmt", "pv", "rate")},
    "compat": SimpleNamespace(basestring=str),
}


def _array(object: ArrayLike, dtype: DTypeLike = None, **options: bool) -> object:
    """Make an array as ``numpy.array`` does, but wrap integers that are out of bounds."""
    try:
        return numpy.array(object, dtype, **options)  # type: ignore[call-overload]
    except OverflowError:
        return numpy.array(object, **options).astype(dtype)  # type: ignore[call-overload]


def _by_interpolation(name: str) -> object:
    def call(*args: object, **kwargs: object) -> object:
        if "interpolation" in kwargs:
            kwargs["method"] = kwargs.pop("interpolation")
        return getattr(numpy, name)(*args, **kwargs)

    return call


def _names() -> dict[str, object]:
    """Return the names that the view of numpy has of its own."""
    names = {name: value for name, value in LOST.items() if name not in vars(numpy)}
    if IS_NUMPY_2:
        from numpy.lib.array_utils import normalize_axis_tuple

        names["array"] = _array
        for name in ("nanpercentile", "nanquantile"):
            names[name] = _by_interpolation(name)
        names["bool"] = bool  # there it is numpy.bool_
        # It warns there.
        names["core"] = SimpleNamespace(
            numeric=SimpleNamespace(normalize_axis_tuple=normalize_axis_tuple)
        )
    return names


class _View(ModuleType):
    """A module with other names; what they do not hold is the module's."""

    def __init__(self, module: ModuleType, names: Mapping[str, object]) -> None:
        super().__init__(module.__name__, module.__doc__)
        vars(self).update(names)
        self._module = module

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)


class _Forking(_View):
    """multiprocessing with the default that it had on Linux before Python 3.14: to fork.

    A worker of MXNet's (``gluon/data/dataloader.py``) inherits the dataset. One that does not would
    import MXNet before memonger.
    """

    def __getattr__(self, name: str) -> object:
        if sys.platform == "linux" and multiprocessing.get_start_method(allow_none=True) is None:
            context = multiprocessing.get_context("fork")
            if hasattr(context, name):
                return getattr(context, name)
        return super().__getattr__(name)


_VIEWS = {
    "numpy": _View(numpy, _names()),
    "multiprocessing": _Forking(multiprocessing, {}),
}


def _import(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    module = builtins.__import__(name, globals, locals, fromlist or (), level)
    return _VIEWS.get(module.__name__, module)


class _TextType(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, str)


class _Text(str, metaclass=_TextType):  # type: ignore[misc]
    """``str`` to which a NumPy scalar is a number: it writes '(3,)', not '(np.int64(3),)'."""

    def __new__(cls, value: object) -> str:  # type: ignore[misc]
        text = str(value)
        if "np." in text:
            options: dict[str, str] = {"legacy": "1.25"}
            with numpy.printoptions(**options):  # type: ignore[arg-type]
                return str(value)
        return text


_BUILTINS = {**vars(builtins), "__import__": _import}

#: Modules that hand attributes and parameters to MXNet's C interface as text.
_WRITERS = ("mxnet._ctypes.ndarray", "mxnet._ctypes.symbol", "mxnet.symbol.symbol", "mxnet.io.io")
_BUILTINS_OF_WRITERS = {**_BUILTINS, "str": _Text}

#: Modules that call ``tostring`` of NumPy's arrays, and that add float32 scalars to 0.0.
_MENDED = ("mxnet.recordio", "mxnet.metric")


def _mend(code: CodeType) -> CodeType:
    """Return code that calls ``tobytes`` for ``tostring``, and has ``numpy.float64(0)`` for 0.0.

    NumPy 2.3 has no ``tostring``. The sum of 0.0 and a float32 scalar was a float64 before NumPy 2,
    and is a float32 since.
    """

    def mended(constant: object) -> object:
        if isinstance(constant, CodeType):
            return _mend(constant)
        return numpy.float64(0) if type(constant) is float and not constant else constant

    return code.replace(
        co_names=tuple("tobytes" if name == "tostring" else name for name in code.co_names),
        co_consts=tuple(map(mended, code.co_consts)),
    )


def _compute_rates_in_float64(optimizers: ModuleType) -> None:
    """Let the norms from which LARS and LBSGD compute a rate be Python floats.

    Of a float32 scalar and Python floats NumPy 2 makes a float32, and NumPy 1 made a float64.
    """

    def return_float(optimizer: type, norm: str) -> None:
        method = getattr(optimizer, norm)

        @functools.wraps(method)
        def call(*args: object, **kwargs: object) -> float:
            return float(method(*args, **kwargs))

        setattr(optimizer, norm, call)

    for name in ("LARS", "LBSGD"):
        return_float(getattr(optimizers, name), "_l2norm")


def _convert_arrays(arrays: ModuleType) -> None:
    """Tell NumPy how to convert an NDArray.

    Without this it takes the elements of elements, NDArrays too, without end: to an array of 32
    dimensions before 1.24, which raises since (and ``numpy.array_equal`` then says False).
    """

    def convert(array: NDArray, dtype: DTypeLike = None, copy: bool | None = None) -> object:
        if copy is False:
            raise ValueError("an NDArray cannot be converted without a copy")
        return numpy.asarray(array.asnumpy(), dtype)

    if _VERSION >= (1, 24):
        arrays.NDArray.__array__ = convert


def _convert_results(arrays: ModuleType) -> None:
    """Let ``mx.np`` take results that are named tuples since NumPy 1.25, as of ``linalg.qr``."""
    convert = getattr(arrays, "_as_mx_np_array", None)  # from MXNet 1.7 on
    if convert is not None:

        def call(result: object, ctx: Context | None = None) -> object:
            is_named = isinstance(result, tuple) and hasattr(result, "_fields")
            return convert(tuple(result) if is_named else result, ctx)  # type: ignore[arg-type]

        vars(arrays)[convert.__name__] = call


#: What is changed in a module after it was loaded.
_CHANGES = {
    "mxnet.ndarray.ndarray": _convert_arrays,
    "mxnet.numpy.multiarray": _convert_results,
    "mxnet.optimizer.optimizer": _compute_rates_in_float64,
}


class OldNumPyLoader(Loader):
    """Loads one of MXNet's modules so that it behaves as on NumPy 1.23; then runs ``actions``."""

    def __init__(self, loader: Loader, actions: list[Callable[[], object]]) -> None:
        self._loader, self._actions = loader, actions

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        name, names = module.__name__, vars(module)
        if module.__spec__:
            module.__loader__ = module.__spec__.loader = self._loader  # which knows the sources
        is_writer = IS_NUMPY_2 and name in _WRITERS
        names["__builtins__"] = _BUILTINS_OF_WRITERS if is_writer else _BUILTINS
        code = None
        if name in _MENDED and isinstance(self._loader, InspectLoader):
            code = self._loader.get_code(name)
        if code is None:
            self._loader.exec_module(module)
        else:
            exec(_mend(code), names)
        if name in _CHANGES:
            _CHANGES[name](module)
        while self._actions:
            self._actions.pop(0)()
