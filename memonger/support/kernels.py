"""Call the package's C library, which is built when the package is installed.

Functions, structs and constants are declared in headers only (``*.h`` beside the Python file of the
same name). ``setup.py`` reads the headers, and the library returns what they declare. This module
makes Python functions, classes and numbers of that. ``kernels.h`` says how arrays and results are
passed. Compiled code runs without Python's global lock.
"""

from __future__ import annotations

import ctypes
import json
import operator
import sys
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, ClassVar, Tuple, TypeVar

import numpy as np

from memonger.support.errors import MemongerError

Value = Any  # type: ignore[misc]  # an argument or a result, whose type a header names

PACKAGE = Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parent
NAME = Path("memonger", "support", "libkernels.so")


class _Array(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("count", ctypes.c_int64)]


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("last", "used", "inner", "outer", "ended")]


_CONVERTERS: dict[str, Callable[[Value], Value]] = {
    "bool": bool,
    "int64_t": operator.index,
    "double": float,
}
_DTYPES: dict[str, np.dtype[Value] | None] = {
    f"{name}s": np.dtype(name.lower())
    for name in ("Bool", "Int8", "Int32", "Int64", "UInt16", "UInt64")
}
_DTYPES.update(Floats=np.dtype("float32"), Doubles=np.dtype("float64"), Bytes=None)
#: Type in C -> its type in ctypes. Those of structs come with their classes.
_TYPES: dict[str, type[Value]] = {
    "bool": ctypes.c_bool,
    "int64_t": ctypes.c_int64,
    "double": ctypes.c_double,
    **dict.fromkeys(_DTYPES, _Array),
}

_MAX_COUNT = 2**31 - 1  # elements of an array: compiled code counts them in int32
_TOO_LARGE = f"the network is too large: one of its arrays needs more than {_MAX_COUNT} elements"
#: Status with which a call ends (kernels.h) -> the error to raise.
_ERRORS: dict[int, tuple[type[Exception], str]] = {
    1: (MemoryError, "out of host memory"),
    2: (MemongerError, _TOO_LARGE),
    3: (ValueError, "a state is longer than those of the archive"),
}

S = TypeVar("S", bound="Struct")


class Struct(Tuple[Value, ...]):
    """Base class of structs: a subclass is the struct of the same name in a header.

    A subclass annotates its fields, and the header says what they mean. They are passed in order or
    by name. Arrays must be C-contiguous. Compiled code reads and writes them in place, and the
    tuple keeps them alive.
    """

    classes: ClassVar[dict[str, type[Struct]]] = {}
    fields: ClassVar[dict[str, str]]  # name -> type, as in C
    _packed: Value  # what compiled code reads

    def __init_subclass__(cls) -> None:
        kind, cls.fields = cls.__name__, _declared("structs", cls.__name__)
        for i, name in enumerate(cls.fields):
            setattr(cls, name, property(operator.itemgetter(i)))
        layout = [(name, _TYPES[field]) for name, field in cls.fields.items()]
        _TYPES[kind] = type(kind, (ctypes.Structure,), {"_fields_": layout})
        Struct.classes[kind] = cls

    def __new__(cls: type[S], *values: object, **by_name: object) -> S:
        """Make a struct from all its fields, and pack it once for all calls.

        Raises TypeError if a field is missing, unknown, or not what the header says.
        """
        names = [*cls.fields][len(values) :]
        if {*names} != {*by_name} or len(values) > len(cls.fields):
            raise TypeError(f"{cls.__name__} has the fields {[*cls.fields]} in C")
        self = super().__new__(cls, (*values, *[by_name[name] for name in names]))
        self._packed = _TYPES[cls.__name__](*map(_to_c, cls.fields.values(), cls.fields, self))
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), tuple(self)  # a copy is packed anew: its arrays lie elsewhere

    def replace(self: S, **changes: object) -> S:
        """Return a copy with other values of some fields."""
        return type(self)(**{**dict(zip(self.fields, self)), **changes})


class _Compiled:
    """The functions that a header marks KERNEL, as attributes.

    A function raises TypeError for an argument of another type than the header declares. Arrays
    must be C-contiguous and are not copied. A function returns what it returns in C and then its
    results: new arrays of one dimension, structs and numbers; a tuple if there are several.
    """

    def __getattr__(self, name: str) -> Value:
        kernel = _kernel(name)
        setattr(self, name, kernel)
        return kernel


compiled = _Compiled()


def constant(name: str) -> int:
    """Return a constant from an ``enum`` of a header."""
    return _declared("constants", name)


def _to_c(kind: str, name: str, value: Value) -> Value:
    """Convert an argument, or a field of a struct, for ctypes, without copying it."""
    if kind in _CONVERTERS:
        return _CONVERTERS[kind](value)
    if kind not in _DTYPES:
        if type(value) is not Struct.classes.get(kind):
            raise TypeError(f"{name} must be a {kind}, not {type(value).__name__}")
        return value._packed
    dtype = _DTYPES[kind]
    if not isinstance(value, np.ndarray) or (dtype or value.dtype) != value.dtype:
        raise TypeError(f"{name} must be an array of {dtype}, not {getattr(value, 'dtype', value)}")
    if dtype and value.size > _MAX_COUNT:
        raise MemongerError(f"{name}: {_TOO_LARGE}")
    if not value.flags.c_contiguous:
        raise TypeError(f"{name} must be C-contiguous")
    return _Array(value.ctypes.data, value.size if dtype else value.nbytes)


def _from_c(kind: str, value: Value) -> Value:
    """Copy a result into Python."""
    if kind in _CONVERTERS:
        return getattr(value, "value", value)  # the field of a struct is a number already
    dtype = _DTYPES.get(kind)
    if dtype is None:
        fields = Struct.classes[kind].fields.items()
        return Struct.classes[kind](*[_from_c(of, getattr(value, name)) for name, of in fields])
    array = np.empty(value.count, dtype)
    ctypes.memmove(array.ctypes.data, value.at, array.nbytes)
    return array


def _remedy() -> str:
    in_clone = (ROOT / "setup.py").exists()
    return f"run in {ROOT}: python setup.py build_ext -i" if in_clone else "install memonger again"


@lru_cache(None)
def _library() -> tuple[ctypes.CDLL, dict[str, Value]]:
    """Load the library of this package; in a clone where none was built, the installed one.

    Returns what its headers declare too (``write_entries`` in setup.py).
    """
    paths = [Path(folder, NAME) for folder in [str(ROOT), *sys.path]]
    path = next(filter(Path.exists, paths), None)
    if path is None:
        raise MemongerError(f"{paths[0]} is missing; {_remedy()}")
    library = ctypes.CDLL(str(path))
    if not hasattr(library, "declarations"):
        raise MemongerError(f"{path} was built from older sources; {_remedy()}")
    library.declarations.restype = ctypes.c_char_p
    declared = json.loads(library.declarations())
    for name, checksum in declared["sources"].items():
        source = PACKAGE / name  # which a clone has
        if source.exists() and zlib.crc32(source.read_bytes()) != checksum:
            raise MemongerError(f"{path} was built from another {name}; {_remedy()}")
    return library, declared


def _declared(kind: str, name: str) -> Value:
    """Return what the headers declare under a name; ``kind`` is a key of `_library`."""
    declared = _library()[1][kind]
    if name not in declared:
        raise AttributeError(f"the library has no {name} among its {kind}; {_remedy()}")
    return declared[name]


def _kernel(name: str) -> Value:
    """Make a Python function of a function in the library."""
    declared = _declared("functions", name)
    parameters: list[str] = []
    types: list[type[Value]] = [ctypes.POINTER(_Memory)]
    for kind, field, is_result in declared:
        is_by_address = is_result or kind in Struct.classes
        types.append(ctypes.POINTER(_TYPES[kind]) if is_by_address else _TYPES[kind])
        if not is_result:
            parameters.append(field)
    library = _library()[0]
    function = library[f"try_{name}"]
    function.argtypes, function.restype = types, ctypes.c_int64

    def call(*arguments: Value) -> Value:
        if len(arguments) != len(parameters):
            raise TypeError(f"{name} takes {parameters}")
        memory, given = _Memory(), iter(arguments)
        values = [
            _TYPES[kind]() if is_result else _to_c(kind, field, next(given))
            for kind, field, is_result in declared
        ]
        try:
            status = function(memory, *values)
            if status:
                error, message = _ERRORS[status]
                raise error(f"{name}: {message}")
            pairs = zip(declared, values)
            results = [_from_c(kind, value) for (kind, _, is_result), value in pairs if is_result]
        finally:
            library.try_give_back(ctypes.byref(memory), _Memory())
        return tuple(results) if len(results) != 1 else results[0]

    return call
