"""Shared reads: every value is written once, to its place, and its bytes are read once if possible."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.dtypes import itemsize
from ckpttool.plan import COPY, CopyPlan, SourceFile, TargetFile
from ckpttool.plan.split import find_shared_reads
from ckpttool.storage import LOCAL_SPEC

if TYPE_CHECKING:
    from collections.abc import Iterable

CASTS = (("F32", "F32"), ("F32", "BF16"), ("F64", "F32"), ("U8", "U8"), ("F64", "F64"))
SOURCE_BYTES = 48


@st.composite
def _plans(draw: st.DrawFn) -> CopyPlan:
    """Files with a few rows each, one behind the other, of anything in two sources."""
    files = []
    for number in range(draw(st.integers(1, 4))):
        rows, at = [], draw(st.integers(0, 9))
        header = ((0, b"h" * at),)
        for _ in range(draw(st.integers(0, 5))):
            cast = draw(st.integers(0, len(CASTS) - 1))
            width = itemsize(CASTS[cast][0])
            start = draw(st.integers(0, SOURCE_BYTES))
            numel = draw(st.integers(0, (SOURCE_BYTES - start) // width))
            rows.append((draw(st.integers(0, 1)), start, numel, at, cast))
            at += numel * itemsize(CASTS[cast][1])
        files.append(TargetFile(str(number), at, header, np.array(rows, dtype=COPY)))
    sources = tuple(SourceFile(str(n), SOURCE_BYTES, "", LOCAL_SPEC) for n in range(2))
    return CopyPlan(sources, CASTS, tuple(files))


Element = tuple[int, int, int, int, int]
"""File and byte that it is written to, source and byte that it is read from, cast."""


def _elements(file: int, rows: Iterable[np.void]) -> list[Element]:
    result = []
    for row in rows:
        source, target = (itemsize(dtype) for dtype in CASTS[row["cast"]])
        for n in range(int(row["numel"])):
            to, where = int(row["target"]) + n * target, int(row["start"]) + n * source
            result.append((file, to, int(row["source"]), where, int(row["cast"])))
    return result


@given(_plans())
def test_every_element_is_written_where_it_was_to_be_and_once(plan: CopyPlan) -> None:
    copies = {n: file.copies[file.copies["numel"] > 0] for n, file in enumerate(plan.files)}
    found = find_shared_reads(plan, copies)
    expected = [e for n, rows in copies.items() for e in _elements(n, rows)]
    actual = [e for n, rows in found.separate.items() for e in _elements(n, rows)]
    for n, shared_reads in found.shared.items():
        copies = {int(row["target"]): row for row in found.separate[n]}
        for read in shared_reads:
            by, width = copies[int(read["copy_target"])], itemsize(CASTS[read["cast"]][0])
            assert CASTS[by["cast"]][0] == CASTS[by["cast"]][1]
            assert read["skip"] + read["numel"] * width <= by["numel"] * itemsize(CASTS[by["cast"]][0])
            # The copy is made in pieces that end at multiples of some power of two in its file.
            assert (read["copy_target"] + read["skip"]) % width == 0
            row = (by["source"], by["start"] + read["skip"], read["numel"], read["target"], read["cast"])
            actual += _elements(int(read["file"]), np.array([row], dtype=COPY))
    assert sorted(actual) == sorted(expected)
    assert found.files == {int(n) for rows in found.shared.values() for n in rows["file"]}


def _plan(*files: list[tuple[int, int, int, int, int]]) -> CopyPlan:
    sources = tuple(SourceFile(str(n), 4000, "", LOCAL_SPEC) for n in range(2))
    targets = []
    for number, rows in enumerate(files):
        copies = np.array(rows, dtype=COPY)
        nbytes = sum(int(r["numel"]) * itemsize(CASTS[r["cast"]][1]) for r in copies)
        targets.append(TargetFile(str(number), nbytes, (), copies))
    return CopyPlan(sources, CASTS, tuple(targets))


def _shared_reads(plan: CopyPlan) -> list[tuple[int, ...]]:
    carried = find_shared_reads(plan, {n: file.copies for n, file in enumerate(plan.files)}).shared
    return [(n, *row.tolist()) for n, rows in carried.items() for row in rows]


def test_a_cast_over_two_copies_shares_both_reads() -> None:
    plan = _plan([(0, 0, 30, 0, 1)], [(0, 0, 10, 0, 0)], [(0, 40, 100, 0, 0)])
    assert _shared_reads(plan) == [(1, 0, 0, 10, 0, 0, 1), (2, 0, 0, 20, 0, 20, 1)]


def test_many_casts_share_the_read_of_one_copy() -> None:
    plan = _plan([(1, 0, 100, 0, 0)], [(1, 80, 10, 0, 1), (1, 20, 10, 20, 1)])
    assert _shared_reads(plan) == [(0, 0, 20, 10, 1, 20, 1), (0, 0, 80, 10, 1, 0, 1)]


def test_a_cast_shares_the_read_of_one_of_two_copies() -> None:
    plan = _plan([(0, 0, 50, 0, 0)], [(0, 0, 50, 0, 0)], [(0, 0, 50, 0, 1)])
    assert len(_shared_reads(plan)) == 1


def test_a_cast_that_no_copy_covers_reads_for_itself() -> None:
    for copied in (49, 0):
        plan = _plan([(0, 0, copied, 0, 0)], [(0, 0, 50, 0, 1)])
        assert _shared_reads(plan) == []
    assert _shared_reads(_plan([(1, 0, 50, 0, 0)], [(0, 0, 50, 0, 1)])) == []  # another source


def test_no_element_is_cut_by_where_a_copy_begins() -> None:
    assert _shared_reads(_plan([(0, 2, 100, 0, 0)], [(0, 4, 10, 0, 1)])) == []
