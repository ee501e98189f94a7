"""What the tests of saving share."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMORY = "/dev/shm"  # noqa: S108  nothing in it is trusted


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """An empty directory, in memory where there is such a place: thousands are made and removed in it."""
    if not os.access(MEMORY, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="ckpttool-tests-", dir=MEMORY) as path:
        yield Path(path)
