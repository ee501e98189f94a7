from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.checksums import of_bytes
from ckpttool.commit.checksummed import ChecksummedStorage
from ckpttool.commit.manifest import Manifest
from ckpttool.errors import ContainerError
from ckpttool.ranges import ByteRange
from ckpttool.storage import LOCAL
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ckpttool.checksums import Checksums
    from ckpttool.storage import Reader

CHUNK = 16
DATA = bytes(range(7 * CHUNK + 5))
SUMS = of_bytes(DATA, CHUNK)


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "file").write_bytes(DATA)
    return str(tmp_path / "file")


def _storage(path: str, sums: Checksums = SUMS) -> ChecksummedStorage:
    directory, name = os.path.split(path)
    return ChecksummedStorage(LOCAL, directory, Manifest("t", 1, 0.0, "", 1, 2, files={name: sums}))


def _into(reader: Reader, start: int, end: int) -> bytes:
    buffer = bytearray(end - start)
    reader.read_into(start, memoryview(buffer))
    return bytes(buffer)


WAYS: dict[str, Callable[[ChecksummedStorage, Reader, int, int], bytes]] = {
    "read": lambda storage, reader, a, b: bytes(reader.read(a, b)),
    "read_many": lambda storage, reader, a, b: bytes(reader.read_many([ByteRange(a, b)])[0]),
    "read_into": lambda storage, reader, a, b: _into(reader, a, b),
    "read_all": lambda storage, reader, a, b: bytes(storage.read_all([(reader, a, b)])[0]),
}


def _ranges() -> Iterator[tuple[int, int]]:
    edges = sorted({x + d for x in range(0, len(DATA) + 1, CHUNK) for d in (-1, 0, 1)} | {len(DATA), len(DATA) - 1})
    for a in edges:
        for b in edges:
            if 0 <= a <= b <= len(DATA):
                yield a, b


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_ranges_at_the_edges_of_chunks(path: str, way: Callable[..., bytes]) -> None:
    for a, b in _ranges():
        storage = _storage(path)
        with storage.open(path) as reader:
            assert way(storage, reader, a, b) == DATA[a:b]
            assert way(storage, reader, a, b) == DATA[a:b]  # when it was found sound
            assert way(storage, reader, 0, len(DATA)) == DATA


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_flipped_byte_anywhere_is_found_before_it_is_used(path: str, way: Callable[..., bytes]) -> None:
    for at in range(len(DATA)):
        with open(path, "r+b") as file:
            os.pwrite(file.fileno(), bytes([DATA[at] ^ 4]), at)
        chunk = at // CHUNK
        for a, b in [(at, at + 1), (0, len(DATA)), (chunk * CHUNK, min(len(DATA), chunk * CHUNK + 1))]:
            storage = _storage(path)
            with storage.open(path) as reader, pytest.raises(ContainerError, match="is damaged") as caught:
                way(storage, reader, a, b)
            first, last = chunk * CHUNK, min(len(DATA), chunk * CHUNK + CHUNK)
            assert f"bytes {first:,} to {last:,}" in str(caught.value)
        # What lies in other chunks can be read.
        if chunk:
            assert way(storage, storage.open(path), 0, chunk * CHUNK) == DATA[: chunk * CHUNK]
        with open(path, "r+b") as file:
            os.pwrite(file.fileno(), DATA[at : at + 1], at)


@given(st.lists(st.tuples(st.sampled_from(sorted(WAYS)), st.integers(0, len(DATA)), st.integers(0, 60)), max_size=12))
def test_any_reads_one_after_the_other(
    tmp_path_factory: pytest.TempPathFactory, reads: list[tuple[str, int, int]]
) -> None:
    path = str(tmp_path_factory.getbasetemp() / "any")
    with open(path, "wb") as file:
        file.write(DATA)
    storage = _storage(path)
    with storage.open(path) as reader:
        for way, start, length in reads:
            end = min(len(DATA), start + length)
            assert WAYS[way](storage, reader, start, end) == DATA[start:end]


def test_another_size_is_found_when_it_is_opened(path: str) -> None:
    storage = _storage(path)
    os.truncate(path, len(DATA) - 1)
    with refused(ContainerError):
        storage.open(path)


def test_other_files_are_read_as_they_are(path: str, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"other")
    storage = _storage(path)
    with storage.open(str(tmp_path / "other")) as other, storage.open(path) as reader:
        assert storage.read_all([(other, 1, 3), (reader, 20, 30), (other, 0, 5)]) == [b"th", DATA[20:30], b"other"]
    assert storage.read_text(str(tmp_path / "other")) == "other"
    assert [e.name for e in storage.listing(str(tmp_path))] == ["file", "other"]


def test_empty_file(tmp_path: Path) -> None:
    path = str(tmp_path / "empty")
    open(path, "wb").close()
    with _storage(path, of_bytes(b"")).open(path) as reader:
        assert reader.read(0, 0) == b""
        reader.read_into(0, memoryview(bytearray()))
