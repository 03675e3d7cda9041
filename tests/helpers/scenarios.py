"""Trainings that leave the same bits by a plan as after ``hybridize()``."""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict

import memonger
import mxnet as mx

from blocks import HOWS, PATIENCE, Arrays, Prepare, different, seed

#: Trains nets that it gives to ``prepare``, in place of ``net.hybridize()``; what is left in them.
Scenario = Callable[[Prepare], Arrays]


class Scenarios(Dict[str, Scenario]):
    """Scenarios by name."""

    def add(self, scenario: Scenario) -> Scenario:
        """Decorate a function that is one."""
        self[scenario.__name__] = scenario
        return scenario


def run(scenario: Scenario, how: str) -> Arrays:
    """What a scenario leaves, with plain ``hybridize()`` (no how) or by plans that recompute."""
    nets = []

    def prepare(net: Any) -> Any:
        if not how:
            net.hybridize()
            return net
        nets.append(net)
        planned = memonger.gluon.plan(net, patience=PATIENCE, **HOWS[how])
        assert planned is net
        return net

    seed()
    with mx.name.NameManager():  # names that do not count the nets before
        left = scenario(prepare)
    mx.nd.waitall()
    assert bool(nets) == bool(how)
    for net in nets:
        plan = memonger.gluon.plan_of(net)
        # What saves enough for a budget may be where a schedule's tensors lie, and nothing more.
        assert plan.recomputed or (how == "budget" and plan.schedule is not None)
        assert plan.pool_bytes < plan.unplanned_bytes
    return left


@functools.lru_cache(None)
def plain(scenario: Scenario) -> Arrays:
    """What a scenario leaves with plain ``hybridize()``."""
    return run(scenario, "")


def unlike_plain(scenario: Scenario, how: str) -> list[str]:
    """Names of the arrays that differ in a bit from those without a plan."""
    return different(plain(scenario), run(scenario, how))
