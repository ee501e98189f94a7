"""The faster way to write is taken, whichever it is and becomes."""

from __future__ import annotations

import pytest

from ckpttool.pace import Pace

MB = 1 << 20


def _taken(pace: Pace, past: float, through: float, times: int) -> float:
    """Write so often, at so many seconds for each MB on either way; the share that went past the cache."""
    taken = 0
    for _ in range(times):
        past_cache = pace.past_cache()
        taken += past_cache
        pace.note(past_cache, MB, past if past_cache else through)
    return taken / times


@pytest.mark.parametrize("times", [1, 2])
def test_both_ways_are_tried(times: int) -> None:
    assert _taken(Pace(), 1, 1, times) == 1 / times


@pytest.mark.parametrize(
    ("past", "through", "least", "most"), [(1, 2, 0.9, 1), (1, 50, 0.99, 1), (2, 1, 0, 0.1), (50, 1, 0, 0.01)]
)
def test_the_faster_way_is_taken(past: float, through: float, least: float, most: float) -> None:
    assert least <= _taken(Pace(), past, through, 500) <= most


def test_what_becomes_slow_is_left() -> None:
    pace = Pace()
    assert _taken(pace, 5, 1, 100) < 0.05
    assert _taken(pace, 5, 20, 100) > 0.9  # too much waits in the cache
    assert _taken(pace, 100, 2, 100) < 0.1  # a disk whose credit is used up


def test_a_moment_is_forgotten() -> None:
    pace = Pace()
    assert _taken(pace, 1, 2, 100) >= 0.99
    pace.note(True, MB, 100.0)
    assert _taken(pace, 1, 2, 10) == 0
    assert _taken(pace, 1, 2, 2000) > 0.5


def test_a_way_that_stays_slow_costs_little() -> None:
    assert _taken(Pace(), 20, 1, 10_000) < 0.005
