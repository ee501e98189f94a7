"""The policy chooses the faster way to write, also after a change, and both where they help each other."""

from __future__ import annotations

import pytest

from ckpttool.storage.write_policy import Pace

MB = 1 << 20


def _taken(pace: Pace, past: float, through: float, times: int) -> float:
    """Write one file so often, at so many seconds for each MB on either way; the share that went past the cache."""
    taken = 0
    for _ in range(times):
        past_cache = pace.begin("a", MB, by_one=True)
        taken += past_cache
        pace.end("a", past_cache, MB, past if past_cache else through)
    return taken / times


@pytest.mark.parametrize("times", [1, 2])
def test_both_ways_are_tried(times: int) -> None:
    assert _taken(Pace(), 1, 1, times) == 1 / times


@pytest.mark.parametrize(
    ("past", "through", "least", "most"), [(1, 2, 0.9, 1), (1, 50, 0.99, 1), (2, 1, 0, 0.1), (50, 1, 0, 0.01)]
)
def test_the_faster_way_is_taken(past: float, through: float, least: float, most: float) -> None:
    assert least <= _taken(Pace(), past, through, 500) <= most


def test_a_method_that_becomes_slow_is_left() -> None:
    pace = Pace()
    assert _taken(pace, 5, 1, 200) < 0.05
    assert _taken(pace, 5, 20, 200) > 0.9  # too much waits in the cache
    assert _taken(pace, 100, 2, 200) < 0.1  # a disk whose credit is used up


def test_a_method_that_becomes_fast_is_found() -> None:
    pace = Pace()
    assert _taken(pace, 4, 1, 200) < 0.05
    assert _taken(pace, 0.5, 1, 400) > 0.5


@pytest.mark.parametrize(("slow", "least", "most"), [(1, 0.94, 1), (2, 0, 0)])
def test_one_slow_write_changes_nothing_and_two_are_forgotten(slow: int, least: float, most: float) -> None:
    pace = Pace()
    assert _taken(pace, 1, 2, 100) >= 0.94
    for _ in range(slow):
        pace.begin("a", MB, by_one=True)
        pace.end("a", True, MB, 50.0)
    assert least <= _taken(pace, 1, 2, 100) <= most
    assert _taken(pace, 1, 2, 2000) > 0.5


@pytest.mark.parametrize("ratio", [1.5, 3, 20, 200])
def test_trying_the_slower_way_costs_little(ratio: float) -> None:
    """Whatever the ratio, a twentieth of the time at most."""
    times = 20_000
    tried = times * _taken(Pace(), ratio, 1, times)
    assert tried > 1
    assert tried * (ratio - 1) <= 0.05 * times


def test_of_writes_to_several_files_half_go_past_the_cache() -> None:
    pace = Pace()
    taken = [pace.begin(file, MB, by_one=True) for file in "abcdef"]
    assert sum(taken) == 3
    # Who is done makes room for one of his kind, however long it took.
    for number in range(100):
        at = number % 6
        pace.end("abcdef"[at], taken[at], MB, 50.0 if taken[at] else 1.0)
        taken[at] = pace.begin("abcdef"[at], MB, by_one=True)
        assert sum(taken) == 3


def test_the_last_file_is_written_the_faster_way() -> None:
    pace = Pace()
    for _ in range(10):
        ways = [(file, pace.begin(file, MB, by_one=True)) for file in "ab"]
        for file, past_cache in ways:
            pace.end(file, past_cache, MB, 50.0 if past_cache else 1.0)
    assert _taken(pace, 50, 1, 100) == 0


def test_a_file_of_many_goes_the_faster_way() -> None:
    pace = Pace()
    _taken(pace, 5, 1, 10)
    pace.begin("b", MB, by_one=True)
    assert not any(pace.begin("a", MB, by_one=False) for _ in range(4))


def test_files_without_information_are_not_counted() -> None:
    pace = Pace()
    _taken(pace, 1, 5, 10)
    pace.begin("a", MB, by_one=True)
    pace.end("a", True, 0, 1000.0)
    assert _taken(pace, 1, 5, 10) == 1
