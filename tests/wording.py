"""Compares messages for users, word for word, with those of ``golden/messages.json``.

The file has the messages of each test in the order of the test. ``python -m tests.golden.messages`` writes it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

E = TypeVar("E", bound=BaseException)
Messages = dict[str, dict[str, list[str]]]
"""Those of each test, by file and name. A function's name has the messages of its tests that are not named."""

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden" / "messages.json"
VARYING = {
    re.escape(f"{ROOT}/"): "",
    r"/[^\s'\"]*?/(pytest-\d+/(popen-gw\d+/)?|ckpttool-tests?-)[^\s'\"/:;,]+": "TMP",
    rf"\b{re.escape(socket.gethostname())}\b": "HOST",
    r"\b(localhost|127\.0\.0\.1):\d+": "SERVER",
    r"\bbucket-[0-9a-f]{12}\b": "BUCKET",
    r"(?<=/)[0-9a-f]{32}(?=/)": "RANDOM",
    r"\.[0-9a-f]{16}(?=\.(partial|removed)\b)": ".RANDOM",
    r"(?<=\bsha256:)[0-9a-f]{64}\b": "DIGEST",
    r"\b[0-9a-f]{8}(?=, but | was recorded\b)": "CHECKSUM",
    r"^(accelerate|lightning|transformers) [\w.]+(?=:)": r"\1 VERSION",
}
"""What differs from run to run, and what stands for it in the file."""


class _Test:
    """The test that runs."""

    def __init__(self, file: str = "", name: str = "", tmp_path: object = None) -> None:
        self.file, self.name, self.tmp_path = file, name, tmp_path
        self.messages: list[str] = []


_running = _Test()
recorded: dict[tuple[str, str], list[str]] | None = None
"""Messages of the tests that passed, while the file is written."""


@contextlib.contextmanager
def refused(kind: type[E]) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an error as ``pytest.raises`` does, and with it the next message of the test in the file."""
    with pytest.raises(kind) as caught:
        yield caught
    compare(str(caught.value))


def compare(text: str) -> None:
    """Expect the next message of the test in the file."""
    _running.messages.append(found := _without_varying(text))
    if recorded is None:
        golden, number = expected(_running.file, _running.name), len(_running.messages)
        assert golden[number - 1 : number] == [found], (
            f"{found!r} is not message {number} of {golden}; {_advice(_running)}"
        )


@contextlib.contextmanager
def of_test(node: str, tmp_path: object = None) -> Iterator[None]:
    """Compare the messages of a test while it runs."""
    global _running
    outer, _running = _running, _Test(*split(node), tmp_path)
    test = _running
    try:
        yield
    finally:
        _running = outer
    if recorded is not None:
        recorded[test.file, test.name] = test.messages
        return
    missing = expected(test.file, test.name)[len(test.messages) :]
    assert not missing, f"the test ended without {missing}; {_advice(test)}"


@functools.cache
def golden_messages() -> Messages:
    """Return the content of the file."""
    found: Messages = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return found


def expected(file: str, name: str) -> list[str]:
    """Return the messages of a test."""
    names = golden_messages().get(file, {})
    return names[name] if name in names else names.get(name.partition("[")[0], [])


def split(node: str) -> tuple[str, str]:
    """Return the file of a test, and its name with parameters."""
    file, _, name = node.partition("::")
    return file, name


def _advice(test: _Test) -> str:
    return f"if that is meant, run: python -m tests.golden.messages {test.file}"


def _without_varying(text: str) -> str:
    if _running.tmp_path is not None:
        text = text.replace(str(_running.tmp_path), "TMP")
    text = re.sub(rf"\bprocess {os.getpid()}\b", "process PID", text)
    for pattern, name in VARYING.items():
        text = re.sub(pattern, name, text)
    return text
