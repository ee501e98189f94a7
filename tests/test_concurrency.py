"""Lazy values in threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckpttool.concurrency import Lazy


def test_a_value_requested_by_many_threads_is_computed_once() -> None:
    gate, made = threading.Barrier(8), []

    def make() -> object:
        made.append(object())
        return made[-1]

    lazy = Lazy(make)
    assert lazy.value is None

    def ask(_: int) -> object:
        gate.wait(60)
        return lazy()

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert found == made * 8
    assert lazy.value is made[0]


def test_a_failed_value_is_not_computed_again() -> None:
    tried = []

    def fail() -> None:
        tried.append(1)
        raise OSError("no")

    lazy = Lazy(fail)
    for _ in range(3):
        with pytest.raises(OSError, match="no"):
            lazy()
    assert tried == [1]
    assert lazy.value is None
