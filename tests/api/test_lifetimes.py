"""Lifetimes that a plan writes: they are those of its pool, and no two tensors meet in it."""

from __future__ import annotations

from pathlib import Path

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger import MemongerError

from planned import HOWS
from zoo import OUTPUTS, TINY

HEADER = "id,lower,upper,size,offset"


def rows_of(file: Path) -> tuple[list[str], np.ndarray]:
    """Return the ids, and the numbers of each row."""
    header, *lines = file.read_text(encoding="utf-8").splitlines()
    cells = [line.split(",") for line in lines]
    assert header == HEADER and {len(row) for row in cells} == {5}
    return [row[0] for row in cells], np.array([row[1:] for row in cells], dtype=np.int64)


@pytest.mark.parametrize("ctx", ["cpu", "gpu"])  # a GPU fuses
@pytest.mark.parametrize("name", ["resnet", "lstm, one softmax", "casts", "head gradients"])
def test_no_two_tensors_meet_and_the_peak_is_the_plans(name: str, ctx: str, tmp_path: Path) -> None:
    file, (symbol, shapes) = tmp_path / "lifetimes.csv", TINY[name]()
    for options in HOWS.values():
        plan = memonger.plan(symbol, shapes, ctx=ctx, patience=0.01, **options)
        plan.lifetimes(file)
        ids, numbers = rows_of(file)
        lower, upper, size, offset = numbers.T
        assert len({*ids}) == len(ids) and (lower < upper).all()
        assert lower.min() >= 0 and size.min() > 0 and offset.min() >= 0
        live = [size[(lower <= step) & (step < upper)].sum() for step in range(upper.max())]
        assert max(live) == plan.peak_bytes
        assert plan.peak_bytes <= (offset + size).max() <= plan.pool_bytes
        for k in range(len(ids)):
            together = (lower[k] < upper) & (lower < upper[k])
            meet = together & (offset[k] < offset + size) & (offset < offset[k] + size[k])
            assert np.flatnonzero(meet).tolist() == [k]


def test_names_stay_one_cell_and_are_told_apart(tmp_path: Path) -> None:
    x = mx.sym.Variable("data")
    for _ in range(3):
        x = mx.sym.Activation(x, act_type="tanh", name='a, "b"\nc')
    memonger.plan(mx.sym.MakeLoss(x, name="потеря"), data=(8, 4)).lifetimes(tmp_path / "a.csv")
    ids, _ = rows_of(tmp_path / "a.csv")
    assert "a___b__c" in ids and len({*ids}) == len(ids) and "потеря" in ids


def test_what_cannot_be_written_or_is_not_known_is_told(tmp_path: Path) -> None:
    plan = memonger.plan(*TINY["casts"](), patience=0.01)
    with pytest.raises(MemongerError, match="there is no folder"):
        plan.lifetimes(tmp_path / "none" / "a.csv")
    with pytest.raises(MemongerError, match="bound, not replayed to the byte"):
        memonger.plan(*OUTPUTS["a b"]()).lifetimes(tmp_path / "a.csv")
    assert not list(tmp_path.iterdir())
