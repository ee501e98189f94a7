"""Work in threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckpttool.concurrency import Once


def test_what_many_ask_for_at_once_is_made_once() -> None:
    gate, made = threading.Barrier(8), []

    def make() -> object:
        made.append(object())
        return made[-1]

    once = Once(make)
    assert once.made is None

    def ask(_: int) -> object:
        gate.wait(60)
        return once()

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert found == made * 8
    assert once.made is made[0]


def test_what_cannot_be_made_is_not_tried_again() -> None:
    tried = []

    def fail() -> None:
        tried.append(1)
        raise OSError("no")

    once = Once(fail)
    for _ in range(3):
        with pytest.raises(OSError, match="no"):
            once()
    assert tried == [1]
    assert once.made is None
