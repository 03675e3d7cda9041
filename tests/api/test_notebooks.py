"""What a notebook shows of a result: a table of HTML, a short line, a figure."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import memonger
import mxnet as mx
import pytest

from planned import ROOT

SHAPES = {"data": (4096, 64)}


def net() -> Any:
    x = mx.sym.var("data")
    for k in range(8):
        x = mx.sym.tanh(mx.sym.FullyConnected(x, num_hidden=64, name=f"<fc{k}>"))
    return mx.sym.SoftmaxOutput(x, name="softmax")


def cells(page: str) -> list[list[str]]:
    """The cells of all rows of all tables."""
    rows = re.findall(r"<tr>(.*?)</tr>", page)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


def test_a_plan_is_a_table_of_what_is_printed() -> None:
    plan = memonger.plan(net(), SHAPES, patience=0.02)
    shown = dict(cells(plan._repr_html_()))
    printed = str(plan).splitlines()
    assert shown["before"] in printed[0] and shown["before"].endswith("without a plan")
    assert {*shown} == {line.split()[0] for line in printed if line[0] != " "}
    assert "&lt;fc" in plan._repr_html_() and "<fc" not in plan._repr_html_()


def test_a_frontier_is_a_table_of_its_plans() -> None:
    plans = memonger.frontier(net(), SHAPES, points=3, patience=0.02)
    head, *rows = cells(plans._repr_html_())
    assert head == ["memory", "share", "added time", "recomputed", "copies", "plan"]
    assert [row[3] for row in rows] == [str(len(plan.recomputed)) for plan in plans]
    assert [row[5] for row in rows] == ["no plan", "schedule", "schedule"]
    assert repr(plans) == f"Frontier({len(plans)} plans)"


def test_the_largest_batch_is_a_line_and_a_plan() -> None:
    found = memonger.largest_batch(net(), {"data": (None, 64)}, "9MB", patience=0.02)
    assert f"<p>a batch of {found.batch} fits with a plan, of" in found._repr_html_()
    assert found.plan._repr_html_() in found._repr_html_()
    assert len(repr(found)) < 250


def test_explanations_are_figures_and_a_table_of_tensors() -> None:
    explanation = memonger.explain(net(), SHAPES)
    rows = cells(explanation._repr_html_())
    assert rows[0][0] == "pool" and ["memory", "kind", "of", "why"] in rows
    assert re.fullmatch(r"Explanation\(\d+ tensors at the peak of .*\)", repr(explanation))
    choices = memonger.plan(net(), SHAPES, patience=0.02).explain()
    assert ["memory", "choice", "of", "why"] in cells(choices._repr_html_())
    assert repr(choices) == f"PlanExplanation({len(choices.tensors)} tensors)"


def test_a_check_that_fails_is_a_table_of_differences() -> None:
    right, wrong = net(), mx.sym.load_json(net().tojson().replace('"tanh"', '"sigmoid"', 1))
    shapes = {"data": (4, 64)}
    assert memonger.check(right, right, shapes)._repr_html_().startswith("<p>equal: ")
    report = memonger.check(right, wrong, shapes)
    assert ["step", "kind", "name", "largest difference"] in cells(report._repr_html_())
    assert repr(report).startswith("CheckReport(") and len(repr(report)) < 250


def test_a_plot_without_a_file_is_a_figure() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    assert isinstance(memonger.plan(net(), SHAPES, patience=0.02).plot(), figure)
    assert isinstance(memonger.frontier(net(), SHAPES, points=2, patience=0.02).plot(), figure)


def test_a_report_without_a_file_is_a_page_in_a_frame(tmp_path: Path) -> None:
    plans = memonger.frontier(net(), SHAPES, points=2, patience=0.02)
    largest = memonger.largest_batch(net(), {"data": (None, 64)}, "9MB", patience=0.02)
    for result in (plans[-1], plans, largest):
        page = result.report()
        assert page is not None and result.report(tmp_path / "page.html") is None
        assert page.html == (tmp_path / "page.html").read_text(encoding="utf-8")
        (source,) = re.findall(
            '<iframe srcdoc="([^"]*)" style="[^"]*"></iframe>', page._repr_html_()
        )
        assert html.unescape(source) == page.html
        assert repr(page) == f"Page({len(page.html)} characters of HTML, which a notebook shows)"


@pytest.mark.slow
def test_the_tutorial_runs_as_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows tables and a page, and learns the same with the plan."""
    nbclient = pytest.importorskip("nbclient", reason="needs the extra 'notebook'")
    import nbformat

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "examples" / "tutorial.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    results = [
        output.data
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "execute_result"
    ]
    assert ["text/html" in data for data in results] == [True, True, True, False]
    assert "<td style" in results[0]["text/html"] and "60 %" not in results[1]["text/html"]
    assert results[2]["text/html"].startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
    assert results[3]["text/plain"] == "True"
