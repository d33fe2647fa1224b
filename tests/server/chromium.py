"""Headless Chromium for the tests of the demo page. As a script it takes the page's screenshot from a running server:

python -m tests.server.chromium http://127.0.0.1:8000 docs/page.png [light|dark [WIDTH]]
"""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
OFFLINE = ("--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-sync", *OFFLINE)
MISSING = "Chromium is not installed: apt-get install chromium"


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def launch(path: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


def take_screenshot(url: str, file: str, scheme: str = "light", width: str = "1280") -> None:
    """Saves the page after a generation from its default prompt; with a fixed K each run has the same tokens.

    scheme: "light" or "dark". width: of the window, in pixels.
    """
    path = find_chromium()
    if path is None:
        sys.exit(MISSING)
    with launch(path) as browser:
        page = browser.new_page(viewport={"width": int(width), "height": 800}, color_scheme=scheme)
        page.goto(url)
        for _ in range(2):  # the first run warms up
            page.get_by_label("Max tokens").fill("192")
            page.get_by_label("K, drafted per round").select_option("7")
            page.get_by_role("button", name="Generate").click()
            expect(page.locator("#status")).to_have_text("ended at its token limit")
        page.screenshot(path=file)


if __name__ == "__main__":
    take_screenshot(*sys.argv[1:])
