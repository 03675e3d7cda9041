"""Training and scoring in turns by a schedule: memory that both use, and states that both read."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from memonger.graph.operators.gradients import environment
from memonger.schedules.execution.symbol import scheduled

from planned import ROOT, run_python
from drawn_schedules import everything, work_of
from scoring import drawn, prepared, sized

S = mx.sym
BATCH, SIZE, CHANNELS = 16, 8, 16
SHAPES = sized(BATCH, SIZE)


def residual(layers: int) -> Any:
    """Convolutions that MKLDNN computes in blocks, and as many BatchNorms."""
    attributes: dict[str, Any] = {"kernel": (3, 3), "pad": (1, 1), "num_filter": CHANNELS}
    with mx.name.NameManager():
        x = S.Convolution(S.Variable("data"), **attributes)
        for _ in range(layers):
            y = S.Activation(S.BatchNorm(x, fix_gamma=False), act_type="relu")
            x = x + S.LeakyReLU(S.Convolution(y, **attributes), act_type="leaky")
        x = S.FullyConnected(
            S.Pooling(x, global_pool=True, pool_type="avg", kernel=(1, 1)), num_hidden=5
        )
        return S.SoftmaxOutput(x, S.Variable("softmax_label"), name="softmax")


def by_schedule(symbol: Any) -> Any:
    return scheduled(symbol, everything(work_of(symbol, SHAPES)))


@pytest.mark.parametrize(
    ("engine", "first", "last"), [("ThreadedEnginePerDevice", 36, 84), ("NaiveEngine", 0, 12)]
)
def test_generated_networks(
    engine: str, first: int, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MXNET_ENGINE_TYPE", engine)
    ran = run_python(str(ROOT / "tests" / "helpers" / "scoring.py"), str(first), str(last))
    found = ran.stdout.splitlines()
    assert [line for line in found if not line.endswith(" equal")] == []
    assert (ran.returncode, len(found)) == (0, last - first), ran.stderr[-2000:]


def test_training_and_inference_do_not_mix() -> None:
    """A step that has been started is not told that it is inference now; without waiting for it."""
    for seed in (1, 2):
        module = mx.mod.Module(by_schedule(residual(4)))
        prepared(module, module.symbol, BATCH, SIZE, np.random.RandomState(seed))
        data = drawn(np.random.RandomState(seed), BATCH, SIZE)
        found = []
        for wait in (mx.nd.waitall, lambda: None):
            executor = module._exec_group.execs[0]
            executor.copy_params_from(
                {}, {n: mx.nd.ones(a.shape) for n, a in executor.aux_dict.items()}
            )
            module.forward(data, is_train=True)
            wait()
            module.backward()
            wait()
            module.forward(data, is_train=False)
            wait()
            scored = module.get_outputs()[0].copy()
            module.forward(data, is_train=True)
            found.append([scored.asnumpy(), module.get_outputs()[0].asnumpy()])
        assert np.array_equal(found[0], found[1])


def test_gradients_that_another_executor_has_overwritten() -> None:
    """One of MXNet's own, which uses the memory without a word: they are lost, nothing else is."""

    def scores(symbol: Any) -> Any:
        module, other = mx.mod.Module(symbol), mx.mod.Module(symbol)
        small = 1, SIZE + 1  # what it computes is as large as gradients are
        prepared(module, symbol, BATCH, SIZE, np.random.RandomState(1))
        shapes = sized(*small)
        inputs = ([(name, shapes[name])] for name in ("data", "softmax_label"))
        other.bind(*inputs, for_training=False, shared_module=module)
        random, found = np.random.RandomState(2), []
        for _ in range(3):
            module.forward_backward(drawn(random, BATCH, SIZE))
            module.update()
            mx.nd.waitall()
            for one, batch, size in ((other, *small), (module, BATCH, SIZE)):
                one.forward(drawn(random, batch, size), is_train=False)
                found.append(one.get_outputs()[0].asnumpy())
        return found

    with environment(MXNET_SUBGRAPH_BACKEND="NONE"):
        for one, other in zip(scores(residual(4)), scores(by_schedule(residual(4)))):
            assert np.array_equal(one, other)
