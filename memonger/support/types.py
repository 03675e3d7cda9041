"""Types for annotations only: MXNet's classes, and NumPy arrays by the type of their elements.

MXNet has no annotations, so a type checker knows its classes by name only.
"""

from typing import TYPE_CHECKING, Any, Dict, Mapping, Optional, Sequence, Tuple, Union

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
    from typing_extensions import TypedDict
    from typing_extensions import Unpack as Unpack

    Json = Any  # type: ignore[misc]  # a parsed JSON value
    Keywords = Mapping[str, Any]  # type: ignore[misc]  # arguments of `memonger.plan` and others
    AnyArray = Array[Any]  # type: ignore[misc]  # an array that a header names
    Types = Optional[Mapping[str, object]]  # type by name of an input
    Pairs = Sequence[Tuple[str, Sequence[int]]]  # name and shape of inputs; DataDescs are pairs
    #: Shapes of inputs; as a module has them, of data and of labels (or None) in one list.
    Shapes = Union[Mapping[str, Sequence[int]], Pairs, Sequence[Optional[Pairs]]]
    #: Shapes of inputs with None where the batch goes.
    OpenShapes = Union[
        Mapping[str, Sequence[Optional[int]]],
        Sequence[Tuple[str, Sequence[Optional[int]]]],
    ]
    Amount = Union[int, float, str]  # of memory: bytes, a share, or as text such as '6GB'
    SymbolOrBlock = Union[Symbol, Block]
    NamedArrays = Dict[str, NDArray]  # by the names of arguments or auxiliary states
    OutGrads = Union[Mapping[str, NDArray], Sequence[NDArray], NDArray, None]
    Array1 = Array[np.generic]
    Bools = Array[np.bool_]
    Int8s = Array[np.int8]
    Int32s = Array[np.int32]
    Int64s = Array[np.int64]
    UInt64s = Array[np.uint64]
    Floats = Array[np.float32]
    Doubles = Array[np.float64]

    class EnableOptions(TypedDict, total=False):
        """Options of `memonger.enable`."""

        how: Optional[str]
        work: Optional[float]
        budget: Optional[Amount]
        slower_than: Optional[float]
        budget_of: Optional[str]
        optimizer: object
        measure: bool
        gpu: Optional[str]
        patience: Optional[float]
        keep: object
        recompute: object

    class SearchOptions(EnableOptions, total=False):
        """Options of `memonger.plan` that say how to search, for what device, and up to where."""

        planner: str
        ntrial: int
        ctx: object
        until: Optional[str]

    class PlanOptions(SearchOptions, total=False):
        """Options of `memonger.plan`."""

        type_dict: object
        grad_req: object
        devices: int

    class GluonOptions(SearchOptions, total=False):
        """Options of `memonger.gluon.plan`: those of plans, and those of ``hybridize``."""

        active: bool
        clear: bool
        static_alloc: bool
        static_shape: bool
        inline_limit: int
        forward_bulk_size: Optional[int]
        backward_bulk_size: Optional[int]
else:  # annotations are not evaluated, but the names are imported

    def __getattr__(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Any
