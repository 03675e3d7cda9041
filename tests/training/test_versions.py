"""What CI runs with each MXNet of docs/versions.md: plans, binds, bits, Gluon, and the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import memonger
import mxnet as mx
import pytest
from memonger import cli
from memonger.costs.bind import bind, read_planned_mb
from memonger.support import versions

import blocks
import modules
import networks
from zoo import LARGE, TINY, Builders, load
from planned import HOWS as ALL_HOWS
from planned import assert_alike, forward, marked, search_as_original

HOWS = {how: ALL_HOWS[how] for how in ALL_HOWS if how != "schedule" or versions.CAN_SCHEDULE}

pytestmark = pytest.mark.versions

SMALL: Builders = {
    **{name: TINY[name] for name in ("resnet", "lstm", "transformer", "embedding", "highway")},
    # With fewer channels MXNet 1.7 cannot train it, with or without a plan.
    "googlenet": lambda: networks.googlenet(batch=1, image=64, classes=5, divide=4),
}
QUICK: Any = {"patience": 0.02}
RECORDED = ("resnet-3-4-6-3", "lstm-4x16")

#: Bound without memory.
BOUND = ("resnet_v2", "lstm", "mobilenet_v2", "transformer")


@pytest.mark.parametrize("name", RECORDED)
def test_the_plan_of_the_original_is_the_recorded_one(name: str) -> None:
    symbol, shapes, record = load(name)
    _, plan = search_as_original(symbol, shapes)
    assert sorted(marked(plan, "False")) == record["search"]["kept"]
    cost, recorded = memonger.get_cost(plan, shapes=shapes), record["search"]["cost"]
    if mx.runtime.Features().is_enabled("MKLDNN"):  # whose max pooling has a workspace
        assert cost == recorded
    else:
        assert 0.99 * recorded < cost <= recorded


@pytest.mark.parametrize("name", BOUND)
def test_what_a_plan_tells_is_what_mxnet_binds(name: str) -> None:
    symbol, shapes = LARGE[name]()
    plan = memonger.plan(symbol, shapes, how="marks", **QUICK)
    assert plan.exact and plan.counted_bytes < plan.candidates["no plan"]
    for net, predicted in (symbol, plan.candidates["no plan"]), (plan.symbol, plan.counted_bytes):
        bound = read_planned_mb(bind(net, forward(net, shapes), mx.cpu()))
        assert bound == predicted >> 20


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", SMALL)
def test_small_networks_train_to_the_same_bits(name: str, how: str) -> None:
    symbol, shapes = SMALL[name]()
    plan = memonger.plan(symbol, shapes, **QUICK, **HOWS[how])
    assert_alike(symbol, plan.symbol, shapes)


def test_where_no_schedule_can_run_marks_are_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with MXNet 1.6."""
    monkeypatch.setattr(versions, "CAN_SCHEDULE", False)
    symbol, shapes = SMALL["resnet"]()
    with pytest.raises(memonger.MemongerError, match="which takes 1.7 or later; plan with how="):
        memonger.plan(symbol, shapes, **QUICK, how="schedule")
    assert memonger.plan(symbol, shapes, **QUICK, how="auto").schedule is None
    assert "planning by marks, because no schedule can hold this network: MXNet" in caplog.text


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", ["mlp", "residual"])
def test_a_planned_block_trains_to_the_same_bits(name: str, how: str) -> None:
    make: Any = {"mlp": blocks.mlp, "residual": lambda: blocks.initialized(blocks.Residual())}[name]

    def left(prepare: Callable[[Any], Any]) -> Any:
        blocks.seed()
        with mx.name.NameManager():
            net = make()
        prepare(net)
        training = blocks.trainer(net)
        for k in range(3):
            blocks.step(net, training, *(blocks.batch if name == "mlp" else blocks.images)(k))
        return blocks.left_in(net)

    def planned(net: Any) -> None:
        blocks.planned(net, **HOWS[how])

    assert blocks.different(left(lambda net: net.hybridize()), left(planned)) == []


@pytest.mark.parametrize("how", HOWS)
def test_enable_alone_plans_a_module_and_a_block(how: str) -> None:
    def left() -> dict[str, Any]:
        module, net = modules.module_of(modules.net()), blocks.mlp()
        modules.seed()
        for _ in range(3):
            module.forward_backward(modules.first(modules.BATCH))
            module.update()
        net.hybridize()
        taught = blocks.taught(net)  # it waits for the statistics of both
        return {**taught, **modules.trained(module)}

    expected = left()
    with memonger.enable(cache=False, **QUICK, **HOWS[how]) as session:
        planned = left()
    assert blocks.different(expected, planned) == []
    assert [plan.pool_bytes < plan.unplanned_bytes for plan in session.plans] == [True, True]


def test_the_command_writes_a_plan_and_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    symbol, _ = networks.chain(8, hidden=64, batch=1024)
    net, out, page = (str(tmp_path / name) for name in ("net.json", "planned.json", "page.html"))
    symbol.save(net)
    shapes = ["--shape", "data=1024,64", "--shape", "label=1024,64"]
    assert cli.main(["plan", net, *shapes, "-o", out]) == 0
    assert "saved" in capsys.readouterr().out and marked(memonger.load(out))
    assert cli.main(["check", net, out, *shapes]) == 0
    assert cli.main(["report", net, *shapes, "-o", page]) == 0
    assert Path(page).stat().st_size > 10000
