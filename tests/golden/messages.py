"""Writes ``messages.json`` again: the messages that tests expect with ``tests.wording``, for review.

    python -m tests.golden.messages                # of all tests
    python -m tests.golden.messages tests/plan     # of the tests in a directory or a file

It runs these tests, with ``--thorough`` for all parameters. Messages of tests that are skipped are kept.
"""

from __future__ import annotations

import ast
import collections
import json
import sys
from typing import TYPE_CHECKING

import pytest

from tests import wording

if TYPE_CHECKING:
    from collections.abc import Sequence


def functions_with_messages() -> dict[str, set[str]]:
    """Return the functions that expect messages, by file."""
    found: dict[str, set[str]] = {}
    for path in sorted((wording.ROOT / "tests").rglob("test_*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        imports = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module == "tests.wording"]
        if expecting := {alias.name for node in imports for alias in node.names}:
            functions = [n for n in nodes if isinstance(n, ast.FunctionDef)]
            found[path.relative_to(wording.ROOT).as_posix()] = {f.name for f in functions if _calls(f, expecting)}
    return found


def _calls(function: ast.FunctionDef, names: set[str]) -> bool:
    calls = [n.func for n in ast.walk(function) if isinstance(n, ast.Call)]
    return any(isinstance(called, ast.Name) and called.id in names for called in calls)


class _Collected:
    """Remembers the names of the tests that pytest finds."""

    def __init__(self) -> None:
        self.names: list[tuple[str, str]] = []

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self.names.append(wording.split(item.nodeid))


def write(named: Sequence[str]) -> int:
    """Run the tests and write the file; return the exit status of pytest."""
    functions = functions_with_messages()
    files = [f for f in functions if not named or any(f == n or f.startswith(f"{n.rstrip('/')}/") for n in named)]
    collected = _Collected()
    recorded = wording.recorded = {}
    ids = [f"{file}::{name}" for file in files for name in sorted(functions[file])]
    status = int(pytest.main(["-q", "--thorough", "-p", "no:cacheprovider", *ids], plugins=[collected])) if ids else 0
    if status:
        return status
    messages = {file: names for file, names in wording.golden_messages().items() if file in functions}
    for file in files:
        messages[file] = {}
        for function in functions[file]:
            names = [n for f, n in collected.names if f == file and n.partition("[")[0] == function]
            of_function = {n: recorded.get((file, n), wording.expected(file, n)) for n in names}
            messages[file] |= _compact(function, of_function)
    text = json.dumps(messages, indent=1, sort_keys=True, ensure_ascii=False)
    wording.GOLDEN.write_text(text + "\n", encoding="utf-8")
    return 0


def _compact(function: str, messages: dict[str, list[str]]) -> dict[str, list[str]]:
    """Name the messages that most tests of a function have by the function, and only others by the test."""
    counts = collections.Counter(map(tuple, messages.values()))
    (most, count), *_ = counts.most_common(1)
    common = {function: list(most)} if count > 1 else {}
    return common | {name: said for name, said in messages.items() if said != common.get(function, [])}


if __name__ == "__main__":
    sys.exit(write(sys.argv[1:]))
