"""The floor under all plans: exact where it can be counted by hand, below whatever is planned."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
from hypothesis import HealthCheck, given, settings, strategies as st
from memonger.costs.replay import replay
from memonger.costs.lower_bound import lower_bound
from memonger.solve.memory import of_step
from memonger.graph.training import training_graph
from memonger.schedules.expand import parts, unroll

import networks
from generated import networks as generated
from planned import forward, rules_of
from drawn_schedules import LEVELS, work_of

S = mx.sym
MB = 2**20


def described(symbol: Any, shapes: Any) -> Any:
    """MB of the floor, MB of what runs there itself, and its name."""
    graph = forward(symbol, shapes)
    parameters = [a for a in graph.arguments if graph.nodes[a].name not in shapes]
    training = training_graph(graph, parameters)
    found = lower_bound(training)
    return found.nbytes / MB, found.own_bytes / MB, training.names[found.row]


def test_a_chain() -> None:
    """A gradient of tanh has its input, its result and the gradient of that, which it overwrites;
    over it stands the output of the network. A tensor is 1 MiB."""
    assert described(*networks.chain(8)) == (4.0, 3.0, "tanh7_backward")


def test_what_is_computed_once_is_held() -> None:
    """The masks of four Dropouts, 1 MiB each, are there when the gradients begin."""
    symbol, shapes = networks.chain(4)
    plain = described(symbol, shapes)[0]
    x = S.Variable("data")
    for i in range(4):
        x = S.Activation(S.FullyConnected(x, num_hidden=1024, name="fc%d" % i), act_type="tanh")
        x = S.Dropout(x, p=0.5, name="drop%d" % i)
    dropped = S.LinearRegressionOutput(x, S.Variable("label"), name="out")
    assert described(dropped, shapes)[0] == plain + 3  # the gradient of the last has run by then


def test_schedules_have_an_order_of_their_own() -> None:
    """In it the gradient of a side branch comes first, and its mask is not held any longer."""
    x = S.Variable("data")
    for i in range(2):
        x = S.Activation(S.FullyConnected(x, num_hidden=1024, name="fc%d" % i), act_type="tanh")
    aside = S.FullyConnected(S.Dropout(S.Variable("aside"), p=0.5), num_hidden=8, name="side")
    x = S.elemwise_add(S.FullyConnected(x, num_hidden=8, name="last"), aside)
    symbol = S.LinearRegressionOutput(x, S.Variable("label"), name="out")
    shapes = {"data": (256, 1024), "aside": (256, 1024), "label": (256, 8)}
    wanted = [name for name in symbol.list_arguments() if name != "label"]
    work = work_of(symbol, shapes, wanted)
    step = unroll(parts(work), LEVELS["everything"](work, 0))
    least = of_step(step, dict.fromkeys(wanted, "write")).peak_bytes
    assert lower_bound(work.training).nbytes == least


def test_nothing_to_hold() -> None:
    graph = forward(S.BlockGrad(S.Variable("data")), {"data": (4, 4)})
    assert lower_bound(training_graph(graph)).nbytes <= 64


QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=150, deadline=None, suppress_health_check=QUIET)
@given(generated(), st.integers(0, 2**16), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_no_marks_go_below(drawn: Any, seed: int, share: float) -> None:
    symbol, shapes = drawn
    rules = rules_of(symbol, shapes)
    chosen = np.random.RandomState(seed).uniform(size=len(rules.graph.nodes)) < share
    mask = rules.apply(chosen & rules.allowed)
    for training in rules.trainings:
        assert lower_bound(training).nbytes <= replay(training, mask).peak_bytes


@settings(max_examples=150, deadline=None, suppress_health_check=QUIET)
@given(generated(), st.sampled_from(sorted(LEVELS)), st.integers(0, 2**16))
def test_no_schedule_goes_below(drawn: Any, level: str, seed: int) -> None:
    symbol, shapes = drawn
    work = work_of(symbol, shapes)
    step = unroll(parts(work), LEVELS[level](work, seed), True, [])
    memory = of_step(step, dict.fromkeys(symbol.list_arguments(), "write"))
    assert lower_bound(work.training).nbytes <= memory.peak_bytes
