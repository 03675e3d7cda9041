"""Tables and pages of HTML, which notebooks show in place of what is printed."""

from __future__ import annotations

from html import escape
from typing import Sequence


def write_table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Write a table of HTML.

    Parameters
    ----------
    rows : sequence of sequence of str
        The cells, as plain text; a line break in a cell stays one.
    head : sequence of str
        The names of the columns. Without them the first cell of each row is its name.

    Returns
    -------
    str
    """

    def cell(text: str, is_name: bool) -> str:
        tag = "th" if is_name else "td"
        lines = "<br>".join(escape(line.strip()) for line in text.splitlines())
        return f'<{tag} style="text-align: left">{lines}</{tag}>'

    lines = [[cell(name, True) for name in head]] if head else []
    lines += [[cell(text, not head and k == 0) for k, text in enumerate(row)] for row in rows]
    return "<table>" + "".join(f"<tr>{''.join(line)}</tr>" for line in lines) + "</table>"


class Page:
    """A page of HTML, which a notebook shows in a frame.

    Attributes
    ----------
    html : str
    """

    def __init__(self, html: str) -> None:
        self.html = html

    def __repr__(self) -> str:
        return f"Page({len(self.html)} characters of HTML, which a notebook shows)"

    def _repr_html_(self) -> str:
        style = "width: 100%; height: 800px; border: 0"
        return f'<iframe srcdoc="{escape(self.html)}" style="{style}"></iframe>'
