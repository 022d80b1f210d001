"""Pages in the system's Chromium, through Playwright: what they say, fetch and complain of."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

READY = "html[data-ready=yes]"
DESK, PHONE = 1280, 390


class OpenPage:
    """A page that is open, with what it has asked for and what went wrong in it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors: list[str] = []
        self.asked: list[str] = []
        page.on(
            "console",
            lambda message: (
                self.errors.append(message.text) if message.type in ("error", "warning") else None
            ),
        )
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))

    def open(self, address: str) -> OpenPage:
        self.page.goto(address)
        self.page.wait_for_selector(READY, state="attached")
        return self

    def opened_in(self) -> float:
        """Seconds from the click to a page that is drawn."""
        return float(self.page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd / 1000"))

    def check(self, own: str) -> None:
        """Nothing went wrong, and nothing but the page itself (and its own server) was asked for."""
        assert self.errors == []
        assert all(address.startswith(own) for address in self.asked), self.asked
        assert self.page.evaluate("window.hacked") is None

    def check_fits(self) -> None:
        """Nothing is wider than the screen, no text is too small to read, no line of it is cut off."""
        wide, screen = self.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide <= screen
        small = self.page.evaluate(
            """() => [...document.querySelectorAll('main *, header *')]
            .filter(one => one.checkVisibility())
            .filter(one => [...one.childNodes].some(node => node.nodeType === 3 && node.data.trim()))
            .filter(one => !one.closest('svg') && parseFloat(getComputedStyle(one).fontSize) < 11)
            .map(one => one.textContent.slice(0, 40))"""
        )
        assert small == []


def drawn(opened: OpenPage) -> int:
    """How many charts have something on them: an empty canvas has one colour."""
    found = opened.page.evaluate(
        """() => [...document.querySelectorAll('.chart canvas')].map(canvas => {
            const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
            const seen = new Set();
            for (let place = 0; place < pixels.length; place += 4)
                if (pixels[place + 3] > 200) seen.add(pixels.slice(place, place + 3).join());
            return seen.size;
        })"""
    )
    return sum(colours > 2 for colours in found)


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; skipped where neither apt-get nor pip could bring one."""
    library = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("needs chromium: apt-get install chromium")
    with library.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def address(path: Path) -> str:
    return path.resolve().as_uri()
