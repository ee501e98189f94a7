"""Lazy values and ordered results in threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from ckpttool.concurrency import Lazy, in_order


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


@pytest.mark.parametrize("jobs", [2, 5])
def test_results_in_order_wait_for_those_before_them(jobs: int) -> None:
    second_is_done = threading.Event()

    def task(number: int) -> int:
        if number == 0:
            assert second_is_done.wait(60)
        if number == 1:
            second_is_done.set()
        return number

    assert list(in_order((partial(task, n) for n in range(10)), jobs)) == list(range(10))
