"""Checks of the numbers in a call."""

from __future__ import annotations

import numbers

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
