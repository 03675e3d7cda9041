"""Check numbers in a call, and suggest names for those that do not exist."""

from __future__ import annotations

import difflib
import numbers
import os
from typing import Iterable

from memonger.support.errors import MemongerError


def check_count(name: str, value: object, least: int) -> int:
    """Return ``value`` as an int; raise MemongerError unless it is an integer >= ``least``.

    ``name`` is the name of the argument, for the message.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise MemongerError(f"{name} must be an integer, not {value!r}")
    if value < least:
        raise MemongerError(f"{name} must be at least {least}, not {value}")
    return int(value)


def check_number(name: str, value: object) -> float | None:
    """Return a number as a float and None as None; raise MemongerError for anything else."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise MemongerError(f"{name} must be a number, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise MemongerError(f"{name} is too large; give at most 1e308") from None


def did_you_mean(name: object, choices: Iterable[str], otherwise: str) -> str:
    """Return the end of a message about an unknown name: the most similar choice, or ``otherwise``.

    ``otherwise`` says what to do where no choice is similar.
    """
    matcher = difflib.SequenceMatcher(b=str(name))

    def similarity(choice: str) -> tuple[float, int]:  # the common beginning breaks ties
        matcher.set_seq1(choice)
        return matcher.ratio(), len(os.path.commonprefix([choice, str(name)]))

    best = max(choices, key=similarity, default="")
    return f"; did you mean {best!r}?" if similarity(best)[0] >= 0.5 else "; " + otherwise
