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
import json
import operator
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
from torch.utils.flop_counter import flop_registry

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


class _Counter(torch.fx.Interpreter):
    """Run a graph on fake tensors and note, for each of its operators, what it takes."""

    def __init__(self, module: Any, step: _Step, first: Mapping[str, Any]) -> None:
        super().__init__(module)
        self.step, self.first = step, first
        self.values: dict[str, Any] = {}

    def run_node(self, n: Any) -> Any:
        if n.op == "placeholder":
            value = self.first[n.name] if n.name in self.first else n.meta["val"]
            self.step.read(value)
            if n.name not in self.first:
                self.step.leave_out(value)
        elif n.op == "output":
            value = super().run_node(n)
        else:
            args, keywords = self.fetch_args_kwargs_from_env(n)
            value = super().run_node(n)
            self.step.count(n.target, args, keywords, value)
        self.values[n.name] = value
        return value


def tensors_of(value: Any) -> list[Any]:
    """List the tensors of a value of an operator."""
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


class _Step:
    """The storages of a training step, and the work and the time of its operators."""

    def __init__(self, rates: Sequence[float]) -> None:
        self.rates = rates
        self.ops, self.flops, self.seconds = 0, 0.0, 0.0
        self.spans: dict[int, list[int]] = {}  # from which operator to which a storage is alive
        self.sizes: dict[int, int] = {}
        self.outside: set[int] = set()
        self.held: list[Any] = []  # so that no storage gets the address of another

    def storage(self, tensor: Any) -> int:
        self.held.append(tensor)
        key = tensor.untyped_storage()._cdata
        self.sizes[key] = tensor.untyped_storage().nbytes()
        return int(key)

    def read(self, value: Any) -> None:
        """Note that a value is alive until now."""
        for tensor in tensors_of(value):
            self.spans.setdefault(self.storage(tensor), [self.ops, self.ops])[1] = self.ops

    def leave_out(self, value: Any) -> None:
        """Count a value no more: parameters, inputs, gradients of parameters."""
        self.outside.update(map(self.storage, tensors_of(value)))

    def count(self, target: Any, args: Any, keywords: Any, value: Any) -> None:
        """Count an operator."""
        inputs, outputs = tensors_of((args, keywords)), tensors_of(value)
        if target is operator.getitem:
            return
        if {*map(self.storage, outputs)} <= {*map(self.storage, inputs)}:
            return  # a view, which keeps its storage alive once it is read itself
        self.read([inputs, outputs])
        self.ops += 1
        flops = 0.0
        formula = flop_registry.get(getattr(target, "_overloadpacket", None))
        if formula is not None:
            flops = float(formula(*args, **keywords, out_val=value))
        sizes = {self.storage(t): min(t.nbytes, self.sizes[self.storage(t)]) for t in inputs}
        sizes.update({self.storage(t): t.nbytes for t in outputs})
        peak, bandwidth, call = self.rates
        self.flops += flops
        work = max([flops, *(t.numel() for t in outputs)])
        self.seconds += max(work / peak, sum(sizes.values()) / bandwidth) + call

    def peak(self) -> int:
        """Return the most bytes that are alive at once."""
        change = [0] * (self.ops + 2)
        for key, (first, last) in self.spans.items():
            if key not in self.outside:
                change[first] += self.sizes[key]
                change[last + 1] -= self.sizes[key]
        most = alive = 0
        for difference in change:
            alive += difference
            most = max(most, alive)
        return most


def count_step(graphs: Sequence[Any], rates: Sequence[float]) -> dict[str, float]:
    """Count what a training step takes, of its forward and its backward graph."""
    step = _Step(rates)
    values: dict[str, Any] = {}
    forward_flops = 0.0
    for graph in graphs:
        counter = _Counter(graph, step, values)
        inputs = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
        mode = next(t.fake_mode for t in tensors_of(inputs) if hasattr(t, "fake_mode"))
        with mode:
            outputs = counter.run(*inputs)
        forward_flops = forward_flops or step.flops
        values = counter.values
    step.leave_out(outputs)
    return {
        "peak": step.peak(),
        "flops": step.flops,
        "forward_flops": forward_flops,
        "seconds": step.seconds,
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
    return rows


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
