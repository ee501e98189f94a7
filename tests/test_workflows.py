"""What the workflows run."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_parts_of_the_thorough_run_are_all_tests() -> None:
    text = (ROOT / ".github/workflows/thorough.yml").read_text()
    (block,) = re.findall(r"\n +part:\n((?: +- .*\n)+)", text)
    patterns = re.findall(r"tests/\S+", block)
    parts = [{path.relative_to(ROOT) for path in ROOT.glob(pattern)} for pattern in patterns]
    files = {path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}
    assert {file if len(file.parts) == 2 else Path(*file.parts[:2]) for file in files} <= set().union(*parts)
    assert all(parts), "a part has no tests"
    assert sum(map(len, parts)) == len(set().union(*parts)), "no part has the tests of another"
