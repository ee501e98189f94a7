"""Checksums of the bytes read, combined from pieces of any order and size, of any reader."""

from __future__ import annotations

import random
import zlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.checksums import Record
from ckpttool.errors import ChecksumError
from ckpttool.execution.checks import ALLOWANCE_BYTES, ReadChecks
from ckpttool.execution.run import Work
from ckpttool.plan import COPY, CopyPlan, SourceFile, TargetFile
from ckpttool.ranges import ByteRange
from ckpttool.storage import LOCAL
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = random.Random(1).randbytes(4000)  # noqa: S311
BORDERS = (64, 1000, 1064, 2500, 2500 + 64, 3900)
"""Records lie in every other of these ranges; between them is what an archive pads with."""


def _file(data: bytes, borders: tuple[int, ...] = BORDERS, path: str = "file.pt") -> SourceFile:
    where = [ByteRange(a, b) for a, b in zip(borders[::2], borders[1::2], strict=True)]
    records = tuple(Record(f"data/{n}", w, zlib.crc32(data[w.start : w.end])) for n, w in enumerate(where))
    return SourceFile(path, len(data), "", LOCAL.spec, records)


def _reader(data: bytes, asked: list[int] | None = None) -> Callable[[int, int, memoryview], None]:
    def read_into(file: int, start: int, buffer: memoryview) -> None:
        if asked is not None:
            asked.append(len(buffer))
        buffer[:] = data[start : start + len(buffer)]

    return read_into


PIECES = st.lists(
    st.tuples(st.integers(0, len(DATA)), st.integers(0, 900)).map(lambda p: (p[0], min(p[0] + p[1], len(DATA)))),
    max_size=12,
)


@given(PIECES, st.integers(1, 3))
def test_pieces_of_sound_bytes_are_accepted_in_any_order(pieces: list[tuple[int, int]], threads: int) -> None:
    checks = ReadChecks([_file(DATA)])
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda p: checks.note(0, p[0], DATA[p[0] : p[1]]), pieces))
    report = checks.finish(_reader(DATA))
    touched = {n for n in range(3) if any(a < BORDERS[2 * n + 1] and b > BORDERS[2 * n] and a < b for a, b in pieces)}
    assert report.records == len(touched)  # what is missing is less than the allowance
    assert report.nbytes == sum(BORDERS[2 * n + 1] - BORDERS[2 * n] for n in touched)
    assert not report.unchecked


@given(PIECES, st.integers(0, len(DATA) - 1), st.integers(0, 7))
def test_a_flipped_bit_in_any_piece_is_refused(pieces: list[tuple[int, int]], at: int, bit: int) -> None:
    flipped = bytearray(DATA)
    flipped[at] ^= 1 << bit
    checks = ReadChecks([_file(DATA)])
    for start, end in pieces:
        checks.note(0, start, bytes(flipped[start:end]))
    inside = [n for n in range(3) if BORDERS[2 * n] <= at < BORDERS[2 * n + 1]]
    concerned = [n for n in inside if any(a < BORDERS[2 * n + 1] and b > BORDERS[2 * n] and a < b for a, b in pieces)]
    if concerned:
        with pytest.raises(ChecksumError, match=rf"file\.pt: record data/{concerned[0]}, bytes "):
            checks.finish(_reader(bytes(flipped)))
    else:
        checks.finish(_reader(bytes(flipped)))


@given(PIECES.filter(bool), st.data())
def test_fragments_of_other_processes_count_as_own(pieces: list[tuple[int, int]], data: st.DataObject) -> None:
    """However the pieces are dealt out to tasks, the same records are compared with the same result."""
    flipped = bytearray(DATA)
    flipped[data.draw(st.integers(0, len(DATA) - 1))] ^= 1
    outcomes = set()
    for content in (DATA, bytes(flipped)):
        for tasks in (1, 3):
            workers = [ReadChecks([_file(DATA)]) for _ in range(tasks)]
            for n, (start, end) in enumerate(pieces):
                workers[n % tasks].note(0, start, content[start:end])
            driver = ReadChecks([_file(DATA)])
            for worker in workers:
                driver.add(worker.take_fragments())
            driver.note_files([0])
            try:
                outcomes.add((content == DATA, driver.finish(_reader(content)).records))
            except ChecksumError:
                outcomes.add((content == DATA, -1))
    assert len(outcomes) == 2
    assert (True, -1) not in outcomes


def test_the_same_bytes_read_twice_must_be_the_same() -> None:
    checks = ReadChecks([_file(DATA)])
    checks.note(0, 100, DATA[100:200])
    checks.note(0, 100, bytes(100))
    with refused(ChecksumError):
        checks.finish(_reader(DATA))


WRONG = bytes(50)
OVERLAPPING = {
    "the whole, and a part again": [(64, DATA[64:1000]), (900, WRONG)],
    "two parts, and the second longer": [(64, DATA[64:900]), (900, DATA[900:1000]), (900, bytes(100))],
    "two chains": [(64, DATA[64:500]), (500, DATA[500:1000]), (64, DATA[64:700]), (700, DATA[700:950]), (950, WRONG)],
    "two chains, the first is wrong": [
        (500, DATA[500:950] + WRONG), (64, DATA[64:500]), (700, DATA[700:1000]), (64, DATA[64:700])
    ],
    "an overlap": [(64, DATA[64:650] + WRONG), (600, DATA[600:1000])],
}  # fmt: skip


@pytest.mark.parametrize("pieces", OVERLAPPING.values(), ids=OVERLAPPING.keys())
def test_overlapping_pieces_that_disagree_are_refused(pieces: list[tuple[int, bytes]]) -> None:
    checks = ReadChecks([_file(DATA)])
    for start, data in pieces:
        checks.note(0, start, data)
    with refused(ChecksumError):
        checks.finish(_reader(DATA))
    checks = ReadChecks([_file(DATA)])
    for start, data in pieces:
        checks.note(0, start, DATA[start : start + len(data)])
    assert checks.finish(_reader(DATA)).records == 1


LONG = 40 * ALLOWANCE_BYTES


@pytest.fixture(scope="module")
def long() -> bytes:
    return random.Random(2).randbytes(LONG)  # noqa: S311


def _long_checks(long: bytes, *, full: bool = False) -> ReadChecks:
    return ReadChecks([_file(long, (0, LONG))], full=full)


def test_a_record_of_which_much_is_missing_is_named_as_unchecked(long: bytes) -> None:
    checks, asked = _long_checks(long), [0]
    checks.note(0, 0, long[: LONG // 2])
    report = checks.finish(_reader(long, asked))
    assert [(u.file, u.record, u.nbytes) for u in report.unchecked] == [("file.pt", "data/0", LONG)]
    assert report.records == 0
    assert sum(asked) == 0
    checks.note(0, LONG // 2, long[LONG // 2 :])  # more is read, and it is looked at anew
    report = checks.finish(_reader(long, asked))
    assert (report.records, report.nbytes, report.unchecked) == (1, LONG, ())
    assert sum(asked) == 0


def test_a_record_of_which_little_is_missing_is_completed(long: bytes) -> None:
    checks, asked = _long_checks(long), [0]
    checks.note(0, 0, long[: LONG - 2 * ALLOWANCE_BYTES])  # a sixteenth of it is 2.5 of these
    assert checks.finish(_reader(long, asked)).records == 1
    assert sum(asked) == 2 * ALLOWANCE_BYTES


@pytest.mark.parametrize("required", [False, True])
def test_the_rest_is_read_where_all_is_to_be_checked(long: bytes, required: bool) -> None:
    """With ``full``, and for what an earlier run has read."""
    checks, asked = _long_checks(long, full=not required), [0]
    checks.note(0, 5, long[5:100])
    if required:
        checks.require_all([(0, 0, 10)])
    assert checks.finish(_reader(long, asked), jobs=2).records == 1
    assert sum(asked) == LONG - 95
    damaged = long[:-1] + bytes([long[-1] ^ 1])
    checks = _long_checks(long, full=not required)
    checks.note(0, 5, long[5:100])
    if required:
        checks.require_all([(0, 0, 10)])
    with pytest.raises(ChecksumError):
        checks.finish(_reader(damaged), jobs=2)


def test_a_record_that_was_read_whole_is_checked_though_a_part_was_read_twice(long: bytes) -> None:
    checks, asked = _long_checks(long), [0]
    checks.note(0, 0, long)
    checks.note(0, LONG // 2, long[LONG // 2 : LONG // 2 + 100])
    report = checks.finish(_reader(long, asked))
    assert (report.records, report.unchecked) == (1, ())
    assert sum(asked) == 100


def test_records_read_by_an_earlier_run_are_checked(long: bytes) -> None:
    checks = _long_checks(long)
    checks.require_all([(0, 10, 20)])
    with pytest.raises(ChecksumError):
        checks.finish(_reader(bytes(LONG)))


def test_a_file_without_checksums_is_named() -> None:
    bare = SourceFile("bare.bin", 100, "", LOCAL.spec)
    checks = ReadChecks([_file(DATA), bare])
    checks.note(1, 0, bytes(100))
    checks.note(0, 64, DATA[64:1000])
    report = checks.finish(_reader(DATA))
    assert report.without == ("bare.bin",)
    assert report.records == 1


def test_the_sources_of_a_file_that_an_earlier_run_wrote_are_checked(long: bytes) -> None:
    source = _file(long, (0, len(long)))
    flipped = bytes([long[0] ^ 1]) + long[1:]
    checks = ReadChecks([source])
    copies = np.zeros(1, dtype=COPY)
    copies["numel"] = 1
    plan = CopyPlan((source,), (("U8", "U8"),), (TargetFile("x", 1, (), copies),))
    output = SimpleNamespace(has=lambda _: True)
    done: list[int] = []
    assert list(Work(plan, cast("Any", output), done.append, checks).missing_files()) == []
    assert done == [1]
    with pytest.raises(ChecksumError):
        checks.finish(_reader(flipped))
