"""A tensor that eight or more layers read: planned blocks sum its gradient as hybridize() does.

CachedOp adds terms in place with ``static_alloc`` only, and some operators cannot do that.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import memonger
import pytest
from mxnet.gluon import nn

from blocks import PATIENCE, Arrays, Prepare, initialized, layers, step, trainer
from blocks import batch
from scenarios import train, unlike_plain

#: What reads the trunk beside the heads.
READERS: dict[str, Callable[..., Any]] = {
    "mean": lambda F, x, weight: F.mean(x, axis=1, keepdims=True),
    "clip": lambda F, x, weight: F.clip(x, -0.3, 0.3),
    "LayerNorm": lambda F, x, weight: F.LayerNorm(x, F.ones((32,)), F.zeros((32,))),
    "dot": lambda F, x, weight: F.dot(x, weight),
}


class Heads(nn.HybridBlock):
    def __init__(self, reader: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.reader = reader
        with self.name_scope():
            self.trunk = layers("trunk_", 32)
            self.weight = self.params.get("weight", shape=(32, 32))

    def hybrid_forward(self, F: Any, x: Any, weight: Any) -> Any:
        x = F.tanh(self.trunk(x))
        read = READERS[self.reader]
        rows = [F.sin(F.dot(x * (k + 1.3), weight)) for k in range(9)]
        return F.concat(*rows, *[read(F, x, weight) for _ in range(2)], dim=1)


def heads(reader: str, prepare: Prepare) -> Arrays:
    return train(prepare(initialized(Heads(reader, prefix="net_"))))


@pytest.mark.parametrize("reader", READERS)
def test_a_schedule_adds_terms_as_hybridize_does(reader: str) -> None:
    scenario = functools.partial(heads, reader)
    assert unlike_plain(scenario, ["schedule"]) == {}
    assert unlike_plain(scenario, static_alloc=True) == {}


def test_marks_are_refused_where_adding_in_place_differs() -> None:
    net = initialized(Heads("mean", prefix="net_"))
    memonger.gluon.plan(net, patience=PATIENCE, how="marks")
    step(net, trainer(net), *batch(0))
    text = r"'net_dot\d+' \(dot\) and \d+ more would differ with marks.*GRAD_SUM_CAP=11 before"
    with pytest.raises(memonger.MemongerError, match=text):
        memonger.gluon.plan_of(net)
