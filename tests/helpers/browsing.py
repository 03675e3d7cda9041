"""A page in a browser: open it, read it, move the mouse over it."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import Any, Callable

SIZES = {"desktop": (1240, 900), "phone": (390, 844), "wide": (1400, 900), "picture": (1000, 5000)}


def start_chromium() -> Any:
    """Start Chromium without a window and without a network."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1240,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(str(shutil.which("chromedriver")))
    driver = webdriver.Chrome(options=options, service=service)
    nothing = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    driver.execute_cdp_cmd("Network.enable", {})
    driver.execute_cdp_cmd("Network.emulateNetworkConditions", nothing)
    return driver


def opened(driver: Any, page: Path, size: str = "desktop", scheme: str = "light") -> Any:
    """Return a browser with this page drawn, in which nothing was wrong."""
    width, height = SIZES[size]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    driver.get(page.as_uri())
    until(lambda: driver.execute_script("return document.documentElement.dataset.ready"))
    assert driver.get_log("browser") == []
    return driver


def until(true: Callable[[], Any]) -> Any:
    """Wait for something to be true, half a minute at most."""
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)
    return true()


def text(driver: Any, css: str) -> str:
    return str(driver.execute_script("return document.querySelector(arguments[0]).innerText", css))


def content(driver: Any, css: str) -> str:
    return str(driver.execute_script(f"return document.querySelector('{css}').textContent"))


def shows(driver: Any, css: str, words: str) -> bool:
    return words in content(driver, css)


def changed(driver: Any, css: str, before: str) -> bool:
    return text(driver, css) != before


def count(driver: Any, css: str) -> int:
    return int(driver.execute_script("return document.querySelectorAll(arguments[0]).length", css))


def press(driver: Any, css: str) -> None:
    driver.execute_script("document.querySelector(arguments[0]).click()", css)


def mouse(driver: Any, css: str, x: float, y: float) -> Any:
    """Return the mouse, moved to a place in an element, told as shares of it."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    element = driver.find_element(By.CSS_SELECTOR, css)
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    size = element.rect
    across, down = int((x - 0.5) * size["width"]), int((y - 0.5) * size["height"])
    actions = ActionChains(driver, duration=50)
    actions.move_to_element_with_offset(element, across - 3, down)
    return actions.move_to_element_with_offset(element, across, down)


def point(driver: Any, plot: str, x: float, y: float) -> Any:
    """Return the mouse, moved to a point of a picture, without which no click counts."""
    place = (
        "const {xaxis: x, yaxis: y} = document.getElementById(arguments[0])._fullLayout;"
        "return [x.d2p(arguments[1]) / x._length, y.d2p(arguments[2]) / y._length]"
    )
    return mouse(driver, f"#{plot} .nsewdrag", *driver.execute_script(place, plot, x, y)).pause(0.3)


def brightness(driver: Any, css: str, what: str) -> float:
    """Return the brightness of a colour of an element, from 0 to 255."""
    style = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    colour = driver.execute_script(style, css, what)
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


def inks(driver: Any) -> list[float]:
    """Return the brightness of what is written, on the page and in its pictures."""
    pictures = "#planned-plot .xtick text", "#frontier-plot .legendtext"
    written = [brightness(driver, css, "color") for css in ("h1", "td.name")]
    return written + [brightness(driver, css, "fill") for css in pictures]
