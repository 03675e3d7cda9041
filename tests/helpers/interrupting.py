"""Ctrl-C at a chosen moment of a search: when its bar is told of it."""

from __future__ import annotations

from typing import Any

import pytest
import tqdm


def press_ctrl_c(monkeypatch: pytest.MonkeyPatch, share: float = 2.0, search: int = 1) -> list[Any]:
    """Interrupt the so-manieth search once, when a share of it is done; return the searches begun.

    A negative share is before it begins, one above 1 never.
    """
    begun: list[Any] = []
    pressed: list[int] = []

    def told(bar: Any, done: float) -> None:
        if done >= share and len(begun) == search and not pressed:
            pressed.append(1)
            raise KeyboardInterrupt

    def entered(bar: Any) -> Any:
        begun.append(bar)
        told(bar, -1.0)
        return bar

    monkeypatch.setattr(tqdm.tqdm, "__enter__", entered)
    monkeypatch.setattr(tqdm.tqdm, "update", told)
    return begun
