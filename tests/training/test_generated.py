"""Properties over generated networks: whatever is marked, what the rules leave of it is right."""

from __future__ import annotations

import dataclasses
from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from hypothesis import example, given, reject, settings, strategies as st
from memonger.graph import marks
from memonger.graph.forward import with_identities
from memonger.graph.training import training_graph
from memonger.planners.candidates import MarkPlan
from memonger.planners.marks.identities import list_identities, drop_unused_identities
from memonger.costs.pool import pool
from memonger.costs.bind import bind
from memonger.schedules.schedule import check
from memonger.schedules.execution.symbol import scheduled

from generated import networks
from networks import lstm
from planned import assert_bound, forward, rules_of
from drawn_schedules import LEVELS, work_of

#: Some of its saved identities are products with one, which generated networks hardly have.
LSTM = lstm(layers=1, steps=6, batch=64, hidden=256, labels=50, input=50)


def trains_alike(symbol: Any, planned: Any, shapes: Any, **options: Any) -> None:
    """Check that both train to the same bits; pass over what MXNet cannot run by itself."""
    try:
        report = memonger.check(symbol, planned, shapes, **options)
    except memonger.MemongerError as error:
        # A drawn schedule is refused by which MKLDNN would round otherwise. MXNet itself cannot run
        # slices and reshapes of what MKLDNN has laid out in blocks.
        if "MKLDNN would use another layout" not in str(error):
            with pytest.raises(memonger.MemongerError):
                memonger.check(symbol, symbol, shapes, **{**options, "steps": 1})
        reject()
    assert report, str(report)


def as_plain(graph: Any) -> Any:
    nodes = (n._replace(hidden={}, attrs={**n.attrs, "cudnn_off": ""}) for n in graph.nodes)
    return dataclasses.replace(graph, nodes=tuple(nodes))


@settings(max_examples=60)
@given(
    networks(),
    st.integers(0, 2**16),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.sampled_from(["none", "fused", "unfused"]),
)
@example(LSTM, 1, 0.9, "fused")
@example(LSTM, 1, 0.9, "unfused")
def test_any_marks_that_the_rules_leave_train_alike(
    drawn: Any, seed: int, share: float, kept: str
) -> None:
    """With saved identities or without: what ``drop_unused_identities`` leaves of them is right.

    It trains alike, in the order and the memory that are replayed, and comes off again;
    ``with_identities`` tells beforehand what ``marks.write`` gives.
    """
    symbol, shapes = drawn
    rules, random = rules_of(symbol, shapes), np.random.RandomState(seed)
    chosen = [c for c in list_identities(rules) if random.uniform() < 0.5 and kept != "none"]
    mask = rules.recomputable & (random.uniform(size=len(rules.recomputable)) < share)
    mask[[copy.node for copy in chosen]] = True
    unfused = kept == "unfused"
    copies = tuple(copy._replace(unfused=unfused) for copy in chosen)
    (mask, copies), *_ = drop_unused_identities(rules, MarkPlan(mask, copies))
    assert symbol is not LSTM[0] or any(copy.tied_dtype for copy in copies)
    copies = marks.make_inferable(symbol, copies, shapes)
    planned = marks.write(symbol, mask, rules.native(mask), copies)
    assert planned.list_outputs() == symbol.list_outputs()
    assert planned.list_inputs() == symbol.list_inputs()
    assert memonger.unplan(planned).tojson() == symbol.tojson()
    graph, insertion = with_identities(rules.graph, copies)
    bound_graph = forward(planned, shapes)
    assert as_plain(graph) == as_plain(bound_graph)
    mask = insertion.extend(mask)
    assert (mask == marks.read_mask(bound_graph)).all()
    parameters = [a for a in bound_graph.arguments if bound_graph.nodes[a].name not in shapes]
    for wanted in (None, parameters):
        training = training_graph(bound_graph, wanted)
        if not training.inexact and wanted != []:
            assert_bound(pool(training, mask), bind(planned, bound_graph, mx.cpu(), wanted))
    trains_alike(symbol, planned, shapes, seed=seed)


@settings(max_examples=12)
@given(networks())
def test_searched_plans_are_no_worse_and_train_alike(drawn: Any) -> None:
    symbol, shapes = drawn
    before = symbol.tojson()
    ours = memonger.plan(symbol, shapes, how="marks")
    original = memonger.plan(symbol, shapes, planner="chen2016")
    assert symbol.tojson() == before
    if ours.planner != "no plan" or original.pool_bytes < ours.unplanned_bytes:
        # Else it only counts less, at 4 bytes to an element.
        assert ours.counted_bytes <= min(original.counted_bytes, ours.candidates["no plan"])
    assert ours.pool_bytes <= ours.unplanned_bytes
    assert ours.recompute_overhead <= 1
    for plan in (ours, original):
        trains_alike(symbol, plan.symbol, shapes, steps=2)


def requests(symbol: Any, shapes: Any, kind: str, seed: int) -> Any:
    """Draw the grad_req of each argument: of all, of the parameters or of some."""
    names = symbol.list_arguments()
    if kind in ("write", "add"):
        # There is no gradient of what an Embedding looks up.
        looked_up = {"data"} if "embed_weight" in names else set()
        chosen = {n: "null" if n in looked_up else kind for n in names}
    else:
        drawn = np.random.RandomState(seed).randint(0, 3, len(names))
        drawn_requests = [
            ("null", "write", "add")[k] if kind == "mixed" else "write" for k in drawn
        ]
        chosen = {
            n: "null" if n in shapes else request for n, request in zip(names, drawn_requests)
        }
        for name in names:
            # MKLDNN leaves out the gradient of a bias without that of the weight; MXNet adds up
            # what is left out where the bias is used more than once.
            if name.endswith("bias") and not name.startswith("fullyconnected"):
                chosen[name] = chosen.get(name.replace("bias", "weight"), "write")
        if set(chosen.values()) == {"null"}:
            chosen[next(n for n in names if n not in shapes)] = "write"
    # What is added to 'extra' is handed on as the gradient of what 'extra' was added to: it reads
    # the user's array, with the total in it.
    return {n: "write" if (n, r) == ("extra", "add") else r for n, r in chosen.items()}


@settings(max_examples=80)
@given(
    networks(),
    st.sampled_from(sorted(LEVELS)),
    st.sampled_from(["parameters", "write", "add", "mixed"]),
    st.integers(0, 2**16),
)
def test_any_schedule_trains_alike(drawn: Any, level: str, kind: str, seed: int) -> None:
    symbol, shapes = drawn
    grad_req = requests(symbol, shapes, kind, seed)
    work = work_of(symbol, shapes, [n for n, r in grad_req.items() if r != "null"])
    schedule = LEVELS[level](work, seed)
    check(work, schedule)
    trains_alike(symbol, scheduled(symbol, schedule), shapes, seed=seed, grad_req=grad_req)
