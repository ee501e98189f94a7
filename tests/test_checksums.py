from __future__ import annotations

import itertools
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import checksums
from ckpttool.checksums import chunk_bytes, combine, cuts, of_bytes, of_pieces
from ckpttool.saving.files import HostPayload, PlainFile


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_combining_is_hashing_both(first: bytes, second: bytes) -> None:
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@given(st.lists(st.binary(max_size=40), max_size=12))
def test_combining_is_associative(parts: list[bytes]) -> None:
    whole = 0
    for part in parts:
        whole = combine(whole, zlib.crc32(part), len(part))
    assert whole == zlib.crc32(b"".join(parts))


def test_combining_far_apart() -> None:
    zeros = bytes(1 << 20)
    crc, length = zlib.crc32(b"head"), 0
    expected = crc
    for _ in range(40):
        expected = zlib.crc32(zeros, expected)
        length += len(zeros)
    assert combine(crc, zlib.crc32(bytes(length)), length) == expected


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 50))
def test_cuts_cover_a_range_in_order(start: int, length: int, size: int) -> None:
    found = list(cuts(start, start + length, size))
    assert [x for a, b in found for x in range(a, b)] == list(range(start, start + length))
    assert all(a // size == (b - 1) // size for a, b in found)


@given(data=st.binary(max_size=500), edges=st.lists(st.integers(0, 500), max_size=6))
def test_pieces_make_the_whole(data: bytes, edges: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "MIN_CHUNK_BYTES", 32)
        size = chunk_bytes(len(data))
        at = sorted({0, len(data), *(min(e, len(data)) for e in edges)})
        pieces = [
            (a, b - a, zlib.crc32(data[a:b]))
            for first, last in itertools.pairwise(at)
            for a, b in cuts(first, last, size)
        ]
        assert of_pieces(len(data), pieces) == of_bytes(data) == _streamed(data)
        assert of_bytes(data).crcs == tuple(zlib.crc32(data[i : i + size]) for i in range(0, len(data), size))


def _streamed(data: bytes) -> checksums.Checksums:
    file = PlainFile("f", HostPayload(data))
    assert b"".join(file.stream()) == data
    return file.checksums


@pytest.mark.parametrize("nbytes", [0, 1, 1 << 20, (1 << 30) - 1, 1 << 30, (1 << 30) + 1, 10**12, 10**15])
def test_chunks_are_few_and_not_small(nbytes: int) -> None:
    size = chunk_bytes(nbytes)
    assert size >= checksums.MIN_CHUNK_BYTES
    assert size & (size - 1) == 0
    assert -(-nbytes // size) <= checksums.MAX_CHUNKS
    assert size == checksums.MIN_CHUNK_BYTES or -(-nbytes // (size // 2)) > checksums.MAX_CHUNKS
