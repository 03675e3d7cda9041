"""Calls of compiled code: a library of C that is built when the package is installed.

Functions, structs and constants are declared in the headers alone (``*.h`` beside the Python file
of the same name), which this module reads. ``kernels.h`` says how arrays and results are passed.
The interpreter's lock is free while compiled code runs.
"""

from __future__ import annotations

import ctypes
import operator
import re
import struct
import sys
import zlib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Iterator, NamedTuple, Tuple, TypeVar

import numpy as np

from memonger.support.errors import MemongerError
from memonger.support.types import AnyArray

Value = Any  # type: ignore[misc]  # an argument or a result, whose type a header names

PACKAGE = Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parent
NAME = Path("memonger", "support", "libkernels.so")

#: Type of a number in C -> its converter, its type in ctypes, its format in the module struct.
_SCALARS: dict[str, tuple[Callable[[Value], Value], Value, str]] = {
    "bool": (bool, ctypes.c_bool, "?"),
    "int64_t": (operator.index, ctypes.c_int64, "q"),
    "double": (float, ctypes.c_double, "d"),
}
_DTYPES: dict[str, np.dtype[Value] | None] = {
    f"{name}s": np.dtype(name.lower())
    for name in ("Bool", "Int8", "Int32", "Int64", "UInt16", "UInt64")
}
_DTYPES.update(Floats=np.dtype("float32"), Doubles=np.dtype("float64"), Bytes=None)

_MAX_COUNT = 2**31 - 1  # elements of an array: compiled code counts them in int32
_TOO_LARGE = f"the network is too large, of something it has more than {_MAX_COUNT}"
#: Status with which a call ends (kernels.h) -> the error to raise.
_ERRORS: dict[int, tuple[type[Exception], str]] = {
    1: (MemoryError, "there is not enough memory"),
    2: (MemongerError, _TOO_LARGE),
    3: (ValueError, "a state is longer than those of the archive"),
}

Field = Tuple[str, str]  # type and name, as in C
S = TypeVar("S", bound="Struct")


class Struct(Tuple[Value, ...]):
    """The struct of the same name in a header, which says what its fields mean.

    Its fields are given in order or by name. A class annotates those that are not arrays.
    """

    classes: ClassVar[dict[str, type[Struct]]] = {}
    names: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        cls.names = tuple([name for _, name in _fields(cls.__name__)])
        for i, name in enumerate(cls.names):
            setattr(cls, name, property(operator.itemgetter(i)))
        Struct.classes[cls.__name__] = cls

    def __new__(cls: type[S], *fields: object, **by_name: object) -> S:
        """Make a struct of all its fields; raise TypeError if one is missing or unknown."""
        names = cls.names[len(fields) :]
        if {*names} != {*by_name} or len(fields) > len(cls.names):
            raise TypeError(f"{cls.__name__} has the fields {cls.names} in C")
        return super().__new__(cls, (*fields, *[by_name[name] for name in names]))

    def __getnewargs__(self) -> tuple[object, ...]:
        return tuple(self)

    def replace(self: S, **changes: object) -> S:
        """Return a copy with other values of some fields."""
        return type(self)(**{**dict(zip(self.names, self)), **changes})

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> AnyArray: ...


class _Array(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("count", ctypes.c_int64)]


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("last", "used", "inner", "outer", "ended")]


class _Kernel(NamedTuple):
    """A compiled function, its parameters and its results."""

    name: str
    function: Value
    takes_memory: bool  # its first argument is a Memory; it is called by its ``try_`` function
    parameters: list[Field]  # arrays, structs (``const T *``) and numbers
    results: list[str]  # the type of each; the number that a ``try_`` function returns is last
    returns_number: bool

    def __call__(self, *arguments: Value) -> Value:
        """Call the function; raise TypeError for an argument that is not what the header says.

        Arrays must be C-contiguous; they are not copied. Return the number that the function
        returns, then its results: new arrays of one dimension, structs and numbers. They are a
        tuple if there are several.
        """
        if len(arguments) != len(self.parameters):
            raise TypeError(f"{self.name} takes {[name for _, name in self.parameters]}")
        memory = _Memory()
        first = [ctypes.byref(memory)] if self.takes_memory else []
        # `values` keeps alive what C has pointers to, until the call returns.
        values = [_to_c(*field, value) for field, value in zip(self.parameters, arguments)]
        formats = [_format(kind) for kind in self.results]
        buffers = [ctypes.create_string_buffer(struct.calcsize(layout)) for layout in formats]
        try:
            number = self.function(*first, *values, *buffers)
            if self.takes_memory and number:
                error, message = _ERRORS[number]
                raise error(f"{self.name}: {message}")
            numbers = map(struct.unpack, formats, buffers)
            results = [_from_c(kind, iter(parts)) for kind, parts in zip(self.results, numbers)]
        finally:
            _library().give_back(ctypes.byref(memory), _Memory())
        if self.returns_number:
            results.insert(0, results.pop() if self.takes_memory else number)
        return tuple(results) if len(results) != 1 else results[0]


class _Compiled:
    """The functions that a header marks KERNEL, by name."""

    def __getattr__(self, name: str) -> _Kernel:
        kernel = _kernel(name)
        setattr(self, name, kernel)
        return kernel


compiled = _Compiled()


def constant(name: str) -> int:
    """Return a constant from an ``enum`` of a header."""
    return _constants()[name]


def _to_c(kind: str, name: str, value: Value) -> Value:
    """Convert an argument to what ctypes passes; a struct is packed, and passed by its address."""
    numbers = _flatten(kind, name, value)
    if kind in _DTYPES:
        return _Array(*numbers)
    return numbers[0] if kind in _SCALARS else struct.pack(_format(kind), *numbers)


def _flatten(kind: str, name: str, value: Value) -> list[Value]:
    """List the numbers that a value consists of; an array is its address and its count."""
    if kind in _SCALARS:
        return [_SCALARS[kind][0](value)]
    if kind not in _DTYPES:
        if type(value) is not Struct.classes.get(kind):
            raise TypeError(f"{name} must be a {kind}, not {type(value).__name__}")
        fields = zip(_fields(kind), value)
        return [number for field, part in fields for number in _flatten(*field, part)]
    dtype = _DTYPES[kind]
    if not isinstance(value, np.ndarray) or (dtype or value.dtype) != value.dtype:
        raise TypeError(f"{name} must be an array of {dtype}, not {getattr(value, 'dtype', value)}")
    if dtype and value.size > _MAX_COUNT:
        raise MemongerError(f"{name}: {_TOO_LARGE}")
    if not value.flags.c_contiguous:
        raise TypeError(f"{name} must stand in one piece")
    return [value.__array_interface__["data"][0], value.size if dtype else value.nbytes]


def _from_c(kind: str, numbers: Iterator[Value]) -> Value:
    """Make a copy of a result from the numbers that it consists of."""
    if kind in _SCALARS:
        return next(numbers)
    dtype = _DTYPES.get(kind)
    if dtype is None:
        return Struct.classes[kind](*[_from_c(field, numbers) for field, _ in _fields(kind)])
    address, count = next(numbers), next(numbers)
    return np.frombuffer(ctypes.string_at(address, count * dtype.itemsize), dtype).copy()


# ---------------------------------------------------------------- what the headers say


@lru_cache(None)
def _library() -> ctypes.CDLL:
    """Load the library beside this file; in a clone where none was built, the installed one."""
    in_clone = (ROOT / "setup.py").exists()
    build = f"run in {ROOT}: python setup.py build_ext -i"
    remedy = build if in_clone else "install memonger again"
    paths = [Path(folder, NAME) for folder in [str(ROOT), *sys.path]]
    path = next(filter(Path.exists, paths), None)
    if path is None:
        raise MemongerError(f"{paths[0]} is missing; {remedy}")
    library = ctypes.CDLL(str(path))
    headers = getattr(library, "headers", lambda: None)  # it may be older than that
    if headers() != zlib.crc32(_headers().encode()) >> 1:
        raise MemongerError(f"{path} was built from other headers; {remedy}")
    library.give_back.argtypes = ctypes.POINTER(_Memory), _Memory
    library.give_back.restype = None
    return library


@lru_cache(None)
def _headers() -> str:
    """Read all headers, without their comments."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.h")))
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


@lru_cache(None)
def _constants() -> dict[str, int]:
    constants: dict[str, int] = {}
    for names in re.findall(r"enum \{([^}]*)\};", _headers()):
        number = -1
        for item in filter(None, map(str.strip, names.split(","))):
            name, _, value = item.partition("=")
            number = int(value) if value else number + 1
            constants[name.strip()] = number
    return constants


@lru_cache(None)
def _fields(kind: str) -> list[Field]:
    """List the fields of a struct: ``Int32s first, walk_row;`` are two."""
    typedef = re.search(rf"typedef struct \{{([^}}]*)\}} {kind};", _headers())
    if typedef is None:
        raise TypeError(f"no header has a struct {kind}")
    lines = [line.split(None, 1) for line in typedef[1].split(";")[:-1]]
    return [(kind, name.strip()) for kind, names in lines for name in names.split(",")]


@lru_cache(None)
def _format(kind: str) -> str:
    """Return the format of a type in the module struct; a struct is aligned to 8 bytes."""
    if kind in _DTYPES:
        return "Pq"
    if kind in _SCALARS:
        return _SCALARS[kind][2]
    return f"0q{''.join([_format(field) for field, _ in _fields(kind)])}0q"


def _kernel(name: str) -> _Kernel:
    """Find the declaration of a function in the headers, and make it callable."""
    declared = re.search(rf"^KERNEL (\w+) {name}\(([^)]*)\);", _headers(), re.MULTILINE)
    if declared is None:
        raise AttributeError(f"no header has a KERNEL {name}")
    return_type, declarations = declared[1], [text.strip() for text in declared[2].split(",")]
    takes_memory = declarations[0] == "Memory *memory"
    types: list[Value] = [ctypes.POINTER(_Memory)] if takes_memory else []
    parameters: list[Field] = []
    results: list[str] = []
    for declaration in declarations[len(types) :]:
        kind, field = re.sub(r"\bconst\b", "", declaration).replace("*", " ").split()
        if "*" in declaration and "const" not in declaration:
            results.append(kind)
        else:
            parameters.append((kind, field))
            by_value = _Array if kind in _DTYPES else _SCALARS.get(kind, (None, None))[1]
            types.append(by_value or ctypes.c_char_p)
    returns_number = return_type in _SCALARS
    if takes_memory and returns_number:
        results.append(return_type)
    function = _library()[f"try_{name}" if takes_memory else name]
    function.argtypes = [*types, *[ctypes.c_char_p] * len(results)]
    function.restype = ctypes.c_int64 if takes_memory else _SCALARS[return_type][1]
    return _Kernel(name, function, takes_memory, parameters, results, returns_number)
