"""Check the symbol, the shapes and types of its inputs, and the devices of a call."""

from __future__ import annotations

import re
from collections import Counter
from typing import Container, Mapping, NamedTuple, Sequence

import numpy as np

from memonger.graph.operators.recompute import ANY, CPU, GPU
from memonger.graph.operators.tensors import Shape, check_elements
from memonger.support.errors import MemongerError, check_count, did_you_mean, mxnet_message
from memonger.support.mxnet import check_code, mx
from memonger.support.symbols import check_graph, load_nodes, read
from memonger.support.types import Context, DTypeLike, Symbol

#: Endings of the names of parameters that MXNet makes for an operator.
PARAMETER_ENDINGS = ("weight", "bias", "gamma", "beta")
TYPE = "__dtype__"  # attribute of a variable: the type that it was made with


class InputSpec(NamedTuple):
    """Shapes and NumPy type names that the user has given for inputs of a symbol."""

    shapes: dict[str, Shape]
    types: dict[str, str]


def check_symbol(symbol: object) -> Symbol:
    """Return ``symbol`` if it is a valid Symbol with an output; otherwise raise MemongerError."""
    kind = type(symbol).__name__
    if isinstance(symbol, mx.gluon.Block):
        raise MemongerError(
            f"{kind} is a Gluon block, not a Symbol; call it on a variable to get its symbol: "
            "net(mx.sym.var('data'))"
        )
    if isinstance(symbol, mx.mod.BaseModule):
        raise MemongerError(f"{kind} is a Module; plan its symbol before the Module is made")
    if isinstance(symbol, (list, tuple)):
        raise MemongerError(
            f"the network must be one mx.sym.Symbol, not a {kind} of {len(symbol)} symbols; "
            "combine them with mx.sym.Group"
        )
    if not isinstance(symbol, mx.sym.Symbol):
        remedy = f"; read a file by memonger.load({symbol!r})" if isinstance(symbol, str) else ""
        raise MemongerError(f"the network must be an mx.sym.Symbol, not {kind} {symbol!r}{remedy}")
    try:
        graph = read(symbol)
    except (mx.MXNetError, ValueError) as error:  # a cycle, or a name that is not UTF-8
        message = f"the network cannot be written as JSON: {mxnet_message(error)}"
        raise MemongerError(message) from None
    check_graph(graph, "the network")  # otherwise the next line may crash the process
    if not symbol.list_outputs():
        raise MemongerError("the Symbol is an empty Group, which has no outputs to train")
    for name, count in Counter(symbol.list_inputs()).items():
        if count > 1:
            raise MemongerError(
                f"two inputs have the same name, {name!r}; give their operators different names, "
                "or share one mx.sym.Variable"
            )
    return symbol


def trace(net: object, names: Sequence[str]) -> object:
    """Return the symbol of a Gluon block that is called on inputs of these names, in this order.

    What is no block is returned as it is.

    Raises
    ------
    MemongerError
        If no names are given, or if the block cannot be called on symbols.
    """
    if not isinstance(net, mx.gluon.Block):
        return net
    parameters = net.collect_params()
    variables = [mx.sym.var(name) for name in names if name not in parameters]
    what = f"{net.name} ({type(net).__name__})"
    if not variables:
        raise MemongerError(
            f"{what} is a Gluon block; give the shapes of its inputs in the order of its call, "
            "such as data=(32, 3, 224, 224)"
        )
    if mx.util.is_np_array():
        variables = [variable.as_np_ndarray() for variable in variables]
    try:
        outputs, _ = mx.gluon.block._flatten(net(*variables), "output")
        symbol = mx.sym.Group([output for output in outputs if output is not None])
    except Exception as error:  # of any kind: it is the block's own code
        raise MemongerError(
            f"{what} cannot be called on the symbols {', '.join(names)}: {mxnet_message(error)}; "
            "give the shapes of all its inputs in their order, and make it a HybridBlock"
        ) from error
    graph = read(symbol)
    for node in graph["nodes"]:
        if node["op"] == "null" and node["name"] in parameters:
            # Gluon keeps a variable with the type that the parameter had when it was made.
            new = mx.sym.var(node["name"], dtype=parameters[node["name"]].dtype)
            node["attrs"][TYPE] = new.attr(TYPE)
    return load_nodes(graph["nodes"], graph["heads"])


def read_devices(ctx: object) -> Context | str:
    """Return the devices that a plan is for: an existing mx.Context, 'gpu' (any GPU), or 'any'.

    The default is 'gpu' if MXNet is built with CUDA, whether this machine has a GPU or not, and
    otherwise 'any', because the planned symbol may be trained on a GPU elsewhere.
    """
    if ctx is None:
        return GPU if mx.runtime.Features().is_enabled("CUDA") else ANY
    if isinstance(ctx, mx.Context):
        return check_device(ctx)
    if not isinstance(ctx, str) or ctx not in (CPU, GPU, ANY):
        devices = "a device such as mx.cpu() or mx.gpu(0), or 'cpu', 'gpu' or 'any'"
        raise MemongerError(f"ctx must be {devices}, not {ctx!r}")
    return mx.cpu() if ctx == CPU else ctx


def devices_like(ctx: Context, on_cpu: str) -> str:
    """Return the devices of a plan for what is on an existing device: any GPU, or ``on_cpu``.

    So GPUs that share a batch have one plan. ``on_cpu`` is 'cpu', or 'any' if the plan should hold
    on a GPU too.
    """
    return GPU if check_device(ctx).device_type == GPU else on_cpu


def parse_devices(devices: str) -> Context | str:
    """Parse 'cpu(0)', 'gpu(1)', 'cpu', 'gpu' or 'any' to what `read_devices` takes."""
    match = re.fullmatch(r"(cpu|gpu|cpu_pinned|cpu_shared)\(([0-9]{1,9})\)", devices)
    return mx.Context(match[1], int(match[2])) if match else devices


def check_device(ctx: Context) -> Context:
    """Return a device (an mx.Context).

    Raises
    ------
    MemongerError
        If the device does not exist, or MXNet has no code for it.
    """
    count = count_gpus() if ctx.device_type == GPU else 0
    if ctx.device_type == GPU and ctx.device_id >= count:
        raise MemongerError(
            f"{ctx} does not exist, for MXNet finds {count} GPUs; ctx='gpu' plans for a GPU of "
            "another machine"
        )
    if ctx.device_type == GPU:
        check_code(ctx.device_id)
    return ctx


def count_gpus() -> int:
    """Return how many GPUs MXNet finds, without making a CUDA context."""
    try:
        return int(mx.context.num_gpus())
    except mx.MXNetError:  # a CUDA build without a usable driver
        return 0


def read_shapes(
    symbol: Symbol,
    shapes: object,
    keywords: Mapping[str, object],
    type_dict: object,
    devices: int = 1,
) -> InputSpec:
    """Read the shapes and types of inputs from the arguments of a call.

    Parameters
    ----------
    symbol : mx.sym.Symbol
        The network.
    shapes : dict, list of (name, shape), list of mx.io.DataDesc, or None
        Shapes of inputs, for the whole batch.
    keywords : mapping
        Name -> shape of further inputs.
    type_dict : mapping or None
        Name -> type of inputs.
    devices : int
        The number of devices that share the batch.

    Returns
    -------
    InputSpec
        With the shapes of the largest share that a device gets.

    Raises
    ------
    MemongerError
        If a name, a shape or a type is not valid, or the batch cannot be shared.
    """
    arguments, states = symbol.list_arguments(), symbol.list_auxiliary_states()
    shape_of: dict[str, Shape] = {}
    types: dict[str, str] = {}
    axes: dict[str, int] = {}
    unknown = " was given for {!r}, which is not an input of the network"
    for name, shape in [*read_pairs(shapes, types, axes), *keywords.items()]:
        _check_name(name, arguments, "a shape" + unknown, states)
        if not isinstance(shape, (list, tuple, np.ndarray)):
            raise MemongerError(f"input {name!r}: a shape is a tuple of integers, not {shape!r}")
        where = f"input {name!r}: shape {tuple(shape)} holds"
        least = 0 if mx.util.is_np_shape() else 1
        sizes = [check_count(f"{where} {n!r}; every size, the batch too,", n, least) for n in shape]
        checked = check_elements(tuple(sizes))
        first = shape_of.setdefault(name, checked)
        if first != checked:
            raise MemongerError(f"input {name!r} was given two shapes, {first} and {checked}")
    if type_dict is not None and not isinstance(type_dict, Mapping):
        raise MemongerError(f"type_dict must be a dict of input names and types, not {type_dict!r}")
    for name, kind in (type_dict or {}).items():
        _check_name(name, arguments, "a type" + unknown, states)
        types[name] = _type_name(name, kind)
    if check_count("devices", devices, 1) > 1:
        shape_of = _largest_share(shape_of, axes, int(devices))
    return InputSpec(shape_of, types)


def drop_old_types(symbol: Symbol, spec: InputSpec) -> Symbol:
    """Return the symbol without the types of variables that contradict ``spec``.

    The variables of a Gluon block keep their old ``__dtype__`` when it is cast, and MXNet's
    inference then fails. The symbol itself is returned if nothing contradicts, or if inference
    fails without the types too.
    """

    def infer_types(symbol: Symbol) -> dict[str, type | None] | None:
        try:
            arguments, _, auxiliary = symbol.infer_type_partial(**spec.types)
        except mx.MXNetError:  # types contradict one another
            return None
        names = symbol.list_arguments() + symbol.list_auxiliary_states()
        return dict(zip(names, arguments + auxiliary))

    def drop_types(names: Container[str]) -> Symbol:
        graph = read(symbol)
        for node in graph["nodes"]:
            if node["op"] == "null" and node["name"] in names:
                node.get("attrs", {}).pop(TYPE, None)
        return load_nodes(graph["nodes"], graph["heads"])

    if not spec.types or infer_types(symbol) is not None:
        return symbol
    types = infer_types(drop_types(symbol.list_inputs())) or {}
    return drop_types([name for name, kind in types.items() if kind is not None])


def read_grad_req(arguments: Sequence[str], grad_req: object) -> dict[str, str]:
    """Return what `read_requests` returns; raise MemongerError if no gradient is requested."""
    requests = read_requests(arguments, grad_req)
    if set(requests.values()) <= {"null"}:
        raise MemongerError(
            "grad_req requests no gradient at all; give 'write' for the parameters that you train"
        )
    return requests


def read_requests(arguments: Sequence[str], grad_req: object) -> dict[str, str]:
    """Return the request for each argument's gradient: 'write', 'add' or 'null'.

    ``grad_req`` is as in ``simple_bind``; an argument that a dict does not name gets 'null'.
    """
    if isinstance(grad_req, str):
        requests = dict.fromkeys(arguments, grad_req)
    elif isinstance(grad_req, (list, tuple)):
        if len(grad_req) != len(arguments):
            raise MemongerError(
                f"grad_req has {len(grad_req)} entries for the {len(arguments)} arguments of "
                "the network; give one for each of list_arguments(), or a dict"
            )
        requests = dict(zip(arguments, grad_req))
    elif isinstance(grad_req, Mapping):
        for name in grad_req:
            _check_name(
                name, arguments, "grad_req has {!r}, which is not an argument of the network"
            )
        requests = {name: grad_req.get(name, "null") for name in arguments}
    else:
        raise MemongerError(f"grad_req must be a string, a list or a dict, not {grad_req!r}")
    for name, request in requests.items():
        if request not in ("write", "add", "null"):
            raise MemongerError(
                f"grad_req of {name!r} is {request!r}; give one of 'write', 'add', 'null'"
            )
    return requests


def read_pairs(
    shapes: object, types: dict[str, str], axes: dict[str, int]
) -> list[tuple[str, object]]:
    """Return names and shapes; add types and batch axes (-1: none) of DataDescs to the dicts."""
    if shapes is None:
        return []
    if isinstance(shapes, Mapping):
        return list(shapes.items())
    if not isinstance(shapes, (list, tuple)):
        raise MemongerError(f"shapes must be a dict or a list of DataDesc, not {shapes!r}")
    if shapes and all(isinstance(size, int) for size in shapes):
        remedy = f"{{'data': {tuple(shapes)}}}, with the input's name"
        raise MemongerError(f"shapes: {shapes!r} is a shape without a name; write {remedy}")
    pairs: list[tuple[str, object]] = []
    for item in shapes:
        if isinstance(item, mx.io.DataDesc):
            types[item.name] = _type_name(item.name, item.dtype)
            axes[item.name] = mx.io.DataDesc.get_batch_axis(item.layout)
            pairs.append((item.name, tuple(item.shape)))
        elif isinstance(item, (list, tuple)) and len(item) == 2 and isinstance(item[0], str):
            pairs.append((item[0], item[1]))
        elif item is None or isinstance(item, (list, tuple)):
            pairs.extend(read_pairs(item, types, axes))  # (data_shapes, label_shapes)
        else:
            raise MemongerError(f"shapes: {item!r} is neither a DataDesc nor a pair (name, shape)")
    return pairs


def _largest_share(
    shapes: Mapping[str, Shape], axes: Mapping[str, int], devices: int
) -> dict[str, Shape]:
    """Return the shapes of the largest share of a device.

    As ``DataParallelExecutorGroup.decide_slices`` in ``python/mxnet/module/executor_group.py``.
    """
    split = {name: axes.get(name, 0) for name in shapes if axes.get(name, 0) >= 0}
    if not split:
        raise MemongerError(
            f"devices={devices}: no input was given whose batch can be split; give data=(...)"
        )
    sizes: dict[str, int] = {}
    for name, axis in split.items():
        if axis >= len(shapes[name]):
            raise MemongerError(f"input {name!r}: shape {shapes[name]} has no batch axis {axis}")
        sizes[name] = shapes[name][axis]
        first, batch = next(iter(sizes.items()))
        if sizes[name] != batch:
            raise MemongerError(
                f"devices={devices}: all inputs must have one batch size, but {first!r} has {batch}"
                f" and {name!r} {sizes[name]}; give one as a DataDesc whose layout has no 'N'"
            )
    try:
        shares = mx.executor_manager._split_input_slice(batch, [1] * devices)
    except ValueError:
        raise MemongerError(
            f"a batch of {batch} cannot be split among devices={devices}; make it a multiple of "
            f"{devices}"
        ) from None
    largest = max(share.stop - share.start for share in shares)
    return {
        name: tuple(largest if k == split.get(name) else n for k, n in enumerate(shape))
        for name, shape in shapes.items()
    }


def _check_name(
    name: object, arguments: Sequence[str], complaint: str, states: Sequence[str] = ()
) -> None:
    """Raise MemongerError for a name that is neither an argument nor an auxiliary state."""
    if name in arguments or name in states:
        return
    inputs = [n for n in arguments if not n.endswith(PARAMETER_ENDINGS)]
    parameters = [n for n in arguments if n.endswith(PARAMETER_ENDINGS)]
    choices = f"its inputs are {', '.join(inputs)}"
    if parameters:
        some = ", ".join(parameters[:3]) + (", ..." if len(parameters) > 3 else "")
        choices += f", and {len(parameters)} parameters: {some}"
    hint = did_you_mean(name, [*arguments, *states], choices)
    raise MemongerError(complaint.format(name) + hint)


def _type_name(name: str, kind: DTypeLike) -> str:
    """Return the NumPy name of an input's type; raise MemongerError if MXNet does not have it."""
    try:
        dtype = np.dtype(kind)
    except (TypeError, ValueError, SyntaxError):
        raise MemongerError(f"input {name!r}: {kind!r} is not a type of NumPy") from None
    if dtype.type not in mx.nd.ndarray._DTYPE_NP_TO_MX:
        raise MemongerError(f"input {name!r}: MXNet has no type {dtype.name}; cast it to float32")
    return dtype.name
