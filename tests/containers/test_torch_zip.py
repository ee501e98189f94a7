"""Facts inferred about a torch file, without reading it, equal those read from it."""

from __future__ import annotations

import itertools
import zlib
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.containers import torch_zip
from ckpttool.containers.torch_file import read_torch_file
from ckpttool.errors import CkptError
from tests.hostile import BytesReader, attacks, lying_tensors, zip_file
from tests.truth import HERE

if TYPE_CHECKING:
    from pathlib import Path

    from ckpttool.checksums import Records


def _begins_as_an_archive(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == torch_zip.MAGIC


FILES = sorted(p for p in (HERE / "checkpoints").rglob("*") if p.is_file() and _begins_as_an_archive(p))


@given(st.binary(min_size=4, max_size=4))
def test_four_bytes_are_known_by_their_checksum(data: bytes) -> None:
    assert torch_zip.bytes_with_crc(zlib.crc32(data)) == data


@pytest.mark.parametrize("crc32", [0, 1, 0xFFFFFFFF, 0x2144DF1C])
def test_every_checksum_has_its_four_bytes(crc32: int) -> None:
    assert zlib.crc32(torch_zip.bytes_with_crc(crc32)) == crc32


def _said(data: bytes, *, remote: bool) -> Records | str:
    try:
        return torch_zip.parse(BytesReader(data, remote=remote))
    except CkptError as error:
        return str(error)


def test_bundled_files_are_the_same_from_afar() -> None:
    """All of them: what is inferred is where torch put it, release by release."""
    assert len(FILES) > 300
    inferred = 0
    for path in FILES:
        data = path.read_bytes()
        near, far = BytesReader(data), BytesReader(data, remote=True)
        assert torch_zip.parse(near) == torch_zip.parse(far), path
        inferred += far.bytes_read < near.bytes_read
    assert inferred > 300


def _damaged(data: bytes) -> list[bytes]:
    """The directory's numbers changed one by one, and the file's ends cut."""
    at = data.rfind(b"PK\x05\x06")
    changed = []
    entry = data.find(b"PK\x01\x02")
    while 0 <= entry < at:
        for offset in (8, 10, 16, 20, 24, 28, 30, 42):  # flags, method, CRC, sizes, lengths, header
            for bit in (1, 0x40):
                copy = bytearray(data)
                copy[entry + offset] ^= bit
                changed.append(bytes(copy))
        entry = data.find(b"PK\x01\x02", entry + 4)
    return [*changed, data[: len(data) // 2], data[:-1], data[1:], b"", data[:4]]


def test_damaged_directories_are_refused_alike_or_read_within_the_file() -> None:
    """From afar local headers are not seen: what differs there alone is no harm, but never leads outside."""
    data = zip_file(b"N.", {"0": b"0123" * 20, "1": b"4567" * 100})
    for case in _damaged(data):
        near, far = _said(case, remote=False), _said(case, remote=True)
        if isinstance(far, str):
            assert far == near or not isinstance(near, str)
        else:
            assert all(0 <= r.where.start <= r.where.end <= len(case) for r in far)


def test_the_beginning_of_a_file_is_seen_from_afar() -> None:
    path = next(p for p in FILES if "universal" not in str(p))
    data = path.read_bytes()
    assert "broken local header" in str(_said(b"XX" + data[2:], remote=True))


@pytest.mark.parametrize("path", FILES[:: len(FILES) // 4][:4], ids=lambda p: p.name[:40])
def test_damaged_bundled_files_never_lead_outside(path: Path) -> None:
    data = path.read_bytes()
    spans = [r.where for r in torch_zip.parse(BytesReader(data))]
    for case in _damaged(data)[::7]:
        far = _said(case, remote=True)
        if not isinstance(far, str):
            found = sorted(r.where for r in far)
            assert all(0 <= r.start <= r.end <= len(case) for r in found)
            assert all(a.end <= b.start for a, b in itertools.pairwise(found))
    assert spans


@pytest.mark.parametrize("name", [*attacks("sesame"), *lying_tensors()])
def test_hostile_files_say_the_same_from_afar(name: str) -> None:
    pickled = {**attacks("sesame"), **lying_tensors()}[name]
    data = zip_file(pickled, {"0": bytes(64)})

    def said(*, remote: bool) -> str:
        try:
            return repr(read_torch_file(BytesReader(data, remote=remote)).root)
        except CkptError as error:
            return str(error)

    assert said(remote=True) == said(remote=False)
