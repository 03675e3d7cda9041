"""Pass the results of a training step to a monitor's callback, under the names of MXNet's executor.

See ``GraphExecutor::ExecuteMonOutputCallback`` and ``ExecuteMonInputCallback`` in
``src/executor/graph_executor.cc``. Each result is passed once, even if it is recomputed.
"""

from __future__ import annotations

import functools
from typing import Callable, Mapping

from memonger.graph.operators.gradients import Attrs, alone
from memonger.graph.operators.recorded import LEGACY
from memonger.schedules.execution.calls import Call, Place
from memonger.schedules.training_step import OURS, TrainingStep
from memonger.support.mxnet import mx, wait_for_engine
from memonger.support.symbols import load_nodes, without_inputs
from memonger.support.types import NDArray

#: Operators with one input whose name is 'data'; the input of others has no name.
DATA = LEGACY.union(
    """
    Dropout LRN LeakyReLU Pooling _contrib_quadratic _image_normalize _image_to_tensor _split_v2
    col2im depth_to_space diag im2col log_softmax repeat softmax space_to_depth squeeze tile
    """.split()
)

Callback = Callable[[bytes, int], None]


class Monitor:
    """Passes the inputs and outputs of the calls of one training step to a callback."""

    def __init__(self, step: TrainingStep, callback: Callback, inputs: bool) -> None:
        self._step, self._callback, self._inputs = step, callback, inputs

    def before(self, call: Call, arrays: Mapping[Place, NDArray]) -> None:
        """Pass the inputs of a call to the callback before it runs, if inputs are monitored."""
        for row in self._rows(call) if self._inputs else ():
            op, attrs, reads = *self._signature(row), self._step.reads[row]
            for name, entry in zip(input_names(op, attrs, len(reads)), reads):
                if self._step.ops[entry[0]] == "null":
                    self._show(self._step.names[entry[0]], arrays[entry])
                self._show(f"{self._step.names[row]}_{name}", arrays[entry])

    def after(self, call: Call, arrays: Mapping[Place, NDArray]) -> None:
        """Pass the outputs of a call to the callback after it has run."""
        for row in self._rows(call):
            op, attrs = self._signature(row)
            signature = self._step.signatures[row]
            names = output_names(op, attrs, signature.inputs, len(signature.tensors))
            for k, name in enumerate(names):
                self._show(f"{self._step.names[row]}_{name}", arrays[row, k])

    def _signature(self, row: int) -> tuple[str, Attrs]:
        signature = self._step.signatures[row]
        return signature.op, tuple(sorted(signature.attrs.items()))

    def _rows(self, call: Call) -> list[int]:
        """Return the rows that a call computes, without those that the schedule has added."""
        rows = dict.fromkeys(place[0] for place in call.writes if not isinstance(place, str))
        return [row for row in rows if not self._step.names[row].startswith(OURS)]

    def _show(self, name: str, array: NDArray) -> None:
        # A copy, because later calls may overwrite the array. The callback frees its handle.
        copy = array.copy()
        wait_for_engine("a monitor of a schedule")
        handle, copy.handle = copy.handle, mx.base.NDArrayHandle()
        self._callback(name.encode(), handle.value)


@functools.lru_cache(maxsize=None)
def output_names(op: str, attrs: Attrs, inputs: int, outputs: int) -> list[str]:
    """Return the names of all outputs of an operator, also of those not in ``list_outputs``."""
    nodes = alone(op, dict(attrs), inputs)
    names = load_nodes(nodes, [[inputs, k, 0] for k in range(outputs)]).list_outputs()
    return [name.partition("_")[2] for name in names]


@functools.lru_cache(maxsize=None)
def input_names(op: str, attrs: Attrs, inputs: int) -> list[str]:
    """Return the names of an operator's inputs: those of ``FListInputNames``, or numbered ones."""
    numbered = [f"input{k}" for k in range(inputs)]
    if op.startswith("_backward_") or inputs == 1:
        return ["data"] if op in DATA else numbered
    if any(name == "num_args" for name, _ in attrs):
        return [f"arg{k}" for k in range(inputs)]
    # MXNet makes variables for inputs that are not given, with the names of the inputs.
    try:
        symbol = without_inputs(op, attrs)(name="f")
    except mx.MXNetError:
        return numbered
    return [name[2:] for name in symbol.list_inputs()]
