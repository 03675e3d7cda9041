"""PyTorch's part of ``peers.py``: what ``activation_memory_budget`` takes of networks of MXNet.

    python benchmarks/peers_torch.py asked.json out.json

It needs PyTorch 2.13, and neither MXNet nor memonger: ``peers.py`` runs it, and writes the network
as JSON. The network is traced with fake tensors, forward and backward, with the decompositions of
``torch.compile``. PyTorch's partitioner then divides it for each budget, and what is alive is
counted operator by operator. Nothing is computed, but for Dropout.
"""

from __future__ import annotations

import ast
import copy
import functools
import itertools
import json
import sys
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch._functorch import config
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import (
    default_partition,
    min_cut_rematerialization_partition,
)
import torch._inductor.lowering  # noqa: F401  which the decompositions read
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import conv_flop_count, flop_registry

LOSSES = "SoftmaxOutput softmax_cross_entropy".split()
#: Of ``torch.compile``; the second is its usual one, and needs a compiler of C++.
BACKENDS = ("aot_eager_decomp_partition", "inductor")
DROPOUT_SHAPE = (256, 512)

Run = Callable[..., Any]  # of tensors and the attributes of an operator, a tensor or several


def _pool(a: Mapping[str, Any], shape: Any, x: Any) -> Any:
    if a.get("global_pool"):
        return (F.adaptive_avg_pool2d if a["pool_type"] == "avg" else F.adaptive_max_pool2d)(x, 1)
    stride, pad = a.get("stride", (1, 1)), a.get("pad", (0, 0))
    pool = F.avg_pool2d if a["pool_type"] == "avg" else F.max_pool2d
    return pool(x, a["kernel"], stride, pad, ceil_mode=a.get("pooling_convention") == "full")


def _convolve(a: Mapping[str, Any], shape: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    stride, pad = a.get("stride", (1, 1)), a.get("pad", (0, 0))
    return F.conv2d(x, weight, bias, stride, pad, groups=a.get("num_group", 1))


def _connect(a: Mapping[str, Any], shape: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    return F.linear(x.flatten(1) if a.get("flatten", True) else x, weight, bias)


def _batch_dot(a: Mapping[str, Any], shape: Any, x: Any, y: Any) -> Any:
    return torch.bmm(x, y.transpose(1, 2) if a.get("transpose_b") else y)


def _lose(a: Mapping[str, Any], shape: Any, x: Any, label: Any) -> Any:
    return F.cross_entropy(x, label, reduction="sum")


_POINTWISE = {"relu": F.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "gelu": F.gelu}
#: The operators of MXNet that the networks have, by attributes, shape of the result, inputs.
_OF_SEVERAL: dict[str, Run] = {
    "Convolution": _convolve,
    "Deconvolution": lambda a, shape, x, w: F.conv_transpose2d(x, w, None, a["stride"]),
    "BatchNorm": lambda a, shape, x, gamma, beta, *_: F.batch_norm(
        x, None, None, gamma, beta, training=True
    ),
    "LayerNorm": lambda a, shape, x, gamma, beta: F.layer_norm(x, x.shape[-1:], gamma, beta),
    "Activation LeakyReLU": lambda a, shape, x: _POINTWISE[a["act_type"]](x),
    "clip": lambda a, shape, x: F.hardtanh(x, a["a_min"], a["a_max"]),
    "Pooling": _pool,
    "FullyConnected": _connect,
    "Flatten Reshape reshape": lambda a, shape, x: x.reshape(shape),
    "transpose": lambda a, shape, x: x.permute(a["axes"]),
    "batch_dot": _batch_dot,
    "softmax": lambda a, shape, x: torch.softmax(x, -1),
    "Dropout": lambda a, shape, x: F.dropout(x, a["p"]),
    "Embedding": lambda a, shape, x, weight: F.embedding(x, weight),
    "elemwise_add broadcast_add": lambda a, shape, x, y: x + y,
    "elemwise_mul": lambda a, shape, x, y: x * y,
    "_div_scalar": lambda a, shape, x: x / a["scalar"],
    "Concat": lambda a, shape, *xs: torch.cat(xs, a.get("dim", 1)),
    "SliceChannel": lambda a, shape, x: x.chunk(a["num_outputs"], 1),
    "BlockGrad": lambda a, shape, x: x.detach(),
    "_copy": lambda a, shape, x: x,
    " ".join(LOSSES): _lose,
}
OPERATORS = {op: run for ops, run in _OF_SEVERAL.items() for op in ops.split()}


def _value(text: str) -> Any:
    """Read an attribute as MXNet writes it."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def loss_of(network: Mapping[str, Any], *variables: Any) -> Any:
    """Run a network on its variables, in their order; return the sum of its losses."""
    values: list[Any] = []
    left, losses = iter(variables), []
    for node, shape in zip(network["nodes"], network["shapes"]):
        if node["op"] == "null":
            values.append([next(left)])
            continue
        attrs = {k: _value(v) for k, v in node.get("attrs", {}).items()}
        inputs = [values[i][k] for i, k, *_ in node["inputs"]]
        result = OPERATORS[node["op"]](attrs, shape, *inputs)
        values.append(result if isinstance(result, (tuple, list)) else [result])
        if node["op"] in LOSSES:
            losses.append(result)
    return sum(losses)


def trace(network: Mapping[str, Any]) -> Callable[[Run], Any]:
    """Trace a training step; return what divides it into the forward and the backward graph."""
    traced: list[Any] = []

    def keep(joint: Any, inputs: Any, **keywords: Any) -> Any:
        traced.extend((copy.deepcopy(joint), inputs, keywords))
        return default_partition(joint, inputs, **keywords)

    pairs = [p for p in zip(network["nodes"], network["shapes"]) if p[0]["op"] == "null"]
    with FakeTensorMode():
        variables = [
            torch.empty(shape, dtype=torch.int64)
            if node["name"] in network["indices"]
            else torch.empty(shape, requires_grad=node["name"] not in network["inputs"])
            for node, shape in pairs
        ]
        step = aot_function(
            functools.partial(loss_of, network),
            fw_compiler=lambda graph, _: graph,
            partition_fn=keep,
            decompositions=select_decomp_table(),
        )
        step(*variables)
    joint, inputs, keywords = traced
    return lambda divide: divide(copy.deepcopy(joint), inputs, **keywords)


def tensors_of(value: Any) -> list[Any]:
    """List the tensors of a value of an operator."""
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def count_flops(node: Any) -> float:
    """Count the FLOPs of an operator, of convolutions and products alone."""
    packet = getattr(node.target, "_overloadpacket", None)
    if packet not in flop_registry:
        return 0.0
    args, keywords = torch.fx.node.map_arg(
        (node.args, node.kwargs), lambda source: source.meta["val"]
    )
    if packet is torch.ops.aten.convolution_backward:  # PyTorch's formula knows no groups
        gradient, x, weight, transposed, wanted = (args[k] for k in (0, 1, 2, 7, 10))
        return float(
            sum(wanted[:2]) * conv_flop_count(x.shape, weight.shape, gradient.shape, transposed)
        )
    return float(flop_registry[packet](*args, **keywords, out_val=node.meta["val"]))


class _Step:
    """The storages of a training step, by number, and its operators in order, in kernels.

    As a compiler does, one kernel runs a pointwise operator or a reduction with those that make
    what it reads, if no other operator has run since. What only its kernel reads is not moved.
    """

    def __init__(self) -> None:
        self.flops = 0.0
        self.sizes: list[int] = []
        self.spans: list[list[int]] = []  # from which operator to which a storage is alive
        self.outside: set[int] = set()  # parameters, inputs, gradients of parameters
        self.read: list[set[int]] = []  # by each operator
        self.written: list[set[int]] = []
        self.work: list[float] = []
        self.kernel: list[int] = []  # of an operator: another one of its kernel, or itself
        self.fusible: dict[int, int] = {}  # by storages that are made: by which operator

    def add_graph(self, graph: Any, before: Mapping[str, Mapping[int, int]]) -> Any:
        """Add a graph; return the storages of its values by name. Those of ``before`` are there.

        Fake tensors tell which storage is whose. What is run again has the same fake tensor, so a
        storage is new where none of an operator's inputs has it.
        """
        storages: dict[str, Mapping[int, int]] = {}
        for node in graph.graph.nodes:
            values = tensors_of(node.meta.get("val"))
            if node.op == "placeholder":
                storages[node.name] = before.get(node.name) or self._new(values)
                if node.name not in before:
                    self.outside.update(storages[node.name].values())
                continue
            old: dict[int, int] = {}
            for source in node.all_input_nodes:
                old.update(storages[source.name])
            if node.op == "output":
                storages[""] = old
            elif all(_address(value) in old for value in values):  # a view, or one of several
                storages[node.name] = {_address(value): old[_address(value)] for value in values}
            else:
                storages[node.name] = self._new(values)
                self._add(node, values, {*old.values()}, {*storages[node.name].values()})
        return storages

    def _new(self, values: Sequence[Any]) -> dict[int, int]:
        """Number the storages of values that are new."""
        new: dict[int, int] = {}
        for value in values:
            if _address(value) not in new:
                new[_address(value)] = len(self.sizes)
                self.sizes.append(value.untyped_storage().nbytes())
                self.spans.append([len(self.read)] * 2)
        return new

    def _add(self, node: Any, values: Sequence[Any], read: set[int], written: set[int]) -> None:
        """Add an operator, which reads and writes these storages."""
        number = len(self.read)
        for storage in read:
            self.spans[storage][1] = number
        flops = count_flops(node)
        self.flops += flops
        self.work.append(max([flops, *(value.numel() for value in values)]))
        self.read.append(read)
        self.written.append(written)
        self.kernel.append(number)
        tags = getattr(node.target, "tags", ())
        if torch.Tag.pointwise in tags or torch.Tag.reduction in tags or not read:
            for storage in read & self.fusible.keys():
                self.kernel[self._find(self.fusible[storage])] = number
            if torch.Tag.reduction not in tags:  # whose result is there when all is read
                self.fusible.update(dict.fromkeys(written, number))
        else:
            self.fusible = {}

    def _find(self, number: int) -> int:
        """Find the operator that stands for the kernel of an operator."""
        while self.kernel[number] != number:
            number = self.kernel[number]
        return number

    def find_peak(self) -> int:
        """Find the most bytes that are alive at once."""
        change = [0] * (len(self.read) + 2)
        for storage, (first, last) in enumerate(self.spans):
            if storage not in self.outside:
                change[first] += self.sizes[storage]
                change[last + 1] -= self.sizes[storage]
        return max(itertools.accumulate(change))

    def predict_seconds(self, rates: Sequence[float]) -> float:
        """Predict the time by a roofline, kernel by kernel."""
        members: dict[int, list[int]] = {}
        readers: dict[int, set[int]] = {}
        for number, read in enumerate(self.read):
            members.setdefault(self._find(number), []).append(number)
            for storage in read:
                readers.setdefault(storage, set()).add(self._find(number))
        peak, bandwidth, call = rates
        seconds = 0.0
        for kernel, numbers in members.items():
            written = set.union(*(self.written[number] for number in numbers))
            moved = set.union(*(self.read[number] for number in numbers)) - written
            moved |= {s for s in written if s in self.outside or readers.get(s, set()) - {kernel}}
            nbytes = sum(self.sizes[storage] for storage in moved)
            work = sum(self.work[number] for number in numbers)
            seconds += max(work / peak, nbytes / bandwidth) + call
        return seconds


def _address(value: Any) -> int:
    return int(value.untyped_storage()._cdata)


def count_step(graphs: Sequence[Any], rates: Sequence[float]) -> dict[str, float]:
    """Count what a training step takes, of its forward and its backward graph."""
    step, forward, backward = _Step(), *graphs
    storages = step.add_graph(forward, {})
    forward_flops = step.flops
    gradients = step.add_graph(backward, storages)[""]
    step.outside.update(gradients.values())
    return {
        "peak": step.find_peak(),
        "flops": step.flops,
        "forward_flops": forward_flops,
        "seconds": step.predict_seconds(rates),
    }


def measure(network: Mapping[str, Any], budgets: Sequence[float], rates: Any) -> Any:
    """Measure a network for each budget, as shares of what it takes without a plan."""
    divide = trace(network)
    none = count_step(divide(default_partition), rates)
    rows = []
    for budget in budgets:
        with config.patch(activation_memory_budget=budget):
            row = count_step(divide(min_cut_rematerialization_partition), rates)
        rows.append(
            {
                "asked": budget,
                "share": row["peak"] / none["peak"],
                "again": (row["flops"] - none["flops"]) / none["forward_flops"],
                "time": row["seconds"] / none["seconds"] - 1,
            }
        )
    return {"step_seconds": none["seconds"], "rows": rows}


def count_other_masks(backend: str, budget: float) -> int:
    """Count the elements that Dropout keeps in the forward pass alone, or in the backward alone."""

    def layer(x: Any) -> Any:
        return F.dropout(torch.exp(torch.sin(x)) + x, 0.5)

    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.rand(DROPOUT_SHAPE, requires_grad=True)
    with config.patch(activation_memory_budget=budget):
        y = torch.compile(layer, backend=backend)(x)
        y.sum().backward()
    assert x.grad is not None
    return int(((y != 0) != (x.grad != 0)).sum())


def main(arguments: Sequence[str]) -> None:
    asked, out = map(Path, arguments)
    content = json.loads(asked.read_text())
    if "network" in content:
        figures = measure(content["network"], content["budgets"], content["rates"])
    else:
        figures = [
            {"backend": b, "budget": budget, "others": count_other_masks(b, budget)}
            for b in BACKENDS
            for budget in content["budgets"]
        ]
    out.write_text(json.dumps({"torch": torch.__version__, "figures": figures}))


if __name__ == "__main__":
    main(sys.argv[1:])
