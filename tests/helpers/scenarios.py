"""Trainings of Gluon blocks that must leave the same bits by a plan as after ``hybridize()``."""

from __future__ import annotations

from typing import Any, Callable, Iterable

import memonger
import mxnet as mx
from mxnet import autograd

from blocks import LOSS, PATIENCE, Arrays, Prepare, batch, different, left_in, seed, trainer
from planned import HOWS

#: Trains nets that it gives to ``prepare``, in place of ``net.hybridize()``; what is left in them.
Scenario = Callable[[Prepare], Arrays]
#: All by name; the modules of scenarios fill it when they are imported.
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    """Decorate a function that is a scenario."""
    SCENARIOS[function.__name__] = function
    return function


def train(
    nets: Any,
    loss: Callable[[Any, Any, int], Any] | None = None,
    steps: int = 3,
    *,
    batches: Callable[[int], Any] = batch,
    before: Callable[[int], None] = lambda k: None,
    backward: Callable[[Any], None] = lambda loss: loss.backward(),
    input_gradient: str = "",
    training: Any = None,
    **options: Any,
) -> Arrays:
    """Train one net or several, by default for ``LOSS``, and return what is left.

    Each step calls ``before(k)``, records ``loss(x, y, k)`` and calls ``backward`` with it. With
    an ``input_gradient`` ('write' or 'add'), that of x is returned too. The options are those
    of the trainer, which is SGD unless one is given.
    """
    nets = nets if isinstance(nets, tuple) else (nets,)
    training, kept = training or trainer(*nets, **options), {}
    for k in range(steps):
        before(k)
        x, y = batches(k)
        if input_gradient and x.grad is None:
            x.attach_grad(input_gradient)
        with autograd.record():
            value = loss(x, y, k) if loss else LOSS(nets[0](x), y)
        backward(value)
        training.step(16)
        if input_gradient:
            kept[f"x {k}"] = x.grad.asnumpy()
    return {**left_in(*nets), **kept}


def run(scenario: Scenario, how: str, **flags: Any) -> Arrays:
    """Return what a scenario leaves, with plain ``hybridize(**flags)`` (no how) or by plans."""
    nets = []

    def prepare(net: Any) -> Any:
        if not how:
            net.hybridize(**flags)
            return net
        nets.append(net)
        planned = memonger.gluon.plan(net, patience=PATIENCE, **HOWS[how], **flags)
        assert planned is net
        return net

    seed()
    with mx.name.NameManager():  # names that do not count the nets before
        left = scenario(prepare)
    mx.nd.waitall()
    assert bool(nets) == bool(how)
    for net in nets:
        plan = memonger.gluon.plan_of(net)
        assert plan.recomputed and plan.pool_bytes < plan.unplanned_bytes
    return {name: getattr(one, "asnumpy", lambda one=one: one)() for name, one in left.items()}


def unlike_plain(
    scenario: Scenario, hows: Iterable[str] = tuple(HOWS), **flags: Any
) -> dict[str, list[str]]:
    """Return the names of the arrays that differ in a bit from those without a plan, by how."""
    plain = run(scenario, "", **flags)
    unlike = {how: different(plain, run(scenario, how, **flags)) for how in hows}
    return {how: names for how, names in unlike.items() if names}
