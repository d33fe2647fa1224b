"""Chromium without a window, for the page's tests; and its picture, of a server that is ready:

python -m tests.server.chromium http://127.0.0.1:8000 docs/page.png
"""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
ALONE = ("--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-sync", *ALONE)
MISSING = "there is no Chromium here: apt-get install chromium"


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def launch(path: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


def picture(url: str, file: str) -> None:
    """Of the page at its end, with the prompt that it has by itself; K is fixed, so that the tokens are the same."""
    path = find_chromium()
    if path is None:
        sys.exit(MISSING)
    with launch(path) as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
        page.goto(url)
        for _ in range(2):  # the first one wakes the machine up
            page.get_by_label("Max tokens").fill("192")
            page.get_by_label("K, drafted per round").select_option("7")
            page.get_by_role("button", name="Generate").click()
            expect(page.locator("#status")).to_have_text("ended at its token limit")
        page.screenshot(path=file)


if __name__ == "__main__":
    picture(*sys.argv[1:])
