"""Calls compiled code: a library of C that is built when the package is installed.

What can be called, and with what, stands in the headers alone (``*.h`` beside the Python file of
the same name); they are read here. See ``kernels.h`` for how arrays and results are passed. The
interpreter's lock is free while compiled code runs.
"""

from __future__ import annotations

import ctypes
import hashlib
import operator
import re
import struct
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Tuple

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
    function: Any
    remembers: bool  # whether it takes a Memory first
    takes: list[Field]  # arrays, structs (``const T *``) and numbers
    tells: list[Field]  # results: their type, and its `_format`; what a `try_` returns is the last
    returns: bool


def call(name: str, *given: Any) -> Any:
    """Call a compiled function with arrays, tuples (for structs) and numbers.

    Arrays must have the type that the header says and stand in one piece; they are not copied.

    Returns
    -------
    Any
        What the function returns, then its results as new arrays of one dimension, tuples (of the
        fields of a struct) and numbers; a tuple if it is more than one.

    Raises
    ------
    TypeError
        If an argument is not what the header says.
    MemoryError
        If there is no memory for what it makes.
    MemongerError
        If there is more of something than compiled code can count.
    """
    kernel = _kernel(name)
    if len(given) != len(kernel.takes):
        raise TypeError(f"{name} takes {[field[1] for field in kernel.takes]}")
    memory = _Memory()
    first = [ctypes.byref(memory)] if kernel.remembers else []
    # `arguments` hold what C is pointed to until it returns.
    arguments = [_to_c(kind, value, field) for (kind, field), value in zip(kernel.takes, given)]
    results = [ctypes.create_string_buffer(struct.calcsize(f)) for _, f in kernel.tells]
    try:
        returned = kernel.function(*first, *arguments, *results)
        if kernel.remembers and returned:
            kind_of_error, message = _ENDS[returned]
            raise kind_of_error(f"{name}: {message}")
        found = [
            _from_c(kind, iter(struct.unpack(layout, result)))
            for (kind, layout), result in zip(kernel.tells, results)
        ]
    finally:
        _library().give_back(ctypes.byref(memory), _Memory())
    if kernel.returns:
        found.insert(0, found.pop() if kernel.remembers else returned)
    return tuple(found) if len(found) != 1 else found[0]


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
        fields = _fields(kind)
        names = tuple([field for _, field in fields])
        if len(value) != len(names) or getattr(value, "_fields", names) != names:
            raise TypeError(f"{kind} has the fields {names} in C")
        return [n for field, part in zip(fields, value) for n in _numbers(field[0], part, field[1])]
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
        return tuple([_from_c(each, numbers) for each, _ in _fields(kind)])
    address, count = next(numbers), next(numbers)
    return np.frombuffer(ctypes.string_at(address, count * dtype.itemsize), dtype).copy()


# ---------------------------------------------------------------- what the headers say


@lru_cache(None)
def _library() -> Any:
    """Load the library beside this file; in a tree where none was built, the installed one."""
    in_tree = any(PACKAGE.rglob("*.c"))  # which a wheel does not have
    remedy = f"run in {ROOT}: python setup.py build_ext -i" if in_tree else "install memonger again"
    places = [Path(folder, NAME) for folder in [str(ROOT), *sys.path]]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        raise MemongerError(f"{places[0]} is missing; {remedy}")
    library = ctypes.CDLL(str(found))
    library.sources.restype = ctypes.c_char_p
    if in_tree and library.sources().decode() != _hash_of_sources():
        raise MemongerError(f"{found} was built from other sources; {remedy}")
    library.give_back.argtypes = ctypes.POINTER(_Memory), _Memory
    library.give_back.restype = None
    return library


def _hash_of_sources() -> str:
    files = sorted(path for kind in ("*.c", "*.h") for path in PACKAGE.rglob(kind))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


@lru_cache(None)
def _headers() -> str:
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.h")))
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


@lru_cache(None)
def _fields(kind: str) -> list[Field]:
    """The fields of a struct, in order: ``Int32s first, walk_row;`` are two."""
    found = re.search(rf"typedef struct \{{([^}}]*)\}} {kind};", _headers())
    if found is None:
        raise TypeError(f"no header has a struct {kind}")
    lines = [line.split(None, 1) for line in found[1].split(";")[:-1]]
    return [(kind, name.strip()) for kind, names in lines for name in names.split(",")]


@lru_cache(None)
def _format(kind: str) -> str:
    """What a type consists of, as the module struct names it; a struct starts at 8 bytes."""
    if kind in _DTYPES:
        return "Pq"
    if kind in _SCALARS:
        return _SCALARS[kind][2]
    return f"0q{''.join([_format(each) for each, _ in _fields(kind)])}0q"


@lru_cache(None)
def _kernel(name: str) -> _Kernel:
    found = re.search(rf"^KERNEL (\w+) {name}\(([^)]*)\);", _headers(), re.MULTILINE)
    if found is None:
        raise TypeError(f"no header has a KERNEL {name}")
    parameters = [parameter.strip() for parameter in found[2].split(",")]
    types: list[Any] = []
    if parameters[0] == "Memory *memory":
        types.append(ctypes.POINTER(_Memory))
    takes: list[Field] = []
    tells: list[Field] = []
    for parameter in parameters[len(types) :]:
        kind, field = re.sub(r"\bconst\b", "", parameter).replace("*", " ").split()
        if "*" in parameter and "const" not in parameter:
            tells.append((kind, _format(kind)))
            continue
        takes.append((kind, field))
        by_value = _Array if kind in _DTYPES else _SCALARS.get(kind, (None, None))[1]
        types.append(by_value or ctypes.c_char_p)
    kind, remembers = found[1], len(types) > len(takes)
    if remembers and kind in _SCALARS:
        tells.append((kind, _format(kind)))
    function = _library()[f"try_{name}" if remembers else name]
    function.argtypes = [*types, *[ctypes.c_char_p] * len(tells)]
    function.restype = ctypes.c_int64 if remembers else _SCALARS[kind][1]
    return _Kernel(function, remembers, takes, tells, kind in _SCALARS)
