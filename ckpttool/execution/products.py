"""Matrix products in fp32 with the same bits on every processor.

Each element is a sum in ascending order, from zero, by fused multiply-adds. That is what torch computes on CPUs (Intel
MKL 2024.2, ``sgemm`` of up to 192 terms). The order of numpy's BLAS depends on the processor and on the shape, so each
way of calling it is tried on random numbers of that shape first.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


TRIED = 24
"""Rows of each group that is tried; the kernels of OpenBLAS repeat after at most as many."""


def product(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """Multiply two matrices in fp32.

    Args:
        a: Shape (rows, terms).
        b: Shape (terms, columns).

    Returns:
        Shape (rows, columns).
    """
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return _way(len(a), len(b), b.shape[1])(a, b)


def ordered_product(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """Multiply as ``product`` does, without BLAS: the definition, some ten times slower."""
    total = np.zeros((len(a), b.shape[1]), dtype=np.float32)
    left, right = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(all="ignore"):
        for term in range(len(b)):
            exact = left[:, term, None] * right[term]  # 48 bits at most: a double holds them
            total = _rounded_sum(exact, total.astype(np.float64))
    return total


def _rounded_sum(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float32]:
    """Add doubles, and round the exact sum once to fp32.

    The sum is rounded to odd first (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008): a plain
    double would be rounded twice.
    """
    total = x + y
    share = total - x
    error = (x - (total - share)) + (y - share)  # Knuth's TwoSum
    bits = total.view(np.int64)
    wrong = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    bits[wrong] += np.where((error > 0) == (total > 0), 1, -1)[wrong]
    return total.astype(np.float32)


def _whole(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    return a @ b


def _in_pairs(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """Multiply two rows at a time: OpenBLAS's kernel for AVX2 adds the terms of wider blocks in two sums."""
    rows, terms = a.shape
    even = np.zeros((rows + rows % 2, terms), dtype=np.float32)
    even[:rows] = a
    return (even.reshape(-1, 2, terms) @ b).reshape(len(even), b.shape[1])[:rows]


@lru_cache(maxsize=1024)
def _way(rows: int, terms: int, columns: int) -> Callable[..., NDArray[np.float32]]:
    """Return the fastest way to multiply matrices of a shape in order."""
    random = np.random.default_rng(rows)
    a = random.standard_normal((rows, terms), dtype=np.float32)
    b = random.standard_normal((terms, columns), dtype=np.float32)
    tried = np.unique(np.concatenate([start + np.arange(min(TRIED, rows)) for start in _starts(rows)]))
    expected = ordered_product(a[tried], b)
    return next((way for way in (_whole, _in_pairs) if np.array_equal(way(a, b)[tried], expected)), ordered_product)


def _starts(rows: int) -> tuple[int, int, int]:
    """First rows of three groups: at the start, in the middle (two threads may meet there) and at the end."""
    last = max(0, rows - TRIED)
    return 0, last // 2, last
