"""What the workflows run."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_parts_of_the_thorough_run_are_all_tests() -> None:
    text = (ROOT / ".github/workflows/thorough.yml").read_text()
    (block,) = re.findall(r"\n +part:\n((?: +- .*\n)+)", text)
    parts = [path for pattern in re.findall(r"tests/\S+", block) for path in ROOT.glob(pattern)]
    files = [*(ROOT / "tests").rglob("test_*.py")]
    assert {sum(part in (file, *file.parents) for part in parts) for file in files} == {1}
    assert all(any(part in (file, *file.parents) for file in files) for part in parts), "a part has no tests"
