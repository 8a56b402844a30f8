"""A real Chromium for the tests of the page, driven by Playwright, where both are installed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
    "--disable-sync",
)
_LOOK_MS = 20
_PATIENCE_MS = 30_000  # a machine that runs other tests is slow, and is not what is tested


@contextmanager
def chromium() -> Iterator[Any]:
    """Start a browser; skip the test where there is none."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install '.[browser]'"
    )
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    playwright.expect.set_options(timeout=_PATIENCE_MS)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(_FLAGS))
        try:
            yield browser
        finally:
            browser.close()


def until(page: Any, is_so: Callable[[], bool]) -> None:
    """Let the page go on until something is so."""
    for _ in range(_PATIENCE_MS // _LOOK_MS):
        if is_so():
            return
        page.wait_for_timeout(_LOOK_MS)
    raise AssertionError("it never was so")


class Visit:
    """One person's tab: what it asked for, and what went wrong in it."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.address = address
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._note)

    def _note(self, request: Any) -> None:
        if not request.url.startswith(("data:", "blob:")):
            self.hosts.add(request.url.split("/")[2])

    def open(self, path: str = "/") -> Any:
        """Go to a path of the daemon; return the page."""
        self.page.goto(self.address + path)
        return self.page

    def say(self, text: str) -> None:
        """Write a message and send it, by the keyboard alone."""
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def close(self) -> None:
        """Leave; nothing may have gone wrong, and nobody else been asked."""
        self.context.close()
        if self.errors:
            raise AssertionError(f"the page's script failed: {self.errors}")
        if self.hosts != {self.address.split("/")[2]}:
            raise AssertionError(f"it asked {self.hosts}")
