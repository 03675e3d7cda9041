"""Listings: all sizes of one have one unit, that of the largest."""

from __future__ import annotations

import re
from typing import Any

import memonger
import pytest
from memonger.support.errors import GB, KB, MB, format_size

import networks

#: A network of each unit: its width and its batch.
OF_UNIT = {"KiB": (8, 4), "MiB": (512, 256), "GiB": (4096, 65536)}


@pytest.mark.parametrize(
    "nbytes, largest, text",
    [
        (0, None, "0.0 KiB"),
        (512, None, "0.5 KiB"),
        (MB - 1, None, "1024.0 KiB"),
        (MB, None, "1.0 MiB"),
        (10 * GB, None, "10.00 GiB"),
        (512, MB, "<0.1 MiB"),
        (64 * KB, MB, "0.1 MiB"),
        (0, MB, "0.0 MiB"),
        (-MB, 5 * GB, "-1.0 MiB"),
        (MB, 10 * GB, "<0.01 GiB"),
        (20 * MB, 12 * GB, "0.02 GiB"),
        (2 * MB, 1, "2048.0 KiB"),
    ],
)
def test_a_size_is_written_in_the_unit_of_the_largest(
    nbytes: int, largest: int | None, text: str
) -> None:
    assert format_size(nbytes, largest) == text


def units(text: str) -> set[str]:
    """Find the units of a listing; what is there is never told as nothing."""
    assert not re.search(r"\b0\.0+ [KMG]iB(?!, 0 tensors)", text)
    return set(re.findall(r"\b[KMG]iB\b", text))


@pytest.mark.parametrize("unit", OF_UNIT)
def test_all_sizes_of_a_listing_have_one_unit(unit: str) -> None:
    """As text, and as a table of a notebook."""
    hidden, batch = OF_UNIT[unit]
    symbol, shapes = networks.chain(12, hidden=hidden, batch=batch)
    plan = memonger.plan(symbol, shapes, patience=0.02)
    explanation, choices = memonger.explain(symbol, shapes), plan.explain()
    listings: list[Any] = [plan, explanation, choices]
    listings.append(memonger.frontier(symbol, shapes, patience=0.02, points=5))
    for listing in listings:
        assert units(str(listing)) == units(listing._repr_html_()) == {unit}
    for listing in (explanation, choices):
        assert units(listing.details()) == {unit}
    table = re.compile(r"^ +\S+ ([KMG]iB) ", re.M)
    for text in map(str, (explanation, choices)):
        assert len(table.findall(text)) > 3


def test_a_tensor_too_small_for_the_unit_is_told_so() -> None:
    symbol, shapes = networks.resnet((2, 2, 2, 2), batch=4, image=64, filters=16)
    explanation = memonger.explain(symbol, shapes)
    assert "\n  <0.1 MiB  result      SoftmaxOutput of 'softmax'" in str(explanation)
    assert "\n  <0.1 MiB  result      SoftmaxOutput         softmax" in explanation.details()
    for text in (str(explanation), explanation.details(), explanation._repr_html_()):
        assert units(text) == {"MiB"}


def test_a_budget_has_the_unit_of_the_plan_below() -> None:
    """Though that is less than 10 GiB, and what the network takes without a plan is more."""
    symbol, _ = networks.chain(60, hidden=256)
    shapes = {"data": (None, 256)}
    largest = memonger.largest_batch(
        symbol, shapes, "8GB", ctx="gpu", optimizer="sgd", patience=0.02
    )
    for text in (str(largest), largest._repr_html_()):
        assert units(text) == {"GiB"}
        assert "into 7.45 GiB of the whole device; 1.00 GiB of a GPU are left to CUDA" in text
    largest = memonger.largest_batch(symbol, shapes, "8GB", patience=0.02)
    assert units(str(largest)) == {"GiB"}
    assert " of the device are taken, more than 7.45 GiB; for a card" in str(largest)
