"""Check which network is planned, at which shapes and for which devices."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import logging
import os
import re
from dataclasses import astuple, dataclass, replace
from typing import Mapping

from memonger.costs.time.cpu import NOMINAL_CPU
from memonger.costs.time.gpus import USUAL, find_sheet
from memonger.costs.time.times import TimedDevice
from memonger.graph import inputs, marks
from memonger.graph.forward import no_collection
from memonger.graph.operators.recompute import ANY, CPU, GPU, targets_of
from memonger.solve.options import Options, read_options, split_options
from memonger.solve.selection import Selection, read_operators, select
from memonger.support.checks import did_you_mean
from memonger.support.errors import MemongerError, UnmatchedError
from memonger.support.mxnet import environment, mx
from memonger.support.symbols import read
from memonger.support.types import Context, Json, Keywords, Symbol

log = logging.getLogger("memonger")

#: Attributes of variables that a bind reads (``src/executor/graph_executor.cc``).
READ_BY_BIND = {"__shape__", "__dtype__", "__storage_type__", "__ctx_group__"}


@dataclass(frozen=True, eq=False)
class Request:
    """A network to be planned, its inputs and its devices."""

    symbol: Symbol  # of the network: without marks, and without what an earlier plan added
    spec: inputs.InputSpec  # of one device's inputs
    grad_req: dict[str, str]  # 'write', 'add' or 'null' for each argument
    ctx: Context | str  # for which devices a plan is, as `inputs.read_devices` returns it
    until: int | None = None  # the node from which on everything is kept
    keep: Selection = Selection()  # the operators that the user keeps
    recompute: Selection = Selection()  # and those to be recomputed where that is possible

    @property
    def device(self) -> Context:
        """The device to bind on: the CPU, so that no CUDA context is made, if no GPU is named."""
        return mx.cpu() if isinstance(self.ctx, str) else inputs.check_device(self.ctx)

    def find_timing_device(self, gpu: str | None, measure: bool = False) -> TimedDevice:
        """Find whose times are meant: those of a GPU by its name in `GPUS`, or of a CPU.

        That is ``gpu`` if it is given. For GPUs it is the first one here; `USUAL` if there is none.
        """
        ctx = self.device
        if self.ctx == GPU:
            ctx = mx.gpu(0) if inputs.count_gpus() else None
        if ctx is None:
            here = USUAL
        else:
            here = find_sheet(ctx.device_id) if ctx.device_type == GPU else NOMINAL_CPU
        if gpu is not None and self.device_type == CPU:
            text = f"gpu={gpu!r}: the plan is for {self.devices}; leave out gpu=, or give ctx='gpu'"
            raise MemongerError(text)
        if measure and (ctx is None or gpu not in (None, here)):
            text = f"measure=True: times are those of gpu={gpu or here!r}, not measured; leave it "
            raise MemongerError(text + "out, or plan where the GPU is, without gpu=")
        return TimedDevice(gpu or here, ctx if measure else None)

    @property
    def device_type(self) -> str:
        """Where it is trained: 'cpu', 'gpu' or 'any'."""
        return self.ctx if isinstance(self.ctx, str) else self.ctx.device_type

    @property
    def targets(self) -> frozenset[str]:
        """Where it is trained, as rules take it."""
        return targets_of(self.device_type)

    @property
    def devices(self) -> str:
        """Where it is trained, in words."""
        return {ANY: "any device", GPU: "any GPU"}.get(self.ctx, str(self.ctx))


def read_call(
    net: object,
    shapes: object = None,
    input_shapes: Mapping[str, object] | None = None,
    type_dict: object = None,
    grad_req: object = "write",
    *,
    ctx: object = None,
    devices: int = 1,
) -> Request:
    """Check the network of a call as it is; arguments are those of ``memonger.plan``."""
    names = [*dict(inputs.read_pairs(shapes, {}, {})), *(input_shapes or {})]
    symbol, place = inputs.check_symbol(inputs.trace(net, names)), inputs.read_devices(ctx)
    spec = inputs.read_shapes(symbol, shapes, input_shapes or {}, type_dict, devices)
    return Request(symbol, spec, inputs.read_grad_req(symbol.list_arguments(), grad_req), place)


def read_arguments(
    call: str, net: object, shapes: object, keywords: Keywords
) -> tuple[Request, Options]:
    """Check the arguments of a call that plans, by keyword as ``memonger.plan`` takes them."""
    of_network, how, input_shapes = split_options(call, keywords)
    options = read_options(ctx=inputs.read_devices(of_network.get("ctx")), **how)
    return read_request(net, shapes, input_shapes, **of_network), options


@no_collection()
def read_request(
    net: object,
    shapes: object = None,
    input_shapes: Mapping[str, object] | None = None,
    type_dict: object = None,
    grad_req: object = "write",
    *,
    ctx: object = None,
    until: object = None,
    keep: object = None,
    recompute: object = None,
    devices: int = 1,
) -> Request:
    """Check the network to plan, what of it is named, and for which devices, as `read_call`."""
    mirroring = os.environ.get("MXNET_BACKWARD_DO_MIRROR", "0")
    if mirroring not in ("", "0"):
        raise MemongerError(
            f"MXNET_BACKWARD_DO_MIRROR is set to {mirroring!r}: MXNet then recomputes nearly every "
            "operator, whatever the plan says, and BatchNorm statistics may stop moving; unset it"
        )
    request = read_call(net, shapes, input_shapes, type_dict, grad_req, ctx=ctx, devices=devices)
    symbol = inputs.drop_old_types(request.symbol, request.spec)
    symbol = marks.clear(marks.remove_plan(symbol))
    layer = None if until in (None, "") else _find_layer(symbol, until)
    request = replace(request, symbol=symbol, until=layer)
    operators = read_operators(symbol, request.spec, keep, recompute)
    return replace(
        request,
        keep=select("keep", keep, operators),
        recompute=select("recompute", recompute, operators),
    )


def _find_layer(symbol: Symbol, name: object) -> int:
    """Find the first operator of this name, or with such an output; else one with it in its name.

    A name with ``*`` or ``?`` is a pattern. Copies of the original take parts of names too.
    """
    internals = symbol.get_internals()
    graph = read(internals)
    nodes = graph["nodes"]
    operators = [(i, node["name"]) for i, node in enumerate(nodes) if node["op"] != "null"]
    heads = zip((head[0] for head in graph["heads"]), internals.list_outputs())
    outputs = [(i, output) for i, output in heads if nodes[i]["op"] != "null"]
    if isinstance(name, str):
        pattern = re.compile(fnmatch.translate(name))
        tests = name.__eq__, pattern.match if {*"*?"} & {*name} else lambda text: name in text
        for test in tests:
            for i, text in sorted([*operators, *outputs]):
                if test(text):
                    log.info("until=%r is %r", name, nodes[i]["name"])
                    return i
    names = list(dict.fromkeys(text for _, text in operators))
    some = ", ".join(map(repr, names[len(names) // 2 :][:3]))
    hint = did_you_mean(name, names, f"give the name of one, such as {some}")
    raise UnmatchedError(f"until={name!r} is no operator of the network{hint}")


def read_structure(symbol: Symbol) -> Json:
    """Read the graph of a symbol, of its names and attributes only those on which a plan depends.

    MXNet makes new names of operators each time. Attributes of variables may hold addresses of
    objects, as ``__init__`` does of Gluon's ``Constant``.
    """
    return _strip(read(symbol))


#: Attributes of operators that a bind does not read, and that may differ at each start: MXNet
#: numbers the first, and the other is the text of an initializer, with its address.
MADE_ANEW = ("__subgraph_name__", "__init__")


def _strip(graph: Json) -> Json:
    for node in graph["nodes"]:
        if node["op"] != "null":
            del node["name"]
            for name in MADE_ANEW:
                node.get("attrs", {}).pop(name, None)
            for subgraph in node.get("subgraphs", ()):
                _strip(subgraph)
        elif "attrs" in node:
            node["attrs"] = {k: v for k, v in node["attrs"].items() if k in READ_BY_BIND}
    return graph


def read_mxnet_variables() -> dict[str, str]:
    """Read the environment variables that MXNet reads; an empty one is none to it."""
    with environment():
        return {k: v for k, v in os.environ.items() if v and k.startswith(("MXNET_", "NNVM_"))}


def fingerprint(request: Request, options: Options) -> str:
    """Hash everything that a plan depends on."""
    inputs_and_devices = request.spec, request.grad_req, str(request.ctx)
    chosen = request.until, request.keep.nodes, request.recompute.nodes
    structure, variables = read_structure(request.symbol), read_mxnet_variables()
    parts = structure, variables, inputs_and_devices, chosen, astuple(options)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
