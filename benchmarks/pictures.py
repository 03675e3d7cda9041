"""Draw the pictures of the documentation: memory over a training step, the frontier, reports.

    python benchmarks/pictures.py docs  # needs matplotlib: pip install '.[plot]'
    python benchmarks/pictures.py docs --pages  # Chromium; pip install '.[plot,report,browser]'

The network is ResNet-50 v1 of Gluon's model zoo. Memory is the same on every machine; the times of
the frontier are predicted from the rates of the device that it is drawn on, those of reports for a
T4.
"""

from __future__ import annotations

import argparse
import base64
import io
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import memonger

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "helpers")]
import browsing
import networks

MARGIN = 12  # pixels above a section
BATCH_BUDGET, GPU = "4GB", "T4"  # of reports


def draw(symbol: Any, shapes: Any, folder: Path) -> None:
    """Write the three pictures of a network into a folder.

    Parameters
    ----------
    symbol : mx.sym.Symbol
    shapes : dict
        Shapes of its inputs.
    folder : Path
    """
    for how in ("marks", "schedule"):
        plan = memonger.plan(symbol, shapes, how=how)
        plan.plot(folder / (f"memory-{how}.png"))
        print(plan, end="\n\n")
    plans = memonger.frontier(symbol, shapes)
    plans.plot(folder / "frontier.png")
    print(plans)


def draw_pages(symbol: Any, shapes: Any, folder: Path) -> None:
    """Write the three pictures of reports of a network into a folder; arguments as of `draw`."""
    plans = memonger.frontier(symbol, shapes, gpu=GPU)
    no_batch = {name: (None, *shape[1:]) for name, shape in shapes.items()}
    driver = browsing.start_chromium()
    driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
    with tempfile.TemporaryDirectory() as place:
        page = Path(place) / "page.html"
        memonger.plan(symbol, shapes, gpu=GPU).report(page, others=plans)
        browsing.opened(driver, page, "picture")
        for button in ("#modes [data-value=kind]", "#scales [data-value=own]"):
            browsing.press(driver, button)
        browsing.mouse(driver, "#unplanned-plot", 0.5, 0.45).perform()
        browsing.until(
            lambda: driver.execute_script("return !document.getElementById('tip').hidden")
        )
        save(driver, "#step", 880, folder / "report.png")
        plans.report(page, budget="60%")
        save(
            browsing.opened(driver, page, "picture"),
            "#frontier",
            645,
            folder / "report-frontier.png",
        )
        memonger.largest_batch(symbol, no_batch, BATCH_BUDGET, gpu=GPU).report(page)
        save(browsing.opened(driver, page, "picture"), "#batches", 536, folder / "report-batch.png")
    driver.quit()


def save(driver: Any, section: str, height: int, file: Path) -> None:
    """Write a picture of the upper part of a section of a page, in 256 colours."""
    from PIL import Image

    place = "return document.querySelector(arguments[0]).getBoundingClientRect().top + scrollY"
    top, (width, _) = driver.execute_script(place, section), browsing.SIZES["picture"]
    clip = {"x": 0, "y": top - MARGIN, "width": width, "height": height, "scale": 1}
    time.sleep(1)  # until Plotly has drawn what was resized
    data = driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip})["data"]
    picture = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
    picture.quantize(256).save(file, optimize=True)


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where they go")
    parser.add_argument("--net", default="resnet50_v1", help="any of Gluon's model zoo")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--pages", action="store_true", help="draw those of reports")
    options = parser.parse_args()
    pictures = draw_pages if options.pages else draw
    pictures(*networks.model_zoo(options.net, options.batch), options.folder)


if __name__ == "__main__":
    main()
