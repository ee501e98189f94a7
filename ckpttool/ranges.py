"""Byte ranges: the type, coalescing, and the check that spans cover a range exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


class ByteRange(NamedTuple):
    """A half-open range of bytes in one file: [start, end)."""

    start: int
    """Offset of the first byte in the file."""
    end: int
    """Offset after the last byte."""

    @property
    def nbytes(self) -> int:
        """Length of the range in bytes."""
        return self.end - self.start


def coalesced(ranges: Sequence[ByteRange], *, gap: int, limit: int = 1 << 62) -> list[ByteRange]:
    """Merge ranges into fewer, longer ones, in ascending order.

    Args:
        ranges: Ranges in any order; they may overlap.
        gap: Most bytes between two ranges that are merged; reading them is cheaper than another request.
        limit: Most bytes of a merged range.
    """
    result: list[ByteRange] = []
    for where in sorted(ranges):
        if result and where.start - result[-1].end <= gap and where.end - result[-1].start <= limit:
            result[-1] = ByteRange(result[-1].start, max(result[-1].end, where.end))
        elif not result or where.end > result[-1].end:
            result.append(where)
    return result


def ends(nbytes: int, each: int) -> list[ByteRange]:
    """Return the first and the last ``each`` bytes of a file; one range if they meet."""
    if nbytes <= 2 * each:
        return [ByteRange(0, nbytes)]
    return [ByteRange(0, each), ByteRange(nbytes - each, nbytes)]


class CoverProblem(NamedTuple):
    """The first place where spans do not cover [0, total) exactly once."""

    kind: str
    """"gap", "overlap" or "outside"."""
    start: int
    """First position of the gap, the overlap or the span outside."""
    end: int
    """Position after the last."""


def exact_cover_problem(
    starts: NDArray[np.unsignedinteger] | Sequence[int],
    lengths: NDArray[np.unsignedinteger] | Sequence[int],
    total: int,
) -> CoverProblem | None:
    """Find the first place where spans do not cover [0, total) exactly once; None if they do.

    Ignores spans of length zero; accepts spans in any order.
    """
    import numpy as np  # most users of byte ranges need none

    begin = np.asarray(starts, dtype=np.uint64)
    size = np.asarray(lengths, dtype=np.uint64)
    keep = size > 0
    begin, size = begin[keep], size[keep]
    if begin.size and not bool(np.all(begin[1:] >= begin[:-1])):
        order = np.argsort(begin, kind="stable")
        begin, size = begin[order], size[order]
    end = begin + size
    if bool(np.any(end < begin)) or (end.size and int(end.max()) > total):
        bad = int(np.argmax((end < begin) | (end > total)))
        return CoverProblem("outside", int(begin[bad]), int(end[bad]))
    expected = np.concatenate([np.zeros(1, np.uint64), end])
    actual = np.concatenate([begin, np.array([total], np.uint64)])
    wrong = np.flatnonzero(expected != actual)
    if wrong.size == 0:
        return None
    first = int(wrong[0])
    low, high = int(expected[first]), int(actual[first])
    return CoverProblem("gap", low, high) if low < high else CoverProblem("overlap", high, low)
