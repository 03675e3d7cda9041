"""Types for annotations only: MXNet's classes, and NumPy arrays by the type of their elements.

MXNet has no annotations, so a type checker knows its classes by name only.
"""

from typing import TYPE_CHECKING, Any, Mapping

if TYPE_CHECKING:
    import numpy as np
    from mxnet import Context as Context
    from mxnet.executor import Executor as Executor
    from mxnet.gluon import Block as Block
    from mxnet.gluon import Parameter as Parameter
    from mxnet.ndarray import NDArray as NDArray
    from mxnet.symbol import Symbol as Symbol
    from numpy.typing import ArrayLike as ArrayLike
    from numpy.typing import DTypeLike as DTypeLike
    from numpy.typing import NDArray as Array

    Json = Any  # type: ignore[misc]  # a parsed JSON value
    Keywords = Mapping[str, Any]  # type: ignore[misc]  # arguments of `memonger.plan` and others
    AnyArray = Array[Any]  # type: ignore[misc]  # an array that a header names
    Array1 = Array[np.generic]
    Bools = Array[np.bool_]
    Int8s = Array[np.int8]
    Int32s = Array[np.int32]
    Int64s = Array[np.int64]
    Floats = Array[np.float32]
    Doubles = Array[np.float64]
else:  # annotations are not evaluated, but the names are imported

    def __getattr__(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Any
