"""Training and scoring in turns by a schedule: memory that both use, and states that both read."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from memonger.schedules.execution.symbol import scheduled
from memonger.support.mxnet import environment

from planned import ROOT, run_python
from drawn_schedules import everything, work_of
from modules import BATCH, IMAGES, SHAPES, first, module_of, net


def by_schedule(symbol: Any) -> Any:
    return scheduled(symbol, everything(work_of(symbol, SHAPES)))


@pytest.mark.parametrize(
    ("engine", "first", "last"),
    [
        ("ThreadedEnginePerDevice", 36, 48),
        ("NaiveEngine", 0, 6),
        pytest.param("ThreadedEnginePerDevice", 48, 72, marks=pytest.mark.exhaustive),
        pytest.param("NaiveEngine", 6, 24, marks=pytest.mark.exhaustive),
    ],
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
    for _ in range(2):
        module, data, found = module_of(by_schedule(net())), first(BATCH), []
        for wait in (mx.nd.waitall, lambda: None):
            mx.random.seed(1)
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
        module, other, found = module_of(symbol), mx.mod.Module(symbol), []
        # What it computes is as large as gradients are.
        other.bind([("data", (1, 3, 12, 12))], None, for_training=False, shared_module=module)
        random = np.random.RandomState(2)
        mx.random.seed(2)
        for _ in range(3):
            module.forward_backward(first(BATCH))
            module.update()
            mx.nd.waitall()
            for one, data in (
                (other, random.normal(size=(1, 3, 12, 12))),
                (module, IMAGES[:BATCH]),
            ):
                one.forward(mx.io.DataBatch([mx.nd.array(data)]), is_train=False)
                found.append(one.get_outputs()[0].asnumpy())
        return found

    with environment(MXNET_SUBGRAPH_BACKEND="NONE"):
        for one, other in zip(scores(net()), scores(by_schedule(net()))):
            assert np.array_equal(one, other)
