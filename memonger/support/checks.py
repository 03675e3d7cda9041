"""Checks of the numbers and the names in a call."""

from __future__ import annotations

import difflib
import numbers
import os
from typing import Iterable

from memonger.support.errors import MemongerError


def check_count(name: str, value: object, least: int) -> int:
    """Return ``value`` as an int; refuse one below ``least``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise MemongerError(f"{name} must be an integer, not {value!r}")
    if value < least:
        raise MemongerError(f"{name} must be at least {least}, not {value}")
    return int(value)


def check_number(name: str, value: object) -> float | None:
    """Return a number as a float, and None as None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise MemongerError(f"{name} must be a number, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise MemongerError(f"{name} is too large") from None


def did_you_mean(name: object, choices: Iterable[str], otherwise: str) -> str:
    """End a message about an unknown name with the choice that is most like it, if one is."""
    matcher = difflib.SequenceMatcher(b=str(name))

    def similarity(choice: str) -> tuple[float, int]:  # of equals, the longest common beginning
        matcher.set_seq1(choice)
        return matcher.ratio(), len(os.path.commonprefix([choice, str(name)]))

    best = max(choices, key=similarity, default="")
    return f"; did you mean {best!r}?" if similarity(best)[0] >= 0.5 else "; " + otherwise
