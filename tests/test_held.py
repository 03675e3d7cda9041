"""What operators hold beside the pool: counted, and found in the resident memory of a process.

``gpu_dry_run/test_held.py`` has the same on a GPU.
"""

import json
import os
import subprocess
import sys
from typing import Any, Dict, List, NamedTuple, Tuple

import memonger
import mxnet as mx
import pytest

MB = 2**20
HOWS: Dict[str, Dict[str, Any]] = {"marks": {}, "schedule": {"how": "schedule", "work": 2.0}}
PATIENCE = 0.02


class Recurrent(NamedTuple):
    """A network with fused recurrent layers, between what can be recomputed."""

    mode: str
    bidirectional: bool = False
    stacked: int = 1  # layers of each RNN
    residual: bool = False
    dropout: bool = False
    inputs: int = 200
    steps: int = 80
    batch: int = 32
    units: int = 200
    blocks: int = 2

    def build(self) -> Tuple[Any, Dict[str, Tuple[int, ...]]]:
        """Build the symbol; the shapes of its inputs."""
        x = mx.sym.Variable("data")
        for k in range(self.blocks):
            more = {}
            if self.mode == "lstm":
                more = {"state_cell": self._state("cell%d" % k)}
            y = mx.sym.RNN(
                x,
                mx.sym.Variable("parameters%d" % k),
                self._state("state%d" % k),
                mode=self.mode,
                state_size=self.units,
                num_layers=self.stacked,
                bidirectional=self.bidirectional,
                name="rnn%d" % k,
                **more,
            )
            for j in range(3):
                y = mx.sym.FullyConnected(y, num_hidden=self.units, flatten=False)
                y = mx.sym.Activation(y, act_type=("sigmoid", "tanh", "softrelu")[j])
            if self.residual and (k or self.inputs == self.units):
                y = y + x
            x = mx.sym.Dropout(y, p=0.2) if self.dropout else y
        x = mx.sym.FullyConnected(mx.sym.reshape(x, shape=(-1, self.units)), num_hidden=10)
        label = mx.sym.reshape(mx.sym.Variable("softmax_label"), shape=(-1,))
        rows = (self.steps, self.batch)
        shapes = {"data": (*rows, self.inputs), "softmax_label": rows}
        return mx.sym.SoftmaxOutput(x, label, name="softmax"), shapes

    def _state(self, name: str) -> Any:
        layers = self.stacked * (2 if self.bidirectional else 1)
        return mx.sym.Variable(name, shape=(layers, self.batch, self.units))


def as_module(symbol: Any, shapes: Any) -> Dict[str, str]:
    """The gradients that Module asks for."""
    return {name: "null" if name in shapes else "write" for name in symbol.list_arguments()}


def plan_of(network: Recurrent, how: str, **options: Any) -> memonger.Plan:
    symbol, shapes = network.build()
    options.update(HOWS[how])
    requests = as_module(symbol, shapes)
    return memonger.plan(symbol, shapes, grad_req=requests, patience=PATIENCE, **options)


def unplanned(symbol: Any, shapes: Any, **options: Any) -> memonger.Plan:
    """No plan, for a budget that allows it."""
    requests = as_module(symbol, shapes)
    return memonger.plan(symbol, shapes, grad_req=requests, budget=1.0, **options)


NETWORKS: Dict[str, Recurrent] = {
    "stacked LSTM": Recurrent("lstm", stacked=3),
    "residual LSTM with Dropout": Recurrent("lstm", residual=True, dropout=True, blocks=3),
    "bidirectional LSTM": Recurrent("lstm", bidirectional=True, stacked=2, inputs=120),
    "bidirectional GRU": Recurrent("gru", bidirectional=True, residual=True, blocks=3),
    "stacked GRU with Dropout": Recurrent("gru", stacked=3, dropout=True, inputs=80, blocks=3),
    "tanh, large batch": Recurrent("rnn_tanh", stacked=4, steps=40, batch=144, blocks=3),
    "bidirectional relu": Recurrent("rnn_relu", bidirectional=True, stacked=2, residual=True),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_resident_memory_is_what_is_told(name: str) -> None:
    """Without a plan, with marks and with a schedule; and no plan takes more than none."""
    found = measured(NETWORKS[name])
    for told, grown in found.values():
        assert abs(grown - told) < 0.03 * told, found
    plain = found["no plan"]
    for how in HOWS:
        assert found[how][0] < plain[0] and found[how][1] < plain[1], found


def test_kernels_that_are_not_of_mkldnn_hold_no_more_than_is_told() -> None:
    """They write only a part of what they ask for; MXNET_USE_MKLDNN_RNN is read by MXNet."""
    network = Recurrent("lstm", stacked=2, residual=True)
    for told, grown in measured(network, MXNET_USE_MKLDNN_RNN="0").values():
        assert 0.85 * told < grown < 1.03 * told


def test_a_budget_of_the_device_bounds_what_operators_hold_too() -> None:
    network = Recurrent("lstm", residual=True, dropout=True, steps=20, units=128, inputs=128)
    symbol, shapes = network.build()
    plain = unplanned(symbol, shapes)
    assert plain.held_bytes == 2 * 20 * 32 * 128 * (6 - 1) * 4  # as cuDNN is said to hold
    options: Any = {"budget_of": "device", "grad_req": as_module(symbol, shapes)}
    with pytest.raises(memonger.BudgetError, match="what operators hold") as raised:
        memonger.plan(symbol, shapes, budget=plain.held_bytes, patience=PATIENCE, **options)
    least = raised.value.least_bytes
    assert plain.held_bytes < least < plain.device_bytes
    for how in HOWS.values():
        plan = memonger.plan(symbol, shapes, budget=least, patience=PATIENCE, **options, **how)
        assert plan.device_bytes <= least and plan.held_bytes == plain.held_bytes


def test_the_largest_batch_counts_what_operators_hold() -> None:
    """It grows with the batch."""
    network = Recurrent("gru", stacked=2, steps=20, units=128, inputs=128)
    symbol, _ = network._replace(batch=0).build()
    of_a_row = 2 * 20 * 128 * (2 * 7 - 1) * 4  # as cuDNN is said to hold
    budget = 32 * of_a_row

    def sized(batch: Any) -> Any:
        states = {"state%d" % k: (network.stacked, batch, 128) for k in range(network.blocks)}
        return {"data": (20, batch, 128), "softmax_label": (20, batch), **states}

    found = memonger.largest_batch(
        symbol, sized(None), budget=budget, budget_of="device", patience=PATIENCE
    )
    assert 8 < found.unplanned_batch <= found.batch < 32
    assert found.plan.held_bytes == found.batch * of_a_row
    assert found.plan.device_bytes <= budget


def measured(network: Recurrent, **environment: str) -> Dict[str, Tuple[int, int]]:
    """Bytes that are told of each way, and by which the memory of a process grows."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, json.dumps(network)],
        env=dict(
            os.environ,
            PYTHONPATH=os.pathsep.join(sys.path),
            MALLOC_MMAP_THRESHOLD_="65536",  # large arrays go back at once
            OMP_NUM_THREADS="1",
            **environment,
        ),
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return {how: tuple(pair) for how, pair in map(json.loads, done.stdout.splitlines())}


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _step(symbol: Any, shapes: Any) -> Any:
    """Bind, fill, and take two steps; an executor with all its memory."""
    executor = symbol.simple_bind(mx.cpu(), grad_req=as_module(symbol, shapes), **shapes)
    for array in executor.arg_arrays:
        array[:] = 0.01
    for _ in range(2):
        executor.forward(is_train=True)
        executor.backward()
        mx.nd.waitall()
    return executor


def _main(network: Recurrent) -> None:
    """Take steps by each way, in a process of its own."""
    symbol, shapes = network.build()
    ways: List[Tuple[str, Any, int]] = []
    for how in HOWS:
        plan = plan_of(network, how, ctx=mx.cpu())
        ways.append((how, plan.symbol, plan.device_bytes))
    plain = unplanned(symbol, shapes, ctx=mx.cpu())
    ways.append(("no plan", symbol, plain.device_bytes))
    for how, planned, told in ways:
        process = os.fork()
        if process:
            if os.waitpid(process, 0)[1]:
                raise SystemExit(1)
            continue
        _step(*network._replace(steps=2, batch=2, units=16, inputs=16).build())
        before = _resident()
        executor = _step(planned, shapes)
        print(json.dumps([how, [told, _resident() - before]]), flush=True)
        del executor
        os._exit(0)


if __name__ == "__main__":
    _main(Recurrent(*json.loads(sys.argv[1])))
