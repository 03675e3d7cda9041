"""One operator at a time: what is kept by rule, what may be unread, what cannot be observed."""

from __future__ import annotations


import memonger
import mxnet as mx
import pytest
from memonger.graph.operators.recompute import CPU, UNREAD_ANYWHERE, UNREAD_UNFUSED, UNTOUCHED
from memonger.graph.operators.recompute import tolerates_unread, why_kept

from drawn_schedules import work_of
from operator_cases import ALL_CASES, CASES, CASES_OF_NP, SMALL_SHAPES, inner, small_net
from planned import forward, marked, nodes, positive, with_marks

ON_CPU: frozenset[str] = frozenset((CPU,))

#: Cases whose operators must be kept, every one by rule.
KEPT = sorted(n for n, c in ALL_CASES.items() if c.draws or "RNN_" in n)
KEPT += ["foreach", "Custom", "moments"]


@pytest.mark.parametrize("name", KEPT)
def test_operators_that_must_run_once_are_kept(name: str) -> None:
    symbol = small_net(ALL_CASES[name])
    planned = memonger.make_mirror_plan(symbol, 0, shapes=SMALL_SHAPES)
    nodes = forward(symbol, SMALL_SHAPES).nodes
    kept = {n.name: n.op for n in nodes if not n.is_variable and why_kept(n.op, n.attrs)}
    assert kept and not set(marked(planned)) & set(kept)
    for node, attributes in planned.attr_dict().items():
        assert kept.get(node) not in UNTOUCHED or "__force_mirroring__" not in attributes


PARTS = 8  # of the cases: to build them all takes seconds, which no collection is to take


@pytest.mark.parametrize(
    "part", [*range(4), *(pytest.param(k, marks=pytest.mark.slow) for k in (4, 5, 6, 7, -1, -2))]
)
def test_operators_that_tolerate_to_be_unread_change_no_bit(part: int) -> None:
    """Marked alone and without rules; another batch first, whose leavings would show."""
    cases = sorted(CASES)[part::PARTS] if part >= 0 else sorted(CASES_OF_NP)[~part::2]
    tried, wrong = 0, []
    for name in cases:
        symbol = small_net(ALL_CASES[name])
        names, values = {*inner(symbol)}, positive(symbol, SMALL_SHAPES)
        for node in forward(symbol, SMALL_SHAPES).nodes:
            if node.name in names and tolerates_unread(node.op, node.attrs, ["float32"], ON_CPU):
                tried += 1
                planned = with_marks(symbol, [node.name])
                report = memonger.check(symbol, planned, SMALL_SHAPES, 2, values=values)
                wrong += [] if report else [(name, node.name, str(report))]
    assert tried > 15 and wrong == []


def test_every_entry_of_the_table_is_tried() -> None:
    symbols = [small_net(case) for case in ALL_CASES.values()]
    tried = {n["op"] for s in symbols for n in nodes(s) if n["name"] in inner(s)}
    conditional = {"BatchNorm", "Convolution", "Deconvolution", "UpSampling"}
    assert (UNREAD_ANYWHERE | UNREAD_UNFUSED | conditional) - tried == set() and len(tried) >= 100


def test_what_is_computed_on_gpus_alone_is_refused_by_schedules() -> None:
    """Its gradient cannot be observed without one."""
    message = (
        r"'fft0' \(_contrib_fft\) cannot be part of a schedule: .*only available for GPU.*marks"
    )
    with mx.name.NameManager(), pytest.raises(memonger.MemongerError, match=message):
        x = mx.sym.contrib.fft(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4))
        work_of(mx.sym.MakeLoss(x), {"data": (4, 4)})
