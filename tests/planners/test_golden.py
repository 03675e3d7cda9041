"""The original's answers on five networks, recorded with the original on MXNet 1.9.1 (CPU);
and what schedules have come to on small ones."""

from __future__ import annotations

import json
import logging
from typing import Any

import memonger
import mxnet as mx
import pytest

import networks
from zoo import GOLDEN, load
from planned import cut_as_original, marked, module_plan, search_as_original

#: MB of the original's plan with the rules.
RULED = dict(zip(GOLDEN, (383, 1658, 2520, 486, 697)))
#: MB of the default at most.
SMALLEST = dict(zip(GOLDEN, (217, 1082, 1892, 347, 423)))


def all_but(*slow: str) -> list[Any]:
    return [pytest.param(n, marks=pytest.mark.slow if n in slow else ()) for n in GOLDEN]


@pytest.mark.parametrize("name", all_but("resnet-3-24-36-3", "lstm-4x64"))
def test_the_original_planner_answers_as_recorded(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Every threshold, every trial of the search, and what the rules make of its plan."""
    symbol, shapes, record = load(name)
    for expected in record["thresholds"]:
        threshold = expected["threshold"]
        info: dict[str, int] = {}
        bare = cut_as_original(symbol, shapes, threshold)
        assert sorted(marked(bare, "False")) == expected["kept"]
        assert memonger.get_cost(bare, shapes=shapes) == expected["cost"]
        ruled = memonger.make_mirror_plan(symbol, threshold, info, shapes=shapes)
        assert info == expected["plan_info"]
        assert {*marked(ruled)} <= {*marked(bare)}
    search = record["search"]
    trials, bare = search_as_original(symbol, shapes)
    assert trials == search["trials"]
    assert sorted(marked(bare, "False")) == search["kept"]
    assert memonger.get_cost(bare, shapes=shapes) == search["cost"]
    assert memonger.get_cost(symbol, shapes=shapes) == record["unplanned"]
    caplog.set_level(logging.INFO, "memonger")
    ruled = memonger.search_plan(symbol, planner="chen2016", shapes=shapes)
    assert memonger.get_cost(ruled, shapes=shapes) == RULED[name]
    assert f"cost={search['cost']} MiB before the rules, {RULED[name]} MiB with them" in caplog.text


def test_the_original_keeps_where_more_than_the_threshold_has_gathered() -> None:
    """Results of exactly 1 MB, the input too: where that is the threshold, 1 MB is not more."""
    x = mx.sym.Variable("data")
    for k in range(4):
        x = mx.sym.Activation(x, act_type="tanh", name=f"tanh{k}", attr={"mirror_stage": "True"})
    for threshold, kept in ((0, [0, 1, 2, 3]), (1, [0, 2]), (2, [1])):
        planned = cut_as_original(x, {"data": (512, 512)}, threshold)
        assert sorted(marked(planned, "False")) == [f"tanh{k}" for k in kept]


@pytest.mark.full_search
@pytest.mark.parametrize("name", all_but("resnet-3-24-36-3", "lstm-4x16", "lstm-4x64"))
def test_the_smallest_plan_costs_no_more_than_recorded(name: str) -> None:
    symbol, shapes, _ = load(name)
    planned = memonger.search_plan(symbol, shapes=shapes)
    assert memonger.get_cost(planned, shapes=shapes) <= SMALLEST[name]


def test_the_original_recomputes_batch_norms_that_the_rules_make_native() -> None:
    """On a GPU the recorded plan of example_resnet aborts in cuDNN's BatchNorm (req kNullOp)."""
    symbol, shapes, _ = load("resnet-2-2-2-2")
    planned = memonger.search_plan(symbol, planner="chen2016", shapes=shapes)
    attributes = planned.attr_dict()
    norms = [n for n in marked(planned) if n.startswith("batchnorm")]
    assert len(norms) > 10
    assert all(attributes[n]["cudnn_off"] == "True" for n in norms)
    on_cpu = memonger.search_plan(symbol, planner="chen2016", shapes=shapes, ctx=mx.cpu())
    assert all("cudnn_off" not in on_cpu.attr_dict()[n] for n in norms)


def test_builders_make_the_recorded_networks() -> None:
    def plain(symbol: Any) -> Any:
        graph = json.loads(symbol.tojson())
        return [(n["op"], n.get("attrs"), n["inputs"]) for n in graph["nodes"]], graph["heads"]

    assert plain(load("resnet-3-24-36-3")[0]) == plain(networks.resnet()[0])
    symbol, shapes, _ = load("lstm-4x64")
    built, built_shapes = networks.lstm(steps=64)
    assert plain(symbol) == plain(built)
    assert shapes == built_shapes


# -- schedules ----------------------------------------------------------------------------------

SCHEDULED = {
    "resnet": lambda: networks.resnet((1, 1, 1, 1), batch=4, image=64, classes=10, filters=16),
    "lstm": lambda: networks.lstm(layers=2, steps=12, hidden=64, batch=8, labels=50),
    "unet": lambda: networks.unet(batch=1, image=64, base=8),
    "chain": lambda: networks.chain(24, hidden=32, batch=512),
}

#: Bytes of the arena and of the outputs with work=2, 3 and 4: with a twentieth of the search, and
#: with all of it.
POOLS = {
    "resnet": [(1484512, 1476448), (1437024, 1402528), (1431712, 1302048)],
    "lstm": [(139924, 147760), (97364, 121136), (84052, 122416)],
    "unet": [(992256, 992256), (893952, 893952), (893952, 893952)],
    "chain": [(589824, 589824), (458752, 458752), (458752, 458752)],
}


SHORT = [pytest.param(0, n, marks=pytest.mark.full_search) for n in ("resnet", "unet", "chain")]
WHOLE = [pytest.param(1, n, marks=pytest.mark.exhaustive) for n in POOLS]


@pytest.mark.parametrize("work", [2, 3, 4])
@pytest.mark.parametrize("whole, name", SHORT + WHOLE)
def test_schedules_take_no_more_than_recorded(whole: int, name: str, work: int) -> None:
    symbol, shapes = SCHEDULED[name]()
    plan = module_plan(symbol, shapes, how="schedule", work=work, patience=(0.05, 1.0)[whole])
    assert plan.exact and plan.recompute_overhead <= work - 1
    assert plan.pool_bytes <= 1.01 * POOLS[name][work - 2][whole]
