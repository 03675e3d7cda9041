"""Reports in a browser, headless and offline: what it shows is the Plan's, and it does as it says.

Needs Chromium, its driver (Debian: ``chromium``, ``chromium-driver``) and the extra "browser".
"""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any, Iterator

import memonger
import pytest
from memonger.support.errors import format_size

from browsing import SIZES, brightness, changed, content, count, inks, mouse, opened, point, press
from browsing import shows, start_chromium, text, until
from pages import chain_plans, data_of, live_of
import networks

pytestmark = pytest.mark.browser

NASTY = "</script><img src=x onerror=alert(1)><b>слой"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Return a browser without a network."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)} here: apt-get install chromium chromium-driver")
    pytest.importorskip("selenium", reason="needs the extra 'browser'")
    driver = start_chromium()
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the plans of a page, what is in it, and where it is."""
    _, _, plans, schedule = chain_plans()
    page = tmp_path_factory.mktemp("pages") / "plans.html"
    plans.report(page, others=[schedule], budget="60%", network=NASTY)
    return [*plans, schedule], data_of(page), page


def assert_shown(driver: Any, plan: memonger.Plan) -> None:
    """Check that the headline is that of a Plan."""
    whole, after = plan.unplanned_bytes, plan.pool_bytes
    saved = plan.unplanned_bytes - plan.pool_bytes
    for tile, nbytes, words in (
        ("Before", whole, format_size(whole)),
        ("After", after, format_size(after)),
        ("Saved", saved, f"{100 * saved / whole:.0f} %"),
    ):
        shown = driver.execute_script(
            "return document.querySelector(arguments[0]).dataset.bytes", f"[data-tile={tile}]"
        )
        assert int(shown) == nbytes and words in text(driver, f"[data-tile={tile}]")
    assert f"+{100 * plan.predict_time():.1f} %" in text(driver, "[data-tile='Time added']")
    facts = text(driver, "#facts")
    of = f"{len(plan.recomputed)} of {len(plan.kept) + len(plan.recomputed)} operators"
    for words in (format_size(plan.peak_bytes), format_size(plan.floor_bytes), plan.floor, of):
        assert words in facts
    for words in (format_size(plan.device_bytes), format_size(plan.unplanned_device_bytes)):
        assert words in facts
    assert count(driver, "#table tbody tr") == len(plan.kept) + len(plan.recomputed)
    assert count(driver, "#table .tag.r") == len(plan.recomputed)
    sums = [
        f"{choice} {format_size(nbytes, whole)}, {number} tensors"
        for choice, (nbytes, number) in plan.explain().sums.items()
    ]
    assert text(driver, "#sums") == f"Tensors of the forward pass: {'; '.join(sums)}."
    assert f"pool of {format_size(plan.pool_bytes)}" in text(driver, "#planned-title")
    assert content(driver, "#printed") == str(plan)


def test_it_loads_offline_and_shows_the_plan(chromium: Any, report: Any) -> None:
    plans, data, page = report
    driver = opened(chromium, page)
    loaded = "return performance.getEntriesByType('resource').map((each) => each.name)"
    assert [name for name in driver.execute_script(loaded) if not name.startswith("data:")] == []
    assert text(driver, "h1") == NASTY and count(driver, "img, b") == count(driver, "svg b") == 0
    hidden = "return ['batches', 'frontier'].map((id) => document.getElementById(id).hidden)"
    assert driver.execute_script(hidden) == [True, False]
    by_pool = {plan.pool_bytes: plan for plan in plans}
    for number in (data["chosen"], 0, len(plans) - 1):
        driver.execute_script(
            "const list = document.getElementById('plan'); list.value = arguments[0];"
            "list.dispatchEvent(new Event('change'))",
            str(number),
        )
        assert_shown(driver, by_pool[data["plans"][number]["figures"]["pool_bytes"]])
        assert text(driver, "[data-call=Python]") == data["plans"][number]["python"]
    assert driver.get_log("browser") == []


def test_an_old_browser_is_told(chromium: Any, report: Any) -> None:
    source = {"source": "delete window.DecompressionStream"}
    added = chromium.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", source)
    chromium.get(report[2].as_uri())
    assert "a browser of 2023 or later" in text(chromium, "#undrawn")
    assert "DecompressionStream" in chromium.get_log("browser")[0]["message"]
    chromium.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
    assert count(opened(chromium, report[2]), "#undrawn") == 0


def test_hover_tells_what_is_alive(chromium: Any, report: Any) -> None:
    plans, data, page = report
    driver = opened(chromium, page)
    timelines = {
        "unplanned": data["unplanned"],
        "planned": data["plans"][data["chosen"]]["timeline"],
    }
    for which, line in timelines.items():
        for x in (0.3, 0.7):
            mouse(driver, f"#{which}-plot .nsewdrag", x, 0.97).perform()
            until(lambda: driver.execute_script("return !document.getElementById('tip').hidden"))
            tip = text(driver, "#tip")
            step, steps = map(int, re.findall(r"step (\d+) of (\d+)", tip)[0])
            assert steps == line["steps"] and abs(step - x * steps) < 0.03 * steps
            assert f"{format_size(live_of(line)[step])} alive" in tip
            row = line["runs"][step]
            assert row < 0 or data["operators"]["name"][row] in tip
            span = re.findall(r"([\d.]+ [MK]iB) · (?:steps|in step) (\d+)(?: to (\d+))?", tip)[0]
            start, stop = int(span[1]), int(span[2] or span[1])
            assert start <= step <= stop and "4096 × 64" in tip
            assert re.search("kept|recomputed|freed|gradient", tip)
    assert driver.get_log("browser") == []


def test_a_click_lists_what_is_alive(chromium: Any, report: Any) -> None:
    _, data, page = report
    driver = opened(chromium, page)
    assert "the peak" in text(driver, "#alive-title")
    for which, x in (("unplanned", 0.4), ("planned", 0.6)):
        planned = data["plans"][data["chosen"]]["timeline"]
        line = data["unplanned"] if which == "unplanned" else planned
        before = text(driver, "#alive-title")
        mouse(driver, f"#{which}-plot .nsewdrag", x, 0.9).click().perform()
        until(partial(changed, driver, "#alive-title", before))
        step = int(re.findall(r"step (\d+) of", text(driver, "#alive-title"))[0])
        tensors = line["tensors"]
        alive = [
            nbytes
            for nbytes, first, last in zip(tensors["bytes"], tensors["first"], tensors["last"])
            if first <= step <= last
        ]
        rows = "return [...document.querySelectorAll('#alive td[data-bytes]')]"
        shown = driver.execute_script(rows + ".map((each) => Number(each.dataset.bytes))")
        assert shown == sorted(alive, reverse=True)[: len(shown)]
        rest = re.findall(r"more in (\d+) tensors", text(driver, "#alive-rest")) or [0]
        assert len(shown) + int(rest[0]) == len(alive) and len(shown) == min(12, len(alive))


def test_a_click_on_the_frontier_shows_that_plan(chromium: Any, report: Any) -> None:
    plans, data, page = report
    driver = opened(chromium, page)
    drawn = content(driver, "#frontier-plot")
    for name in ("no plan", "marks", "schedule", f"budget {format_size(data['budget']['bytes'])}"):
        assert name in drawn
    shown: list[str] = []
    for number in (1, len(plans) - 1, 0):
        figures = data["plans"][number]["figures"]
        before = text(driver, "[data-call=Python]")
        x, y = figures["pool_bytes"] / 2**20, 100 * figures["time_overhead"]
        point(driver, "frontier-plot", x, y).click().perform()
        until(partial(changed, driver, "[data-call=Python]", before))
        (plan,) = (plan for plan in plans if plan.pool_bytes == figures["pool_bytes"])
        assert_shown(driver, plan)
        shown.append(text(driver, "[data-call=Python]"))
        assert shown[-1] == data["plans"][number]["python"]
    assert len(set(shown)) == 3
    press(driver, "#next-plan")
    assert text(driver, "[data-call=Python]") == data["plans"][1]["python"]
    press(driver, "#axes [data-value=device]")
    drawn = content(driver, "#frontier-plot")
    assert "memory of the device" in drawn and "budget" not in drawn
    assert driver.get_log("browser") == []


def test_a_budget_of_the_device_is_drawn_less_the_optimizer(chromium: Any, tmp_path: Path) -> None:
    page = tmp_path / "plans.html"
    chain_plans()[2].report(page, budget="30MB", budget_of="device", optimizer="adam")
    driver, limit = opened(chromium, page), data_of(page)["budget"]["bytes"]
    assert f"budget less optimizer {format_size(limit)}" in content(driver, "#frontier-plot")
    (line,) = driver.execute_script("return document.getElementById('frontier-plot').layout.shapes")
    assert line["x0"] == line["x1"] == limit / 2**20
    assert "does not fit" not in text(driver, "#notices")
    press(driver, "#before-plan")
    assert f"does not fit: budget less optimizer {format_size(limit)}" in text(driver, "#notices")


def test_the_network_without_a_plan_is_a_point_beside_that_which_is_only_placed(
    chromium: Any, tmp_path: Path
) -> None:
    symbol, shapes = networks.resnet((1, 1, 1, 1), batch=2, image=64, filters=16)
    plans = memonger.frontier(symbol, shapes, how="schedule", points=4, patience=0.02)
    plans.report(tmp_path / "plans.html", budget=plans[1].pool_bytes)
    driver = opened(chromium, tmp_path / "plans.html")
    drawn = driver.execute_script("return document.getElementById('frontier-plot').data")
    points = {trace.get("name"): [*zip(trace["x"], trace["y"])] for trace in drawn}
    assert points["no plan"] == [(plans[0].unplanned_bytes / 2**20, 0)]
    placed = "nothing recomputed, placed by memonger"
    assert points[placed] == [(plans[1].pool_bytes / 2**20, 0)]
    sentence = (
        "placing alone saves memory, because memonger puts each tensor anywhere in one arena, and "
        "MXNet does not split the blocks that it reuses"
    )
    assert text(driver, "#placing") == f"Where nothing is recomputed, {sentence}."
    size = format_size(plans[1].pool_bytes)
    chosen = "return document.getElementById('plan').selectedOptions[0].text"
    assert driver.execute_script(chosen) == f"{size}, +0.0 % time, {placed}"
    count_all = len(plans[1].kept)
    assert f"0 of {count_all} operators, {sentence}" in text(driver, "#facts")
    assert text(driver, "#notices") == ""
    press(driver, "#before-plan")
    notice = "This is the network as it is: nothing is recomputed, and MXNet places the tensors."
    assert notice in text(driver, "#notices") and "does not fit" in text(driver, "#notices")


@pytest.mark.parametrize("how", ["marks", "schedule"])
def test_a_row_of_operators_fits_and_does_not_contradict_itself(
    how: str, chromium: Any, tmp_path: Path
) -> None:
    symbol, shapes = networks.resnet((1, 1, 1, 1), batch=1024)
    plan = memonger.plan(symbol, shapes, how=how, patience=0.02)
    plan.report(tmp_path / "plan.html")
    driver = opened(chromium, tmp_path / "plan.html", "wide")
    units = set(re.findall(r"\b[KMG]iB\b", text(driver, "body")))
    assert units == {"GiB"} and "<0.01 GiB" in text(driver, "body")
    table = "const s = document.querySelector('#table').parentElement;"
    assert driver.execute_script(f"{table} return s.scrollWidth <= s.clientWidth")
    press(driver, "#more")
    cells = "[...row.cells].map((cell) => cell.innerText)"
    rows = f"return [...document.querySelectorAll('#table tbody tr')].map((row) => {cells})"
    whys = {row[1]: (row[-2], row[-1]) for row in driver.execute_script(rows)}
    choices = {t.name: t for t in plan.explain().tensors}
    assert len(whys) == len(plan.kept) + len(plan.recomputed)
    for name in plan.recomputed:
        again, (tag, why) = choices[name].times - 1, whys[name]
        assert tag == "recomputed" + (f" {again} times" if again > 1 else "")
        told = "a copy of its result is kept|of . tensors are|kept for its first readers"
        assert "kept" not in why or re.search(told, why)
    copies = [t for t in choices.values() if t.name in plan.copies]
    reasons = {t.reason for t in copies if t.choice == "kept"}
    copied = r"a copy of its result is kept: (.*); it takes [\d.]+ .?s more"
    some = r"[\d.]+ GiB are not held; it takes [\d.]+ .?s more; 2 of 3 tensors are kept: .*"
    found = {m[1] for _, why in whys.values() for m in [re.fullmatch(copied, why)] if m}
    assert found == reasons and bool(reasons) == (how == "marks")
    assert any(re.fullmatch(some, why) for _, why in whys.values()) == (how == "schedule")


@pytest.fixture(scope="module", params=["pool", "device"])
def largest(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the largest batch within 30 MB, what is in its page, and where it is."""
    page, symbol = tmp_path_factory.mktemp("pages") / "batch.html", chain_plans()[0]
    shapes, of = {"data": (None, 64), "label": (None, 64)}, request.param
    batch = memonger.largest_batch(symbol, shapes, "30MB", budget_of=of, how="marks")
    batch.report(page)
    return of, batch, data_of(page), page


def test_batches_are_drawn_and_a_click_shows_their_plan(chromium: Any, largest: Any) -> None:
    of, batch, data, page = largest
    driver = opened(chromium, page)
    assert_shown(driver, batch.plan)
    sentence, budget = text(driver, "#batches-about"), format_size(30e6)
    for words in (f"A batch of {batch.batch} fits into {budget}", f"of {batch.unplanned_batch} w"):
        assert words in sentence
    drawn = driver.execute_script("return document.getElementById('batches-plot').data")
    lines = {line["name"]: list(zip(line["x"], line["y"])) for line in drawn}
    planned, without = lines["with the fastest plan that fits"], lines["without a plan"]
    assert planned[0] == without[-1] and planned[0][0] == batch.unplanned_batch
    assert planned[-1][0] == batch.batch
    for full in (batch.unplanned_batch, batch.batch):
        assert f"full at {full}" in content(driver, "#batches-plot")
    for entry in data["batches"]:
        size, time = entry["batch"], entry["figures"]["time_overhead"]
        points = planned if size >= batch.unplanned_batch else without
        (speed,) = (speed for x, speed in points if x == size)
        assert speed == pytest.approx(size / (entry["step_seconds"] * (1 + time)), rel=1e-12)
        assert (time > 0) == (size > batch.unplanned_batch)
    for k in (5, 1):
        entry, before = data["batches"][k], text(driver, "#batch-title")
        (speed,) = (y for x, y in planned + without if x == entry["batch"])
        point(driver, "batches-plot", entry["batch"], speed).perform()
        until(partial(shows, driver, "#batches-plot .hoverlayer", f"batch of {entry['batch']:,}:"))
        tip = content(driver, "#batches-plot .hoverlayer")
        assert "as predicted" in tip
        point(driver, "batches-plot", entry["batch"], speed).click().perform()
        until(partial(changed, driver, "#batch-title", before))
        assert f"A batch of {entry['batch']}: " in text(driver, "#batch-title")
        shown = text(driver, "#batch-calls")
        assert entry["python"] in shown and entry["command"] in shown
        taken = format_size(entry["figures"][f"{of}_bytes"])
        assert f"{taken} of {budget}" in shown and f"{taken} of {budget}" in tip
        added = f"{100 * entry['figures']['time_overhead']:.1f} %"
        without_plan = entry["figures"][f"unplanned_{of}_bytes".replace("_pool", "")]
        assert (f"{format_size(without_plan)} without a plan" in tip) == (k == 5)
        assert (added in shown) == (f"+{added} time" in tip) == (k == 5)
    assert driver.get_log("browser") == []


def test_stacks_add_up_to_the_same_in_all_ways_and_scales_change(
    chromium: Any, report: Any
) -> None:
    _, data, page = report
    driver = opened(chromium, page)
    added = (
        "const traces = document.getElementById('planned-plot').data.filter((t) => t.stackgroup);"
        "return [traces.map((t) => t.name), traces[0].y.map((_, i) =>"
        " traces.reduce((sum, t) => sum + t.y[i], 0))]"
    )
    live = live_of(data["plans"][data["chosen"]]["timeline"])
    for mode, name in (("op", "FullyConnected"), ("part", "from fc0"), ("kind", "recomputed")):
        press(driver, f"#modes [data-value={mode}]")
        names, total = driver.execute_script(added)
        assert name in names and name in text(driver, "#legend")
        assert [round(y * 2**20) for y in total[:-1]] == live.tolist()
    top = "return document.getElementById('planned-plot')._fullLayout.yaxis.range[1]"
    before = driver.execute_script(top)
    press(driver, "#scales [data-value=own]")
    assert driver.execute_script(top) < before
    assert driver.get_log("browser") == []


def test_the_table_sorts_searches_and_filters(chromium: Any, report: Any) -> None:
    plans, data, page = report
    driver = opened(chromium, page)
    rows = "return [...document.querySelectorAll('#table tbody tr')].map((r) => +r.dataset.row)"
    forward, names = data["operators"]["forward"], data["operators"]["name"]
    press(driver, "#table [data-key=forward]")
    times = [forward[r] for r in driver.execute_script(rows)]
    assert times == sorted(forward, reverse=True)
    press(driver, "#table [data-key=forward]")
    assert [forward[r] for r in driver.execute_script(rows)] == sorted(forward)
    typed = "const s = document.getElementById(arguments[0]); s.value = arguments[1];"
    typed += "s.dispatchEvent(new Event(s.tagName === 'SELECT' ? 'change' : 'input'))"
    driver.execute_script(typed, "search", "TANH1")
    assert {names[r] for r in driver.execute_script(rows)} >= {"tanh1", "tanh10", "tanh15"}
    driver.execute_script(typed, "search", "")
    driver.execute_script(typed, "choice", "k")
    fates = data["plans"][data["chosen"]]["fates"]
    kept = {r for r, fate in enumerate(fates) if {"k", "c"} & {*fate}}
    assert {*driver.execute_script(rows)} == kept and len(kept) < len(fates)
    driver.execute_script(typed, "choice", "")
    press(driver, "#groups [data-group=Activation]")
    assert {names[r] for r in driver.execute_script(rows)} == {f"tanh{k}" for k in range(16)}


@pytest.mark.parametrize("size", ["desktop", "phone", "wide"])
def test_the_page_is_readable_light_dark_on_a_phone_and_on_paper(
    size: str, chromium: Any, report: Any, tmp_path: Path
) -> None:
    colours = []
    for scheme in ("light", "dark"):
        driver = opened(chromium, report[2], size, scheme)
        wide = driver.execute_script("return document.documentElement.scrollWidth")
        assert wide <= SIZES[size][0]
        style = "return getComputedStyle(document.body)"
        colours += driver.execute_script(
            f"{style}.backgroundColor + ' ' + {style[7:]}.color"
        ).split(") ")
        sheets = [brightness(driver, css, "backgroundColor") for css in ("body", "section", "pre")]
        if scheme == "light":
            assert min(sheets) > 230 and max(inks(driver)) < 110
        else:
            assert max(sheets) < 60 and min(inks(driver)) > 140
        assert len(driver.get_screenshot_as_png()) > 10_000
    assert len(set(colours)) == 4
    width = "return document.querySelector('#planned-plot svg').getBoundingClientRect().width"
    before, dark = driver.execute_script(width), inks(driver)
    assert_on_paper(driver, width)
    until(lambda: driver.execute_script(width) == before)  # as wide as it was
    assert inks(driver) == dark
    assert driver.get_log("browser") == []


def assert_on_paper(driver: Any, width: str) -> None:
    """Check that what is printed is light, as wide as a sheet, and has no buttons."""
    media = {"media": "print", "features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    driver.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert max(inks(driver)) < 110 and driver.execute_script(width) == 680
    for css in ("#chooser", "#modes", "#search", ".call button", ".modebar-container"):
        places = "return document.querySelector(arguments[0]).getClientRects().length"
        assert driver.execute_script(places, css) == 0, css
    driver.execute_script("dispatchEvent(new Event('afterprint'))")
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {**media, "media": ""})
    driver.execute_script("addEventListener('beforeprint', () => { document.title = 'printed' })")
    pdf = driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert len(pdf["data"]) > 20_000 and driver.title == "printed"
