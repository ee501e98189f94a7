"""One headless Chromium for all tests of pages."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""Names of the browser's program."""
WAIT_SECONDS = 10
"""How long to wait for an expression to become true."""


def program() -> str | None:
    """The path of the browser; None if there is none."""
    given = os.environ.get("CKPTTOOL_TEST_BROWSER")
    return given or next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def running() -> Iterator[Any]:
    """A running browser; skips the test if there is none."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright, which drives the browser, is not installed"
    )
    path = program()
    if path is None:
        pytest.skip("no Chromium is installed (apt-get install chromium), so that pages cannot be opened")
    arguments = ["--disable-gpu", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield Browser(browser)
        browser.close()


class Browser:
    """A browser whose windows are used again: a new one is a process of the browser's, and takes a second of CPU.

    Args:
        browser: Playwright's.
    """

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._free: dict[tuple[str, int, bool], list[Any]] = {}

    def window(self, scheme: str, width: int, *, forced: bool) -> Any:
        """Return an empty window: see ``Opened``."""
        size = {"width": width, "height": 900}
        free = self._free.setdefault((scheme, width, forced), [])
        if not free:
            colours = "active" if forced else "none"
            context = self._browser.new_context(color_scheme=scheme, viewport=size, forced_colors=colours)
            free.append(context.new_page())
        page = free.pop()
        page.emulate_media(media="screen")
        page.set_viewport_size(size)
        return page

    def give_back(self, page: Any, scheme: str, width: int, *, forced: bool) -> None:
        """Take a window that is used no more."""
        page.goto("about:blank")
        page.mouse.move(width - 1, 899)  # where no page has anything
        self._free[scheme, width, forced].append(page)


class Opened:
    """A page in the browser.

    Args:
        browser: The browser.
        path: The file.
        scheme: "light" or "dark".
        width: Width of the window in pixels.
        forced: Whether the reader's own colours replace those of the page.
    """

    def __init__(
        self, browser: Browser, path: Path, scheme: str = "light", width: int = 1280, *, forced: bool = False
    ) -> None:
        self._browser, self._kind = browser, (scheme, width)
        self._forced = forced
        self.page = browser.window(scheme, width, forced=forced)
        self.complaints: list[str] = []
        """Errors and warnings of the console, and errors that no script caught."""
        self.requests: list[str] = []
        """Addresses that the page asked for."""
        self._listening: dict[str, Any] = {
            "console": lambda m: self.complaints.append(m.text) if m.type in {"error", "warning"} else None,
            "pageerror": lambda error: self.complaints.append(str(error)),
            "request": lambda request: self.requests.append(request.url),
        }
        for event, heard in self._listening.items():
            self.page.on(event, heard)
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready='1']", timeout=60_000)

    def close(self) -> None:
        """Give the window back."""
        for event, heard in self._listening.items():
            self.page.remove_listener(event, heard)
        self._browser.give_back(self.page, *self._kind, forced=self._forced)

    def run(self, script: str, argument: Any = None) -> Any:
        """The value of an expression in the page."""
        return self.page.evaluate(script, argument)

    def text(self, selector: str) -> str:
        """The text of an element."""
        found: str = self.page.inner_text(selector)
        return found

    def wait_for(self, script: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not self.run(f"!!({script})"):  # Playwright's own loop evaluates text, which the page's policy forbids
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.02)

    def sound(self) -> None:
        """Assert that nothing complained, and that nothing but the file was asked for."""
        assert self.complaints == []
        assert len(self.requests) == 1
        assert self.requests[0].startswith("file://")
