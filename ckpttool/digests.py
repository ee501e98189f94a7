"""The digest of a tensor: 128 bits that add up, so that the digest of a tensor is the sum of its parts' digests.

The elements in C order are a sequence of 32-bit words w(j). The digest is two sums modulo 2^64, one for each lane l:

    D_l = sum over j of a_l(j >> 12) * b_l(j & 4095) * w(j)

Both factors are odd and pseudo-random. A sum has no order and knows each word's index in the whole tensor, so that the
parts of any partition over ranks have the digest of the whole. ``docs/digest.md`` defines it to the last bit, argues
its strength and has test vectors.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

LANES = 2
"""Sums of 64 bits in a digest."""
BLOCK_WORDS = 4096
"""Words with one factor a."""
CHUNK_BLOCKS = 32
"""Blocks that are widened at once: 1 MB, which the cache of one core holds."""
RUN_BLOCKS = 1024
"""Blocks whose factors are computed at once."""
SHORT_RUN = 1024
"""Words of a run below which an index for each word is faster than a call for each run."""
MASK = (1 << 64) - 1
WIDENED = frozenset({"F16", "BF16"})
"""Types whose values are widened to fp32 first, which is exact: equal values have one digest in any of the three."""


def kind_of(dtype: str) -> str:
    """Return the type that the digest of a tensor of ``dtype`` is of (safetensors' spelling)."""
    return "F32" if dtype in WIDENED else dtype


def mix(lane: int, indexes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the pseudo-random odd factors of some indexes: splitmix64, with the lane in the top bits of its state.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    with np.errstate(over="ignore"):
        z = indexes + np.uint64(((lane << 60) + 0x9E3779B97F4A7C15) & MASK)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        odd: NDArray[np.uint64] = (z ^ (z >> np.uint64(31))) | np.uint64(1)
        return odd


@cache
def factors_in_block() -> NDArray[np.uint64]:
    """Return the factors b of every lane: shape (LANES, BLOCK_WORDS)."""
    return np.stack([mix(lane, np.arange(BLOCK_WORDS, dtype=np.uint64)) for lane in range(LANES)])


def factors_of_blocks(first: int, count: int) -> NDArray[np.uint64]:
    """Return the factors a of ``count`` blocks from ``first`` on: shape (LANES, count)."""
    blocks = np.arange(first, first + count, dtype=np.uint64)
    return np.stack([mix(LANES + lane, blocks) for lane in range(LANES)])


def digest(values: NDArray[Any], first: int = 0) -> int:
    """Return the digest of a run of elements.

    Args:
        values: The elements: one dimension, contiguous.
        first: Index of the first one in the whole tensor, in C order.
    """
    if values.dtype == np.float16 and len(values) > RUN_BLOCKS * BLOCK_WORDS:  # which are copied to widen them
        starts = range(0, len(values), RUN_BLOCKS * BLOCK_WORDS)
        return add(*(digest(values[start : start + starts.step], first + start) for start in starts))
    words, shift, per_element = _words(values)
    begin, total = first * per_element, np.zeros(LANES, dtype=np.uint64)
    done = min(len(words), -begin % BLOCK_WORDS)
    if done:
        total += _part(words[:done], begin)
    buffer = np.empty((CHUNK_BLOCKS, BLOCK_WORDS), dtype=np.uint64) if len(words) - done >= BLOCK_WORDS else None
    while buffer is not None and len(words) - done >= BLOCK_WORDS:
        count = min(RUN_BLOCKS, (len(words) - done) // BLOCK_WORDS)
        rows = words[done : done + count * BLOCK_WORDS].reshape(count, BLOCK_WORDS)
        sums = np.empty((LANES, count), dtype=np.uint64)
        for start in range(0, count, CHUNK_BLOCKS):
            chunk = buffer[: min(CHUNK_BLOCKS, count - start)]
            np.copyto(chunk, rows[start : start + CHUNK_BLOCKS])
            np.einsum("ij,kj->ki", chunk, factors_in_block(), out=sums[:, start : start + len(chunk)])
        total += (sums * factors_of_blocks((begin + done) // BLOCK_WORDS, count)).sum(axis=1, dtype=np.uint64)
        done += count * BLOCK_WORDS
    if done < len(words):
        total += _part(words[done:], begin + done)
    return joined(total << np.uint64(shift))


def digest_box(values: NDArray[Any], starts: Sequence[int], shape: Sequence[int]) -> int:
    """Return the digest of a box of a tensor, such as the columns of a tensor-parallel rank.

    Args:
        values: The elements of the box, with as many dimensions as the tensor.
        starts: Index of its first element in each dimension.
        shape: Shape of the whole tensor.
    """
    values = np.ascontiguousarray(values)
    if not values.size:
        return 0
    inner = len(shape)  # dimensions from here on are whole, so that the elements of a row are one run
    while inner and values.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
    run = math.prod(values.shape[max(0, inner - 1) :])
    outer = [np.arange(start, start + n, dtype=np.int64) for start, n in zip(starts, values.shape, strict=True)]
    firsts = np.zeros((), dtype=np.int64)
    for dim in range(max(0, inner - 1)):
        firsts = firsts[..., None] + outer[dim] * math.prod(shape[dim + 1 :])
    if inner:
        firsts = firsts + starts[inner - 1] * math.prod(shape[inner:])
    rows = values.reshape(-1, run)
    if run >= SHORT_RUN or len(rows) == 1:
        return add(*(digest(row, int(first)) for row, first in zip(rows, firsts.reshape(-1), strict=True)))
    words, shift, per_element = _words(values.reshape(-1))
    places = firsts.reshape(-1, 1) * per_element + np.arange(run * per_element)
    total = np.zeros(LANES, dtype=np.uint64)
    for begin in range(0, len(words), CHUNK_BLOCKS * BLOCK_WORDS):
        part = slice(begin, begin + CHUNK_BLOCKS * BLOCK_WORDS)
        total += _scattered(words[part], places.reshape(-1)[part].astype(np.uint64))
    return joined(total << np.uint64(shift))


def add(*digests: int) -> int:
    """Return the digest of a tensor from the digests of its parts."""
    high, low = (sum(digest >> 64 * lane & MASK for digest in digests) & MASK for lane in (1, 0))
    return high << 64 | low


def joined(lanes: NDArray[np.uint64]) -> int:
    """Return the lanes as one number of 128 bits; the first lane is the low half."""
    return int(lanes[1]) << 64 | int(lanes[0])


def _words(values: NDArray[Any]) -> tuple[NDArray[Any], int, int]:
    """Return the words of elements in an unsigned type, the bits to shift each to the left, and words per element."""
    if values.dtype == np.float16:
        return values.astype(np.float32).view(np.uint32), 0, 1
    width = values.dtype.itemsize
    if width > 4:
        return values.view(np.uint32), 0, width // 4
    return values.view(f"u{width}"), 16 if values.dtype.name == "bfloat16" else 0, 1


def _part(words: NDArray[Any], begin: int) -> NDArray[np.uint64]:
    """Return the lanes of words of one block; ``begin`` is the index of the first one in the tensor."""
    block, start = divmod(begin, BLOCK_WORDS)
    sums: NDArray[np.uint64] = factors_in_block()[:, start : start + len(words)].dot(words.astype(np.uint64))
    return sums * _factors_of_block(block)


@lru_cache(1 << 12)
def _factors_of_block(block: int) -> NDArray[np.uint64]:
    return factors_of_blocks(block, 1)[:, 0]


def _scattered(words: NDArray[Any], places: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the lanes of words at any indexes of the tensor."""
    widened = words.astype(np.uint64)
    within, blocks = (places & np.uint64(BLOCK_WORDS - 1)).astype(np.intp), places >> np.uint64(12)
    sums = [(widened * row[within] * mix(LANES + lane, blocks)).sum() for lane, row in enumerate(factors_in_block())]
    return np.array(sums, dtype=np.uint64)
