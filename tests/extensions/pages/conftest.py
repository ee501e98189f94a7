"""A browser for all tests of pages."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from tests.extensions.pages import browser as browsers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def browser() -> Iterator[browsers.Browser]:
    """A headless browser for all tests of this process."""
    with browsers.running() as running:
        yield running


@pytest.fixture
def opened(browser: browsers.Browser, tmp_path: Path) -> Iterator[Callable[..., browsers.Opened]]:
    """Opens pages, and closes them after the test."""
    pages: list[browsers.Opened] = []
    number = itertools.count()

    def open_page(data: bytes | Path, **options: Any) -> browsers.Opened:
        path = data
        if isinstance(path, bytes):
            path = tmp_path / f"page-{next(number)}.html"
            path.write_bytes(data if isinstance(data, bytes) else b"")
        pages.append(browsers.Opened(browser, path, **options))
        return pages[-1]

    yield open_page
    for page in pages:
        page.close()
