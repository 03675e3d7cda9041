"""The docstrings of the public calls stand by themselves."""

from __future__ import annotations

import inspect
import re

import memonger
import pytest

pytestmark = pytest.mark.python_differs

CALLS = [name for name in memonger.__all__ if name[0].islower()]


@pytest.mark.parametrize("name", CALLS)
def test_every_parameter_is_told(name: str) -> None:
    """Each by itself, and what is returned and raised; the first word is an imperative."""
    call = getattr(memonger, name)
    text = inspect.getdoc(call) or ""
    sections = dict(re.findall(r"^(\w+)\n-+\n(.*?)(?=^\w+\n-+\n|\Z)", text, re.M | re.S))
    assert {"Parameters", "Returns", "Raises", "Examples"} <= set(sections)
    entries = re.findall(r"^(\S.*)$", sections["Parameters"], re.M)
    told = [entry for line in entries for entry in line.split(" : ")[0].split(", ")]
    parameters = inspect.signature(call).parameters.values()
    names = [("**" if p.kind is p.VAR_KEYWORD else "") + p.name for p in parameters]
    assert sorted(told) == sorted(names)
    assert not re.search(r"^ *As for", text, re.M)
    assert text.split()[0] not in ("The", "A", "An", "What", "Is", "Whether")
    assert not text.split()[0].endswith("s")
