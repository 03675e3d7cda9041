"""Ctrl-C at a chosen moment: of a search, when its bar is told of it, or of any work."""

from __future__ import annotations

import inspect
import signal
import sys
from typing import Any, Callable

import pytest
import tqdm


def press_ctrl_c(monkeypatch: pytest.MonkeyPatch, share: float = 2.0, search: int = 1) -> list[Any]:
    """Interrupt the so-manieth search once, when a share of it is done; return the searches begun.

    A negative share is before it begins, one above 1 never.
    """
    begun: list[Any] = []
    pressed: list[int] = []
    usual = tqdm.tqdm.__init__
    searches: list[int] = []  # other bars are of no search

    def init(bar: Any, *args: Any, **options: Any) -> None:
        usual(bar, *args, **options)
        if options["desc"] == "memonger: searching":
            searches.append(id(bar))

    def update(bar: Any, done: float) -> None:
        if id(bar) in searches and done >= share and len(begun) == search and not pressed:
            pressed.append(1)
            raise KeyboardInterrupt

    def entered(bar: Any) -> Any:
        begun.extend([bar] if id(bar) in searches else [])
        update(bar, -1.0)
        return bar

    monkeypatch.setattr(tqdm.tqdm, "__init__", init)
    monkeypatch.setattr(tqdm.tqdm, "__enter__", entered)
    monkeypatch.setattr(tqdm.tqdm, "update", update)
    return begun


def interrupted(work: Callable[[], Any], moment: int = 0) -> tuple[bool, int]:
    """Press Ctrl-C at the so-manieth entry of a function of memonger's in some work.

    There Python calls the handler of a signal before any ``try`` of the function. Returns whether
    KeyboardInterrupt came out of the work, and how many functions were entered.
    """
    entered = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal entered
        ours = frame.f_globals.get("__name__", "").startswith("memonger.")
        if event == "call" and ours and not frame.f_code.co_flags & inspect.CO_GENERATOR:
            entered += 1
            if entered == moment:
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(profile)
    try:
        work()
    except KeyboardInterrupt:
        return True, entered
    finally:
        sys.setprofile(None)
    return False, entered
