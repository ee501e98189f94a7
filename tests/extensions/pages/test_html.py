"""The option ``--html``: wrong usage, and commands whose reports it writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cli import test_interface
from tests.cli.test_interface import ZERO3

if TYPE_CHECKING:
    from pathlib import Path

USAGE = [
    ["inspect", ZERO3, "--html", "page.html", "--params"],
    ["inspect", ZERO3, "--html", "page.html", "--json"],
    ["diff", ZERO3, ZERO3, "--html", "page.html", "--json"],
    ["prune", ZERO3, "--keep-last", "1", "--html", "page.html"],
]


@pytest.mark.parametrize("arguments", USAGE, ids=lambda a: " ".join(a[:1] + a[2:]).replace(ZERO3, "SRC"))
def test_wrong_usage_exits_with_2_and_says_how_it_is_right(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_interface.test_wrong_usage_exits_with_2_and_says_how_it_is_right(arguments, tmp_path, monkeypatch)
