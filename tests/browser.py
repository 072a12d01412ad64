"""A headless Chromium for tests that look at pages."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")
# No window, no GPU, and nothing that talks to the network on its own.
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
)


@contextmanager
def open_browser() -> Iterator[Any]:
    """A selenium driver with an empty profile.

    Skips the test where there is no browser, or fails it if TULA_REQUIRE_BROWSER is 1.
    """
    browser = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    driver_path = shutil.which("chromedriver")
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        _missing("selenium is not installed")
    if browser is None or driver_path is None:
        _missing(f"needs chromedriver and one of {', '.join(CHROMIUM_NAMES)}")
    options = webdriver.ChromeOptions()
    options.binary_location = str(browser)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options, Service(str(driver_path)))
        driver.set_script_timeout(300)
        try:
            yield driver
        finally:
            driver.quit()


def show(driver: Any, page: Path, width_px: int, height_px: int = 900, colours: str = "light") -> list[str]:
    """Load a file as a screen of that width shows it, every image decoded; returns the errors in the browser's log."""
    metrics = {"width": width_px, "height": height_px, "deviceScaleFactor": 1, "mobile": width_px < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"features": [{"name": "prefers-color-scheme", "value": colours}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
    driver.get(page.absolute().as_uri())
    wait = "const done = arguments[0]; Promise.allSettled([...document.images].map(i => i.decode())).then(() => done())"
    driver.execute_async_script(wait)
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


def _missing(what: str) -> None:
    if os.environ.get("TULA_REQUIRE_BROWSER") == "1":
        pytest.fail(f"TULA_REQUIRE_BROWSER=1, but there is no browser: {what}")
    pytest.skip(f"no browser: {what}")
