"""Budgets as users write them, and what an optimiser keeps."""

from __future__ import annotations

from typing import Any

import memonger
import mxnet as mx
import pytest
from memonger.solve import budget as budgets
from memonger.solve.budget import Budget, read_budget, state_per_element

READ: list[tuple[Any, float, bool]] = [
    (1, 1.0, False),
    (6 * 2**30, 6442450944.0, False),
    ("6GB", 6e9, False),
    ("6GiB", 6442450944.0, False),
    (" 6 gib ", 6442450944.0, False),
    ("800MB", 8e8, False),
    ("800MiB", 838860800.0, False),
    ("1.5kB", 1500.0, False),
    (".5KiB", 512.0, False),
    ("2TB", 2e12, False),
    ("12B", 12.0, False),
    ("60%", 0.6, True),
    ("12.5 %", 0.125, True),
    (0.6, 0.6, True),
    (1.0, 1.0, True),
]


@pytest.mark.parametrize(("written", "amount", "is_share"), READ)
def test_read(written: Any, amount: float, is_share: bool) -> None:
    assert read_budget(written, None, None, None) == Budget(amount, is_share, "pool", 0.0)


def test_no_budget() -> None:
    assert read_budget(None, None, None, None) is None


def test_limit() -> None:
    assert Budget(0.6, True, "pool", 0.0).limit(1000) == 600
    assert Budget(0.6e3, False, "pool", 0.0).limit(10**6) == 600


WRONG: list[tuple[Any, list[str]]] = [
    (0, ["budget=0", "at least one byte"]),
    (-5, ["budget=-5"]),
    ("0MB", ["'0MB'", "at least one byte"]),
    (0.0, ["budget=0.0", "a share"]),
    (1.5, ["budget=1.5", "bytes as an int"]),
    (float("nan"), ["budget=nan"]),
    (True, ["budget=True"]),
    ("6G", ["'6G'", "no unit 'G'", "GiB"]),
    ("6", ["'6'", "'6GiB'"]),
    ("101%", ["'101%'", "100 %"]),
    ("0%", ["'0%'"]),
    ("-3MB", ["'-3MB'"]),
    ("much", ["'much'"]),
    ([1], ["[1]"]),
    ("device", ["ctx=mx.gpu(0)"]),
]


@pytest.mark.parametrize(("written", "words"), WRONG)
def test_cannot_be_read(written: Any, words: list[str]) -> None:
    with pytest.raises(memonger.MemongerError) as caught:
        read_budget(written, None, None, None)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("60%", "gpu", None), "'pool' or 'device', not 'gpu'"),
        ((None, "device", None), "give budget= too"),
        ((None, None, "adam"), "give budget= too"),
        (("60%", None, "adam"), "budget_of='device'"),
        (("device", "pool", None), "leave budget_of out"),
        (("60%", "device", "adaam"), "adaam"),
        (("60%", "device", ("sgd", {"momentun": 1})), "momentun"),
        (("60%", "device", 3), "such as 'adam'"),
    ],
)
def test_options_that_do_not_fit(options: tuple[Any, Any, Any], words: str) -> None:
    with pytest.raises(memonger.MemongerError) as caught:
        read_budget(*options, None)
    assert words in str(caught.value)


def test_what_is_free_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "check_device", lambda ctx: ctx)
    free = {0: (100, 1000), 1: (200, 1000)}
    monkeypatch.setattr(mx.context, "gpu_memory_info", free.__getitem__)
    assert read_budget("device", None, "adam", mx.gpu(1)) == Budget(200, False, "device", 8.0)


@pytest.mark.parametrize(
    ("optimizer", "nbytes"),
    [
        (None, 0),
        ("sgd", 0),
        (("sgd", {"momentum": 0.9}), 4),
        (mx.optimizer.SGD(momentum=0.9), 4),
        ("adam", 8),
        ("adagrad", 4),
        (("rmsprop", {"centered": True}), 12),
    ],
)
def test_state_of_an_optimizer(optimizer: Any, nbytes: int) -> None:
    assert state_per_element(optimizer) == nbytes
