"""What a plan needs to know of a network is found once: how often MXNet is asked."""

from __future__ import annotations

from collections import Counter
from typing import Any, Callable, Iterator

import memonger
import mxnet as mx
import networks
import pytest
from memonger.support import cache

#: Network, options -> the most binds of the whole network, binds of operators apart from it, and
#: symbols that MXNet reads from JSON. Where one falls, lower it.
CEILINGS: dict[str, tuple[Callable[[], networks.Network], str, tuple[int, int, int]]] = {
    "mobilenetv2": (networks.mobilenet_v2, "schedule", (1, 1, 5)),
    "lstm-4x100": (lambda: networks.lstm(steps=100), "marks", (2, 2, 9)),
}


@pytest.fixture
def asked(monkeypatch: Any) -> Iterator[Counter[str]]:
    """Count the calls of MXNet."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str, title: Callable[[Any], str]) -> None:
        call = getattr(owner, name)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            counts[title(arguments[0])] += 1
            return call(*arguments, **keywords)

        monkeypatch.setattr(owner, name, counted)

    def kind(symbol: mx.sym.Symbol) -> str:
        # The variables of operators that are bound apart from a network are numbered.
        return "apart" if all("@" in name for name in symbol.list_inputs()) else "whole"

    for name in ("bind", "simple_bind"):
        count(mx.sym.Symbol, name, kind)
    count(mx.sym, "load_json", lambda text: "loads")
    yield counts


@pytest.mark.parametrize("name", CEILINGS)
def test_mxnet_is_asked_once(name: str, asked: Counter[str]) -> None:
    build, how, most = CEILINGS[name]
    net, shapes = build()
    asked.clear()
    memonger.plan(net, shapes, how=how, patience=0.001)
    counts = asked["whole"], asked["apart"], asked["loads"]
    assert all(now <= limit for now, limit in zip(counts, most)), counts
    cache.forget()  # plans and searches
    asked.clear()
    memonger.plan(net, shapes, how=how, patience=0.001)
    assert asked["apart"] == 0
