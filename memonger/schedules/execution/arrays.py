"""The arrays that an executor is bound to: new ones, those of another, views of larger ones."""

from __future__ import annotations

import ctypes
from typing import Any, Dict, Iterable, Mapping, Sequence

import numpy as np

from memonger.costs.bind import sparse_gradients
from memonger.graph.forward import ForwardGraph
from memonger.graph.inputs import read_requests
from memonger.graph.operators.tensors import Tensor
from memonger.support.errors import MemongerError
from memonger.support.mxnet import mx

Arrays = Dict[str, Any]

STORED_DENSELY = ("-1", "0")  # __storage_type__ of a variable: unknown, default


def requests_of(names: Sequence[str], grad_req: Any) -> dict[str, str]:
    """Read 'write', 'add' or 'null' for each argument from what ``bind`` takes."""
    if isinstance(grad_req, dict):  # MXNet does not mind other names
        grad_req = {name: grad_req.get(name, "null") for name in names}
    return read_requests(names, grad_req)


def refuse_sparse(kinds: Mapping[str, str]) -> None:
    """Refuse inputs that are stored otherwise than densely."""
    for name, kind in kinds.items():
        if kind != "default":
            raise MemongerError(
                f"input {name!r} is stored as {kind}; a schedule takes dense inputs only, so plan "
                "this network with marks, or make it dense with tostype('default')"
            )


def by_name(arrays: Any, names: Sequence[str], required: str = "") -> Arrays:
    """Name the arrays that ``bind`` was given; ``required`` says what they are if none may miss."""
    if not isinstance(arrays, dict):
        given = [None] * len(names) if arrays is None else arrays
        if len(given) != len(names):
            raise MemongerError(f"bind: {len(given)} arrays were given for {len(names)} inputs")
        arrays = dict(zip(names, given))
    found = {name: arrays[name] for name in names if arrays.get(name) is not None}
    for name in names if required else ():
        if name not in found:
            raise MemongerError(f"bind: the {required} {name!r} is missing")
    return found


def tensors_of(graph: ForwardGraph) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Shape and type of each argument and each auxiliary state; only dense ones are taken."""
    nodes = graph.nodes
    kinds = mx.ndarray.ndarray._STORAGE_TYPE_ID_TO_STR
    stored = {nodes[i].name: nodes[i].hidden.get("__storage_type__", "0") for i in graph.arguments}
    refuse_sparse({n: kinds[int(k)] for n, k in stored.items() if k not in STORED_DENSELY})
    sparse = sparse_gradients(graph)
    if sparse:
        raise MemongerError(
            f"the gradient of {nodes[min(sparse)].name!r} is made row by row (sparse_grad), which "
            "a schedule cannot hold; set sparse_grad=False, or plan with marks"
        )
    arguments, states = (
        {nodes[i].name: graph.tensors[i][0] for i in each}
        for each in (graph.arguments, graph.auxiliary)
    )
    return arguments, states


def type_of(array: Any) -> str:
    """Name the type of an array's elements."""
    return np.dtype(array.dtype).name


def zeros(tensor: Tensor, ctx: Any) -> Any:
    """Make an array of zeros."""
    return mx.nd.zeros(tensor.shape, ctx, dtype=tensor.dtype)


def fitted(array: Any, tensor: Tensor, ctx: Any) -> Any:
    """Return an array as a view of one that is there, or a new one where that is too small."""
    if array is None or type_of(array) != tensor.dtype or array.size < tensor.elements:
        return zeros(tensor, ctx)
    if array.shape == tensor.shape:
        return array
    return array.reshape((-1,))[: tensor.elements].reshape(tensor.shape)


def buffered(buffer: Arrays, name: str, tensor: Tensor, ctx: Any) -> Any:
    """Return an array in memory of all executors, which grows if there is too little."""
    array = fitted(buffer.get(name), tensor, ctx)
    if name not in buffer or array.size > buffer[name].size:
        buffer[name] = array
    return array


def held(array: Any) -> Any:
    """Copy an array in a memory pool to the memory of the host.

    The layout of MKLDNN belongs to the memory. Where another executor has used it since, a copy
    would fail, or end the process. To ask for its address makes it plain, whatever is there.
    """
    if array.context.device_type == "cpu":
        address(array)
    return array.copyto(mx.cpu())


def put_back(source: Any, target: Any) -> None:
    """Copy to an array in a memory pool, which has been used for others since."""
    # ``copyto`` would take the layout of what was there for that of the target
    # (``CopyFromToDnsImpl`` in ``src/ndarray/ndarray.cc``); what an operator writes to forgets it.
    target[:] = 0
    source.copyto(target)


def touch(arrays: Iterable[Any]) -> None:
    """Have MXNet's engine order what reads these arrays as if they were written now."""
    every = list(arrays)
    for dtype in {array.dtype for array in every}:  # an operator in place, which computes nothing
        alike = [array for array in every if array.dtype == dtype]
        mx.nd.amp_multicast(*alike, num_outputs=len(alike), out=alike)


def address(array: Any) -> int:
    """Tell where its values are in memory, which is taken if it has not been yet."""
    # MXNet makes it plain, but looks before it waits (``MXNDArrayGetData``), and convolutions that
    # have run lay out their weights later (``MKLDNNDataReorderAsync``).
    mx.nd.waitall()
    pointer = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    return pointer.value or 0
