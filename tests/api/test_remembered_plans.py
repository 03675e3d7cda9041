"""What was planned before is not searched for again, and no call changes what another returns."""

from __future__ import annotations

import logging
from typing import Any, Callable

import memonger
import mxnet as mx
import pytest
from memonger.support.cache import forget

from planned import marked, nodes
from test_plans import MB, SHAPES, S, net
from zoo import unrolled


@pytest.fixture
def cache_hits(caplog: pytest.LogCaptureFixture) -> Callable[[], int]:
    """Return what counts the plans that were not searched for, but known from before."""
    caplog.set_level(logging.INFO, "memonger")
    return lambda: sum("cached search result" in r.getMessage() for r in caplog.records)


def test_the_same_network_is_planned_once(cache_hits: Any) -> None:
    first = memonger.plan(net(), SHAPES, how="marks")
    first.symbol._set_attr(spoiled="yes")
    first.candidates.clear()
    again = memonger.plan(net(), SHAPES, how="marks")
    assert cache_hits() == 1
    assert "spoiled" not in again.symbol.tojson() and again.candidates
    assert again.pool_bytes == first.pool_bytes and again.recomputed == first.recomputed
    forget()
    assert memonger.plan(net(), SHAPES, how="marks").symbol.tojson() == again.symbol.tojson()
    assert cache_hits() == 1


def features(*plans: Any) -> list[Any]:
    return [(p.pool_bytes, p.time_overhead, p.recomputed, p.copies) for p in plans]


#: Shapes of the largest batch.
CELLS = {"data": (475, 6), "softmax_label": (475, 6)}
MORE: Any = {"how": "marks", "patience": 0.3}  # with less, marks are the same from any known plans


def largest_batch(net: Any) -> Any:
    return memonger.largest_batch(net, dict.fromkeys(CELLS, (None, 6)), 3_000_000, **MORE)


def largest(net: Any) -> list[Any]:
    result = largest_batch(net)
    assert result.batch == CELLS["data"][0]
    return features(result.plan)


CALLS: dict[str, Callable[[Any], Any]] = {
    "plan": lambda net: features(memonger.plan(net, CELLS, **MORE)),
    "schedule": lambda net: features(memonger.plan(net, CELLS, how="schedule", patience=0.05)),
    "largest_batch": largest,
    "explain": lambda net: str(memonger.explain(net, CELLS)),
    "within": lambda net: features(memonger.plan(net, CELLS, budget="60%", **MORE)),
    "frontier": lambda net: features(*memonger.frontier(net, CELLS, points=9, **MORE)),
}


@pytest.mark.late
def test_the_order_of_calls_does_not_matter() -> None:
    """A search that starts from known plans is not the same that starts from none."""
    symbol = unrolled(6)
    CELLS.update(dict.fromkeys(CELLS, (largest_batch(symbol).batch, 6)))
    expected: dict[str, Any] = {}
    for order in ([*CALLS], [*CALLS][::-1]):
        forget()
        for name in order:
            result = CALLS[name](symbol)
            assert result == expected.setdefault(name, result), (name, order)


@pytest.mark.parametrize("how", ["marks", "schedule"])
def test_names_that_mxnet_makes_do_not_matter(how: str, cache_hits: Any) -> None:
    """A network built twice has other operator names; the plan has those of its own network."""

    def built() -> Any:
        x = S.FullyConnected(S.Variable("data"), S.Variable("w"), num_hidden=512, no_bias=True)
        for _ in range(8):
            x = S.tanh(x * 2)
        return S.LinearRegressionOutput(x, S.Variable("label"))

    one, other = built(), built()
    assert one.tojson() != other.tojson()
    plan, again = memonger.plan(one, SHAPES, how=how), memonger.plan(other, SHAPES, how=how)
    assert cache_hits() == 1 and again.pool_bytes == plan.pool_bytes
    assert again.recomputed and not set(again.recomputed) & set(plan.recomputed)
    names = [n["name"] for n in nodes(other)]
    assert set(again.recomputed) <= set(names) and any(repr(n) in again.slowest for n in names)
    assert how == "schedule" or list(again.recomputed) == marked(again.symbol)
    assert memonger.unplan(again.symbol).tojson() == other.tojson()


def test_initializers_do_not_matter(cache_hits: Any) -> None:
    """They hold addresses of objects, also within control flow; no bind reads them."""

    def built(address: int) -> Any:
        scale = S.Variable("scale", init=f'["constant_{address}", {{}}]', lr_mult=address)
        x, _ = S.contrib.foreach(lambda x, s: (x * s[0], s), S.Variable("data"), [scale])
        for k in range(6):
            x = S.tanh(S.FullyConnected(x, num_hidden=64, flatten=False, name=f"fc{k}"))
        return S.MakeLoss(x)

    for address in (1, 2):
        symbol = memonger.plan(built(address), data=(4, 256, 8), scale=(256, 8), how="marks").symbol
        assert f"constant_{address}" in symbol.tojson()
    assert cache_hits() == 1


CHANGES: dict[str, Any] = {
    "network": lambda p: p(net(9), SHAPES),
    "argument's name": lambda p: p(net()(data=S.Variable("pixels")), {"pixels": SHAPES["data"]}),
    "attribute": lambda p: p(S.load_json(net().tojson().replace('"tanh"', '"sigmoid"')), SHAPES),
    "shapes": lambda p: p(net(), {"data": (255, 512)}),
    "types": lambda p: p(net(), SHAPES, type_dict={"data": "float64"}),
    "gradients": lambda p: p(net(), SHAPES, grad_req={"fc0_weight": "write"}),
    "device": lambda p: p(net(), SHAPES, ctx=mx.cpu()),
    "trials": lambda p: p(net(), SHAPES, ntrial=7),
    "until": lambda p: p(net(), SHAPES, until="bn4"),
    "devices": lambda p: p(net(), SHAPES, devices=2),
    "work": lambda p: [p(net(), SHAPES, how="schedule", work=work) for work in (1.5, 2.5)],
}


def test_what_differs_is_planned_anew(cache_hits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memonger.plan(net(), SHAPES, how="marks")
    for what, change in CHANGES.items():
        change(memonger.plan)
        assert cache_hits() == 0, what
    monkeypatch.setenv("NNVM_AUTO_SEARCH_MATCH_RANGE", "1")
    plan = memonger.plan(net(), SHAPES, how="marks")
    assert cache_hits() == 0
    assert plan.counted_bytes // MB == memonger.get_cost(plan.symbol, shapes=SHAPES)
