"""Laws of byte ranges and plans."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from ckpttool.dtypes import itemsize
from ckpttool.plan import COPY, merge_copies
from ckpttool.ranges import ByteRange, coalesced, exact_cover_problem


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=8), st.integers(0, 30))
def test_exact_cover_agrees_with_counting(spans: list[tuple[int, int]], total: int) -> None:
    counts = [0] * 64
    for start, length in spans:
        for i in range(start, start + length):
            counts[i] += 1
    exact = all(c == 1 for c in counts[:total]) and not any(counts[total:])
    problem = exact_cover_problem([s for s, _ in spans], [n for _, n in spans], total)
    assert (problem is None) == exact
    if problem is not None and problem.kind != "outside":
        wrong = {"gap": 0, "overlap": 2}[problem.kind]
        assert counts[problem.start] == 0 if wrong == 0 else counts[problem.start] >= wrong


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 3), st.integers(0, 1)), max_size=12),
)
def test_merging_copies_moves_the_same_bytes(pieces: list[tuple[int, int, int, int]]) -> None:
    casts = [("F32", "F32"), ("F32", "BF16")]
    rows = np.zeros(len(pieces), dtype=COPY)
    at = 0
    previous_end = 0
    for i, (source, skip, numel, kind) in enumerate(pieces):
        start = previous_end + 4 * skip  # skip 0 goes on where the one before ended
        rows[i] = (source, start, numel, at, kind)
        previous_end = start + 4 * numel
        at += numel * itemsize(casts[kind][1])
    merged = merge_copies(rows, casts)
    assert len(merged) <= max(len(rows), 1)
    assert _elements(merged, casts) == _elements(rows, casts)


def _elements(
    rows: np.ndarray[tuple[int], np.dtype[np.void]], casts: list[tuple[str, str]]
) -> dict[int, tuple[int, int, int]]:
    moved = {}
    for row in rows:
        source_type, target_type = casts[int(row["cast"])]
        for i in range(int(row["numel"])):
            target = int(row["target"]) + i * itemsize(target_type)
            moved[target] = (int(row["source"]), int(row["start"]) + i * itemsize(source_type), int(row["cast"]))
    return moved


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=10), st.integers(0, 12), st.integers(1, 120)
)
@example([(0, 0), (1, 0), (2, 0)], 1, 2)
def test_coalesced_ranges_hold_all_and_no_more_than_the_gaps(
    spans: list[tuple[int, int]], gap: int, limit: int
) -> None:
    ranges = [ByteRange(start, start + nbytes) for start, nbytes in spans]
    found = coalesced(ranges, gap=gap, limit=limit)
    assert found == sorted(found)
    for where in ranges:
        # Whoever looks for the last range that begins at or before this one finds it there.
        holder = [r for r in found if r.start <= where.start][-1]
        assert holder.end >= where.end
    longest = max((r.nbytes for r in ranges), default=0)
    assert all(r.nbytes <= max(limit, longest) for r in found)
    for merged in found:
        reach = merged.start
        for where in sorted(r for r in ranges if merged.start <= r.start and r.end <= merged.end):
            assert where.start - reach <= gap
            reach = max(reach, where.end)
        assert reach == merged.end
    if limit >= 100:
        assert all(b.start - a.end > gap for a, b in itertools.pairwise(found))
