"""Check the network of a call: its symbol, its shapes, the operators it names and its devices."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import astuple, dataclass, replace
from typing import Mapping, NamedTuple

from memonger.costs.time.cpu import NOMINAL_CPU
from memonger.costs.time.gpus import USUAL, find_sheet
from memonger.graph import inputs, marks
from memonger.graph.forward import AFTERWARDS
from memonger.graph.operators.recompute import ANY, CPU, GPU
from memonger.solve.limits import Limits, check_keywords, read_limits
from memonger.solve.selection import Selection, find_layer, read_operators, select
from memonger.support.errors import MemongerError
from memonger.support.mxnet import environment, mx
from memonger.support.symbols import read
from memonger.support.types import Context, Json, PlanOptions, Symbol, Unpack

#: The attributes of variables that a bind reads (``src/executor/graph_executor.cc``), or a plan.
READ_BY_BIND = {"__shape__", "__dtype__", "__storage_type__", "__ctx_group__", AFTERWARDS}


class TimedDevice(NamedTuple):
    """The device whose times are predicted or measured."""

    sheet: str  # the device with the rates: `NOMINAL_CPU`, or the name of a GPU in `GPUS`
    ctx: Context | None = None  # the device on which operators are measured; None: none is measured


@dataclass(frozen=True, eq=False)
class Network:
    """A network to be planned, its inputs and its devices."""

    symbol: Symbol  # without marks, and without the nodes of an earlier plan
    spec: inputs.InputSpec  # of the inputs of one device
    grad_req: dict[str, str]  # 'write', 'add' or 'null' for each argument
    ctx: Context | str  # the devices of the plan, as `inputs.read_devices` returns them
    until: int | None = None  # this node and all later ones are kept
    keep: Selection = Selection()  # operators not to recompute
    recompute: Selection = Selection()  # operators to recompute where that is possible

    @property
    def device(self) -> Context:
        """The device to bind on: if no GPU is named the CPU, which needs no CUDA context."""
        return mx.cpu() if isinstance(self.ctx, str) else inputs.check_device(self.ctx)

    def find_timing_device(self, gpu: str | None, measure: bool = False) -> TimedDevice:
        """Find the device whose times a plan uses, and whether its operators are measured.

        It is the GPU named ``gpu`` (one of `GPUS`) if that is given. Otherwise it is the GPU that
        the plan is for; for any GPU, the first of this machine, or `USUAL` if there is none; and
        for other devices a nominal CPU.
        """
        ctx = self.device
        if self.ctx == GPU:
            ctx = mx.gpu(0) if inputs.count_gpus() else None
        if ctx is None:
            here = USUAL
        else:
            here = find_sheet(ctx.device_id) if ctx.device_type == GPU else NOMINAL_CPU
        if gpu is not None and self.device_type == CPU:
            raise MemongerError(
                f"gpu={gpu!r} predicts times of a GPU, but the plan is for {self.devices}; leave "
                "out gpu=, or give ctx='gpu'"
            )
        if measure and (ctx is None or gpu not in (None, here)):
            raise MemongerError(
                f"measure=True cannot measure {gpu or here!r}, which this machine does not have; "
                "leave it out, or plan where the GPU is, without gpu="
            )
        return TimedDevice(gpu or here, ctx if measure else None)

    @property
    def device_type(self) -> str:
        """The type of the devices that train the network: 'cpu', 'gpu' or 'any'."""
        return self.ctx if isinstance(self.ctx, str) else self.ctx.device_type

    @property
    def devices(self) -> str:
        """A description of the devices that train the network."""
        return {ANY: "any device", GPU: "any GPU"}.get(self.ctx, str(self.ctx))


def read_call(
    call: str,
    net: object,
    shapes: object,
    input_shapes: Mapping[str, object],
    **options: Unpack[PlanOptions],
) -> tuple[Network, Limits]:
    """Check the arguments of a call that plans; ``call`` is its name, for messages."""
    check_keywords(call, input_shapes)
    options["ctx"] = inputs.read_devices(options.get("ctx"))
    limits = read_limits(**options)
    return read_unplanned(net, shapes, input_shapes, **options), limits


def read_network(
    net: object,
    shapes: object = None,
    input_shapes: Mapping[str, object] | None = None,
    **options: Unpack[PlanOptions],
) -> Network:
    """Check the network of a call, with its marks; arguments are those of ``memonger.plan``."""
    type_dict, devices = options.get("type_dict"), options.get("devices", 1)
    names = [*dict(inputs.read_pairs(shapes, {}, {})), *(input_shapes or {})]
    symbol = inputs.check_symbol(inputs.trace(net, names))
    place = inputs.read_devices(options.get("ctx"))
    spec = inputs.read_shapes(symbol, shapes, input_shapes or {}, type_dict, devices)
    requests = inputs.read_grad_req(symbol.list_arguments(), options.get("grad_req", "write"))
    return Network(symbol, spec, requests, place)


def read_unplanned(
    net: object,
    shapes: object = None,
    input_shapes: Mapping[str, object] | None = None,
    **options: Unpack[PlanOptions],
) -> Network:
    """Check the network to plan, without its marks, and the operators that the call names."""
    mirroring = os.environ.get("MXNET_BACKWARD_DO_MIRROR", "0")
    if mirroring not in ("", "0"):
        raise MemongerError(
            f"MXNET_BACKWARD_DO_MIRROR={mirroring!r} makes MXNet recompute nearly every operator, "
            "whatever the plan, and BatchNorm statistics may stop moving; unset it"
        )
    network = read_network(net, shapes, input_shapes, **options)
    symbol = inputs.drop_old_types(network.symbol, network.spec)
    symbol = marks.clear(symbol)
    until, keep, recompute = options.get("until"), options.get("keep"), options.get("recompute")
    layer = None if until in (None, "") else find_layer(symbol, until)
    operators = read_operators(symbol, network.spec, keep, recompute)
    return replace(
        network,
        symbol=symbol,
        until=layer,
        keep=select("keep", keep, operators),
        recompute=select("recompute", recompute, operators),
    )


def read_structure(symbol: Symbol) -> Json:
    """Return the graph of a symbol, with only the names and attributes on which a plan depends.

    MXNet makes new names of operators in each process. Attributes of variables may contain
    addresses of objects, such as ``__init__`` of Gluon's ``Constant``.
    """
    return _strip(read(symbol))


#: Attributes of operators that a bind does not read and that differ between processes: the first
#: is numbered, the second contains the address of an initializer.
MADE_ANEW = ("__subgraph_name__", "__init__")


def _strip(graph: Json) -> Json:
    for node in graph["nodes"]:
        if node["op"] != "null":
            del node["name"]
            for name in MADE_ANEW:
                node.get("attrs", {}).pop(name, None)
            for subgraph in node.get("subgraphs", ()):
                for inner in _strip(subgraph)["nodes"]:
                    inner.pop("name", None)
        elif "attrs" in node:
            node["attrs"] = {k: v for k, v in node["attrs"].items() if k in READ_BY_BIND}
    return graph


def read_mxnet_variables() -> dict[str, str]:
    """Return the environment variables of MXNet, which treats an empty variable as unset."""
    with environment():
        return {k: v for k, v in os.environ.items() if v and k.startswith(("MXNET_", "NNVM_"))}


def fingerprint(network: Network, limits: Limits) -> str:
    """Return a hash of everything that a plan depends on, as the key of a cached plan.

    Names are not part of it: Gluon and ``NameManager`` count them on, so that the same network,
    made anew, has other ones. Inputs are known by their positions.
    """
    structure, variables = read_structure(network.symbol), read_mxnet_variables()
    spec = network.spec
    for node in structure["nodes"]:
        if node["op"] == "null":
            name = node.pop("name")
            asked = network.grad_req.get(name)
            node["given"] = spec.shapes.get(name), spec.types.get(name), asked
    chosen = network.until, network.keep.nodes, network.recompute.nodes
    parts = structure, variables, str(network.ctx), chosen, astuple(limits)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
