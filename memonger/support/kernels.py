"""Calls compiled code: a library of C that is built when the package is installed.

Functions, structs and constants stand in the headers alone (``*.h`` beside the Python file of the
same name), which are read here. See ``kernels.h`` for how arrays and results are passed. The
interpreter's lock is free while compiled code runs.
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
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Iterator, NamedTuple, Tuple

import numpy as np

from memonger.support.errors import MemongerError

PACKAGE = Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parent
NAME = Path("memonger", "support", "libkernels.so")

#: Of each type of a number: what makes one of a value, as ctypes and as the module struct name it.
_SCALARS: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "bool": (bool, ctypes.c_bool, "?"),
    "int64_t": (operator.index, ctypes.c_int64, "q"),
    "double": (float, ctypes.c_double, "d"),
}
_DTYPES: dict[str, np.dtype[Any] | None] = {
    f"{name}s": np.dtype(name.lower())
    for name in ("Bool", "Int8", "Int32", "Int64", "UInt16", "UInt64")
}
_DTYPES.update(Floats=np.dtype("float32"), Doubles=np.dtype("float64"), Bytes=None)

_MOST = 2**31 - 1  # elements of an array: what counts them is int32
_TOO_LARGE = f"the network is too large, of something it has more than {_MOST}"
#: What is raised for how a call ends, as in kernels.h.
_ENDS: dict[int, tuple[type[Exception], str]] = {
    1: (MemoryError, "there is not enough memory"),
    2: (MemongerError, _TOO_LARGE),
    3: (ValueError, "a state is longer than those of the archive"),
}

Field = Tuple[str, str]  # its type and its name in C


class Struct(tuple):
    """A struct of a header, by the name of the class; what its fields mean is said there.

    Fields are given in order or by name. A class names the types of those that are no arrays.
    """

    classes: ClassVar[dict[str, type[Struct]]] = {}
    names: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        cls.names = tuple([name for _, name in _fields(cls.__name__)])
        for place, name in enumerate(cls.names):
            setattr(cls, name, property(operator.itemgetter(place)))
        Struct.classes[cls.__name__] = cls

    def __new__(cls, *fields: Any, **more: Any) -> Any:
        """Make one of all its fields; TypeError if they are others."""
        names = cls.names[len(fields) :]
        if {*names} != {*more} or len(fields) > len(cls.names):
            raise TypeError(f"{cls.__name__} has the fields {cls.names} in C")
        return super().__new__(cls, (*fields, *[more[name] for name in names]))

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)

    def replace(self, **changes: Any) -> Any:
        """Return a copy with other values of some fields."""
        return type(self)(**{**dict(zip(self.names, self)), **changes})

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> np.ndarray: ...


class _Array(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("count", ctypes.c_int64)]


class _Memory(ctypes.Structure):
    _fields_ = [
        ("last", ctypes.c_void_p),
        ("used", ctypes.c_int64),
        ("inner", ctypes.c_void_p),
        ("outer", ctypes.c_void_p),
        ("ended", ctypes.c_void_p),
    ]


class _Kernel(NamedTuple):
    """A compiled function, and what it takes and returns."""

    name: str
    function: Any
    remembers: bool  # whether it takes a Memory first
    takes: list[Field]  # arrays, structs (``const T *``) and numbers
    results: list[Field]  # their type, and its `_format`; what a `try_` returns is the last
    returns: bool

    def __call__(self, *arguments: Any) -> Any:
        """Call it with arrays, structs and numbers.

        Arrays must have the type that the header says and stand in one piece; they are not copied.

        Returns
        -------
        Any
            What the function returns, then its results as new arrays of one dimension, structs and
            numbers; a tuple if it is more than one.

        Raises
        ------
        TypeError
            If an argument is not what the header says.
        MemoryError
            If there is no memory for its results.
        MemongerError
            If there is more of something than compiled code can count.
        """
        if len(arguments) != len(self.takes):
            raise TypeError(f"{self.name} takes {[field[1] for field in self.takes]}")
        memory = _Memory()
        first = [ctypes.byref(memory)] if self.remembers else []
        # `values` hold what C is pointed to until it returns.
        values = [_to_c(kind, value, name) for (kind, name), value in zip(self.takes, arguments)]
        results = [ctypes.create_string_buffer(struct.calcsize(f)) for _, f in self.results]
        try:
            returned = self.function(*first, *values, *results)
            if self.remembers and returned:
                kind_of_error, message = _ENDS[returned]
                raise kind_of_error(f"{self.name}: {message}")
            output = [
                _from_c(kind, iter(struct.unpack(layout, result)))
                for (kind, layout), result in zip(self.results, results)
            ]
        finally:
            _library().give_back(ctypes.byref(memory), _Memory())
        if self.returns:
            output.insert(0, output.pop() if self.remembers else returned)
        return tuple(output) if len(output) != 1 else output[0]


class _Compiled:
    """All functions that a header marks KERNEL, by name."""

    def __getattr__(self, name: str) -> _Kernel:
        kernel = _kernel(name)
        setattr(self, name, kernel)
        return kernel


compiled = _Compiled()


def constant(name: str) -> int:
    """Return a constant that a header has in an ``enum``."""
    return _constants()[name]


def _to_c(kind: str, value: Any, name: str) -> Any:
    """Make what C takes of a value; a struct is passed by its address."""
    numbers = _numbers(kind, value, name)
    if kind in _DTYPES:
        return _Array(*numbers)
    return numbers[0] if kind in _SCALARS else struct.pack(_format(kind), *numbers)


def _numbers(kind: str, value: Any, name: str) -> list[Any]:
    """Flatten a value: of each array in it the address and the count."""
    if kind in _SCALARS:
        return [_SCALARS[kind][0](value)]
    if kind not in _DTYPES:
        if type(value) is not Struct.classes.get(kind):
            raise TypeError(f"{name} must be a {kind}, not {type(value).__name__}")
        fields = zip(_fields(kind), value)
        return [number for field, part in fields for number in _numbers(field[0], part, field[1])]
    dtype = _DTYPES[kind]
    if not isinstance(value, np.ndarray) or (dtype or value.dtype) != value.dtype:
        raise TypeError(f"{name} must be an array of {dtype}, not {getattr(value, 'dtype', value)}")
    if dtype and value.size > _MOST:
        raise MemongerError(f"{name}: {_TOO_LARGE}")
    if not value.flags.c_contiguous:
        raise TypeError(f"{name} must stand in one piece")
    return [value.__array_interface__["data"][0], value.size if dtype else value.nbytes]


def _from_c(kind: str, numbers: Iterator[Any]) -> Any:
    """Copy a result."""
    if kind in _SCALARS:
        return next(numbers)
    dtype = _DTYPES.get(kind)
    if dtype is None:
        return Struct.classes[kind](*[_from_c(part, numbers) for part, _ in _fields(kind)])
    address, count = next(numbers), next(numbers)
    return np.frombuffer(ctypes.string_at(address, count * dtype.itemsize), dtype).copy()


# ---------------------------------------------------------------- what the headers say


@lru_cache(None)
def _library() -> Any:
    """Load the library beside this file; in a tree where none was built, the installed one."""
    in_tree = (ROOT / "setup.py").exists()
    remedy = f"run in {ROOT}: python setup.py build_ext -i" if in_tree else "install memonger again"
    places = [Path(folder, NAME) for folder in [str(ROOT), *sys.path]]
    path = next((place for place in places if place.exists()), None)
    if path is None:
        raise MemongerError(f"{places[0]} is missing; {remedy}")
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
    """Tell of what a type consists, as the module struct names it; a struct starts at 8 bytes."""
    if kind in _DTYPES:
        return "Pq"
    if kind in _SCALARS:
        return _SCALARS[kind][2]
    return f"0q{''.join([_format(part) for part, _ in _fields(kind)])}0q"


def _kernel(name: str) -> _Kernel:
    declared = re.search(rf"^KERNEL (\w+) {name}\(([^)]*)\);", _headers(), re.MULTILINE)
    if declared is None:
        raise AttributeError(f"no header has a KERNEL {name}")
    parameters = [parameter.strip() for parameter in declared[2].split(",")]
    types: list[Any] = []
    if parameters[0] == "Memory *memory":
        types.append(ctypes.POINTER(_Memory))
    takes: list[Field] = []
    results: list[Field] = []
    for parameter in parameters[len(types) :]:
        kind, field = re.sub(r"\bconst\b", "", parameter).replace("*", " ").split()
        if "*" in parameter and "const" not in parameter:
            results.append((kind, _format(kind)))
            continue
        takes.append((kind, field))
        by_value = _Array if kind in _DTYPES else _SCALARS.get(kind, (None, None))[1]
        types.append(by_value or ctypes.c_char_p)
    kind, remembers = declared[1], len(types) > len(takes)
    if remembers and kind in _SCALARS:
        results.append((kind, _format(kind)))
    function = _library()[f"try_{name}" if remembers else name]
    function.argtypes = [*types, *[ctypes.c_char_p] * len(results)]
    function.restype = ctypes.c_int64 if remembers else _SCALARS[kind][1]
    return _Kernel(name, function, remembers, takes, results, kind in _SCALARS)
