"""Signals that are put off: their handlers run later, all of them, and stand where they stood."""

from __future__ import annotations

import signal
import threading
from typing import Any, Iterator

import pytest

from memonger.support.signals import deferred_signals

NUMBERS = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_each_handler_is_called_at_the_end_also_where_others_raise() -> None:
    called: list[int] = []

    def handler(number: int, _: Any) -> None:
        called.append(number)
        raise (KeyboardInterrupt if number == signal.SIGINT else RuntimeError)

    for number in NUMBERS:
        signal.signal(number, handler)
    with pytest.raises(KeyboardInterrupt):
        with deferred_signals():
            for number in NUMBERS:
                signal.raise_signal(number)
            assert not called
    assert sorted(called) == sorted(NUMBERS)
    assert all(signal.getsignal(number) is handler for number in NUMBERS)


def test_other_threads_and_signals_without_a_handler_are_left_alone() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    before = [signal.getsignal(number) for number in NUMBERS]
    seen: list[Any] = []

    @deferred_signals()
    def work() -> None:
        seen.append([signal.getsignal(number) for number in NUMBERS])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    work()
    assert seen[0] == before and seen[1][2] is signal.SIG_IGN and seen[1][0] is not before[0]
