"""Byte ranges, with examples; their laws are in tests/property."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ckpttool.ranges import ByteRange, CoverProblem, ends, exact_cover_problem


@dataclass(frozen=True)
class CoverCase:
    id: str
    spans: list[tuple[int, int]]
    total: int
    problem: CoverProblem | None


CASES = [
    CoverCase("nothing fills nothing", [], 0, None),
    CoverCase("one fills all", [(0, 5)], 5, None),
    CoverCase("order does not matter", [(3, 2), (0, 3)], 5, None),
    CoverCase("empty spans are ignored", [(0, 5), (2, 0), (9, 0)], 5, None),
    CoverCase("nothing given", [], 5, CoverProblem("gap", 0, 5)),
    CoverCase("gap at the start", [(1, 4)], 5, CoverProblem("gap", 0, 1)),
    CoverCase("gap inside", [(0, 2), (3, 2)], 5, CoverProblem("gap", 2, 3)),
    CoverCase("gap at the end", [(0, 4)], 5, CoverProblem("gap", 4, 5)),
    CoverCase("overlap", [(0, 3), (2, 3)], 5, CoverProblem("overlap", 2, 3)),
    CoverCase("twice the same", [(0, 5), (0, 5)], 5, CoverProblem("overlap", 0, 5)),
    CoverCase("too long", [(0, 6)], 5, CoverProblem("outside", 0, 6)),
    CoverCase("wraps around", [((1 << 64) - 1, 2)], 5, CoverProblem("outside", (1 << 64) - 1, 1)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_exact_cover(case: CoverCase) -> None:
    starts, lengths = [s for s, _ in case.spans], [n for _, n in case.spans]
    assert exact_cover_problem(starts, lengths, case.total) == case.problem


def test_the_ends_of_a_file_are_one_range_if_they_meet() -> None:
    assert ends(9, 4) == [ByteRange(0, 4), ByteRange(5, 9)]
    assert [ends(nbytes, 4) for nbytes in (8, 7, 4, 0)] == [[ByteRange(0, nbytes)] for nbytes in (8, 7, 4, 0)]
