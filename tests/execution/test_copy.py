"""The executor copies parts of source files: every method gives the bytes of the plan, for any boundaries."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import uuid
import zlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.checksums import Record
from ckpttool.concurrency import in_threads
from ckpttool.dtypes import itemsize, numpy_dtype
from ckpttool.errors import ChecksumError, StorageError
from ckpttool.execution.checks import ReadChecks
from ckpttool.execution.copies import failed_checks
from ckpttool.execution.copy import PartAssembler, Sizes
from ckpttool.execution.run import nbytes_read
from ckpttool.execution.sources import Sources
from ckpttool.plan import CHECK, COPY, ConsistencyChecks, CopyPlan, SourceFile, TargetFile
from ckpttool.plan.casts import CAST_ELEMENTS, cast, count_overflowed
from ckpttool.ranges import ByteRange
from ckpttool.storage import LOCAL, open_storage
from ckpttool.storage.journal import JOURNAL, Journal
from ckpttool.storage.local_writer import BUFFER_BYTES
from ckpttool.storage.safe_files import Directory
from ckpttool.units import Meter
from tests.execution.outputs import run_into
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray


SIZE = 3 * BUFFER_BYTES + 12345
PAGE = 4096


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8).tobytes())
    return path


def _source(path: Path) -> SourceFile:
    with LOCAL.open(str(path)) as reader:
        return SourceFile(reader.path, reader.nbytes, reader.version, LOCAL.spec)


def _plan(source: Path, shift: int, casts: tuple[tuple[str, str], ...] = (("U8", "U8"),)) -> CopyPlan:
    """Copy the source's bytes from 10 on behind a literal of ``shift`` bytes."""
    copies = np.array([(0, 10, SIZE - 10, shift, 0)], dtype=COPY)
    literals = ((0, b"x" * shift),) if shift else ()
    return CopyPlan((_source(source),), casts, (TargetFile("out", shift + SIZE - 10, literals, copies),))


def _run(plan: CopyPlan, directory: Path, jobs: int = 1, **options: Any) -> bytes:
    done: list[int] = []
    run_into(plan, str(directory), jobs=jobs, advance=done.append, **options)
    assert sum(done) == plan.nbytes_written - sum(len(d) for f in plan.files for _, d in f.literals)
    return (directory / "out").read_bytes()


@pytest.mark.parametrize("shift", [10, 11, 4106, 64])
@pytest.mark.parametrize("jobs", [1, 3])
def test_bytes_arrive_whether_pages_line_up_or_not(source: Path, tmp_path: Path, shift: int, jobs: int) -> None:
    expected = b"x" * shift + source.read_bytes()[10:]
    directory = tmp_path / "target"
    directory.mkdir()
    assert _run(_plan(source, shift), directory, jobs) == expected


@pytest.mark.linux
@pytest.mark.parametrize("code", [errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL])
def test_where_the_kernel_cannot_copy_a_buffer_does(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    assert _run(_plan(source, 10), tmp_path) == b"x" * 10 + source.read_bytes()[10:]


@pytest.mark.linux
def test_short_kernel_copies_and_reads_and_writes_are_continued(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, read, write = os.copy_file_range, os.preadv, os.pwrite
    monkeypatch.setattr(os, "copy_file_range", lambda a, b, n, i, o: copy(a, b, min(n, 99_991), i, o))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: read(fd, [buffers[0][:77_777]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:55_555], at))
    for shift in (10, 11):
        directory = tmp_path / str(shift)
        directory.mkdir()
        assert _run(_plan(source, shift), directory) == b"x" * shift + source.read_bytes()[10:]


@pytest.mark.linux
def test_a_full_disk_is_an_error_that_names_the_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", full)
    with refused(StorageError):
        _run(_plan(source, 10), tmp_path)


def test_a_source_that_changed_since_the_plan_was_made_is_an_error(source: Path, tmp_path: Path) -> None:
    plan = _plan(source, 10)
    os.utime(source, ns=(1, 1))
    with refused(StorageError):
        _run(plan, tmp_path)


@pytest.mark.linux
@pytest.mark.parametrize("shift", [10, 11])
def test_a_source_that_is_cut_off_meanwhile_is_an_error_that_names_it(
    source: Path, tmp_path: Path, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_kernel, read = os.copy_file_range, os.preadv

    def cut_and_copy(*arguments: int) -> int:
        os.truncate(source, SIZE // 2)
        return by_kernel(*arguments)

    def cut_and_read(fd: int, buffers: list[memoryview], at: int) -> int:
        os.truncate(source, SIZE // 2)
        return read(fd, buffers, at)

    monkeypatch.setattr(os, "copy_file_range", cut_and_copy)
    monkeypatch.setattr(os, "preadv", cut_and_read)
    with refused(StorageError):
        _run(_plan(source, shift), tmp_path, sizes=Sizes(task_elements=BUFFER_BYTES))


def test_a_source_that_changes_meanwhile_is_an_error(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.preadv

    def rewrite(fd: int, buffers: list[memoryview], at: int) -> int:
        os.utime(source, ns=(1, 1))
        return read(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", rewrite)
    with refused(StorageError):
        _run(_plan(source, 11), tmp_path)


def test_the_first_error_stops_the_other_threads() -> None:
    began: list[int] = []

    def task(number: int) -> int:
        began.append(number)
        if number == 0:
            raise StorageError("x", "broke", "")
        time.sleep(0.01)
        return number

    with refused(StorageError):
        list(in_threads((partial(task, n) for n in range(1000)), 2))
    assert len(began) < 20


def _two_files(source: Path) -> CopyPlan:
    """The source twice, in copies of a tenth each, none of which lies as its pages do."""
    size = SIZE // 10
    copies = np.array([(0, n * size, size, n * size + 1, 0) for n in range(10)], dtype=COPY)
    files = tuple(TargetFile(name, 1 + 10 * size, ((0, b"x"),), copies) for name in ("a", "b/c"))
    return CopyPlan((_source(source),), (("U8", "U8"),), files)


def _open_files() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return found


def test_files_are_written_at_once_and_each_by_one_thread(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, both = os.pwrite, threading.Barrier(2, timeout=30)
    writers: dict[int, set[int]] = {}

    def together(fd: int, data: memoryview, at: int) -> int:
        if len(data) > 1:
            writers.setdefault(fd, set()).add(threading.get_ident())
            both.wait()  # breaks if the other file is not being written
        return write(fd, data, at)

    monkeypatch.setattr(os, "pwrite", together)
    run_into(_two_files(source), str(tmp_path), jobs=4, sizes=Sizes(task_elements=SIZE // 20))
    assert [len(threads) for threads in writers.values()] == [1, 1]
    expected = b"x" + source.read_bytes()[: SIZE // 10 * 10]
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b" / "c").read_bytes() == expected
    assert not {f for f in _open_files() if f.startswith(str(tmp_path))}


def test_an_error_in_one_file_stops_the_others_in_the_middle(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, failed = os.pwrite, threading.Event()
    after: list[int] = []

    def fail_in_the_second(fd: int, data: memoryview, at: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("c") and at:
            failed.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        if at:
            assert failed.wait(30)
            time.sleep(0.05)  # until it is known
            after.append(at)
        return write(fd, data, at)

    monkeypatch.setattr(os, "pwrite", fail_in_the_second)
    with refused(StorageError):
        run_into(_two_files(source), str(tmp_path), jobs=2, sizes=Sizes(task_elements=SIZE // 20))
    assert len(after) < 8  # of twenty and more
    assert not {f for f in _open_files() if f.startswith(str(tmp_path))}


def test_a_meter_adds_up_across_threads() -> None:
    seen: list[tuple[int, int]] = []
    meter = Meter(4000, lambda done, total: seen.append((done, total)))

    def work() -> None:
        for _ in range(1000):
            meter(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert seen == [(i, 4000) for i in range(1, 4001)]


@pytest.mark.parametrize("pair", [("F32", "BF16"), ("F32", "F16"), ("BF16", "F32"), ("F16", "F32")])
def test_casts_longer_than_a_buffer_are_continued(tmp_path: Path, pair: tuple[str, str]) -> None:
    count = 2 * CAST_ELEMENTS + 77
    values = cast(np.random.default_rng(2).standard_normal(count, dtype=np.float32), pair[0])
    path = tmp_path / "source"
    path.write_bytes(b"head" + values.tobytes())
    copies = np.array([(0, 4, count, 0, 0)], dtype=COPY)
    file = TargetFile("out", count * itemsize(pair[1]), (), copies)
    plan = CopyPlan((_source(path),), (pair,), (file,))
    assert _run(plan, tmp_path) == cast(values, pair[1]).tobytes()


def test_comparisons_longer_than_a_buffer_reach_the_last_element(tmp_path: Path) -> None:
    count = CAST_ELEMENTS + 5
    masters = np.random.default_rng(3).standard_normal(count, dtype=np.float32)
    for change in (0, 1):
        path = tmp_path / f"source{change}"
        copies = cast(masters, "BF16").copy()
        copies[-1] += change
        path.write_bytes(masters.tobytes() + copies.tobytes())
        rows = np.array([(0, 0, 0, 4 * count, count, 0, 0)], dtype=CHECK)
        source = _source(path)
        proofs = ConsistencyChecks((source,), (("F32", "BF16"),), ("w",), rows)
        assert len(list(failed_checks(proofs, advance=lambda _: None))) == change


# ------------------------------------------------------------------------------------------------- read once


@pytest.mark.parametrize("shift", [10, 11])
def test_file_systems_that_share_blocks_give_the_same_bytes(source: Path, tmp_path: Path, shift: int) -> None:
    assert _run(_plan(source, shift), tmp_path, file_system="xfs") == b"x" * shift + source.read_bytes()[10:]


@pytest.mark.parametrize("file_system", ["ext4", "xfs"])
@pytest.mark.parametrize("shift", [10, 11])
def test_bytes_that_the_kernel_could_copy_are_compared_with_their_checksums(
    source: Path, tmp_path: Path, shift: int, file_system: str
) -> None:
    plan, where = _plan(source, shift), ByteRange(10, SIZE)
    for number, crc in enumerate((zlib.crc32(source.read_bytes()[10:]), 1)):
        (tmp_path / str(number)).mkdir()
        checks = ReadChecks([replace(plan.sources[0], records=(Record("record", where, crc),))])
        expected = pytest.raises(ChecksumError) if number else contextlib.nullcontext()
        with expected:
            run_into(plan, str(tmp_path / str(number)), checks=checks, file_system=file_system)


def test_two_casts_of_one_read_are_both_written(tmp_path: Path) -> None:
    """Neither ends in the order in which they begin."""
    values = _masters(tmp_path / "source")
    casts = (("F32", "F32"), ("F32", "BF16"), ("F32", "F16"))
    spans = [("all", 0, COUNT, 1), ("first", 1, 3000, 2), ("middle", 2000, HALF, 1), ("late", 40_000, 41_000, 2)]
    files = [TargetFile("masters", 4 * COUNT, (), np.array([(0, 0, COUNT, 0, 0)], dtype=COPY))]
    for name, a, b, number in spans:
        files.append(TargetFile(name, 2 * (b - a), (), np.array([(0, 4 * a, b - a, 0, number)], dtype=COPY)))
    plan = CopyPlan((_source(tmp_path / "source"),), casts, tuple(files))
    run_into(plan, str(tmp_path), jobs=2, sizes=Sizes(read_bytes=PAGE))
    assert (tmp_path / "masters").read_bytes() == values.tobytes()
    for name, a, b, number in spans:
        assert (tmp_path / name).read_bytes() == cast(values[a:b], casts[number][1]).tobytes(), name


COUNT = 300_000
HALF = COUNT // 2 + 1


def _masters(path: Path) -> NDArray[np.float32]:
    values = np.random.default_rng(4).standard_normal(COUNT, dtype=np.float32)
    values[[0, 77_777, COUNT - 1]] = 1e30, np.nan, -1e30
    path.write_bytes(values.tobytes())
    return values


def _masters_and_weights(source: Path, dtype: str = "BF16") -> CopyPlan:
    """A file of weights, cast from masters which two others hold as they are, cut elsewhere, one behind a header."""
    casts = (("F32", dtype), ("F32", "F32"))
    pieces = [(0, COUNT // 3), (COUNT // 3, COUNT)]
    weights = np.array([(0, 4 * a, b - a, 2 + 2 * a, 0) for a, b in pieces], dtype=COPY)
    one, two = (np.array([(0, 4 * a, b - a, at, 1)], dtype=COPY) for a, b, at in ((0, HALF, 64), (HALF, COUNT, 0)))
    files = (
        TargetFile("weights", 2 + 2 * COUNT, ((0, b"xx"),), weights),
        TargetFile("masters/1", 64 + 4 * HALF, ((0, b"y" * 64),), one),
        TargetFile("masters/2", 4 * (COUNT - HALF), (), two),
    )
    return CopyPlan((_source(source),), casts, files)


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    read, seen = os.preadv, []

    def counted(fd: int, buffers: list[memoryview], at: int) -> int:
        seen.append(read(fd, buffers, at))
        return seen[-1]

    monkeypatch.setattr(os, "preadv", counted)
    return seen


def _check_masters_and_weights(directory: Path, values: NDArray[np.float32], dtype: str = "BF16") -> None:
    assert (directory / "weights").read_bytes() == b"xx" + cast(values, dtype).tobytes()
    masters = (directory / "masters" / "1").read_bytes()[64:] + (directory / "masters" / "2").read_bytes()
    assert masters == values.tobytes()


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("elements", [Sizes().task_elements, 12_345])
def test_bytes_copied_and_cast_are_read_once(tmp_path: Path, bytes_read: list[int], jobs: int, elements: int) -> None:
    values = _masters(tmp_path / "source")
    plan = _masters_and_weights(tmp_path / "source")
    meter = Meter(plan.nbytes_written, None)
    run_into(plan, str(tmp_path), jobs=jobs, advance=meter, sizes=Sizes(task_elements=elements))
    _check_masters_and_weights(tmp_path, values)
    assert sum(bytes_read) == nbytes_read(plan, to_disk=True, workers=None) == 4 * COUNT
    assert meter.done == plan.nbytes_written - 66  # all but the headers
    assert not {f for f in _open_files() if f.startswith(str(tmp_path))}


def test_overflows_of_shared_reads_are_counted(tmp_path: Path) -> None:
    values = _masters(tmp_path / "source")
    plan = _masters_and_weights(tmp_path / "source", "F16")
    assert run_into(plan, str(tmp_path), jobs=2) == 2
    _check_masters_and_weights(tmp_path, values, "F16")


@pytest.mark.parametrize(
    ("gone", "elements"),
    [(["weights"], COUNT), (["masters/1"], HALF), (["weights", "masters/2"], COUNT + COUNT - HALF)],
)
def test_parts_missing_in_an_earlier_run_are_read_alone(
    tmp_path: Path, bytes_read: list[int], gone: list[str], elements: int
) -> None:
    values = _masters(tmp_path / "source")
    plan = _masters_and_weights(tmp_path / "source")
    out = tmp_path / "out"
    out.mkdir()
    with Directory.open(str(out)) as directory:
        run_into(plan, directory, jobs=1, journal=Journal(directory))
    entries = (out / JOURNAL).read_text().splitlines(keepends=True)
    (out / JOURNAL).write_text("".join(e for e in entries if not any(name in e for name in gone)))
    for name in gone:
        (out / name).unlink()
    bytes_read.clear()
    with Directory.open(str(out)) as directory:
        run_into(plan, directory, jobs=1, journal=Journal(directory))
    _check_masters_and_weights(out, values)
    assert sum(bytes_read) == 4 * elements


def test_a_file_that_others_write_to_is_complete_when_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _masters(tmp_path / "source")
    out = tmp_path / "out"
    out.mkdir()
    write = os.pwrite

    def fail(fd: int, data: memoryview, at: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("masters/2"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data, at)

    monkeypatch.setattr(os, "pwrite", fail)
    plan = _masters_and_weights(tmp_path / "source")
    with Directory.open(str(out)) as directory:
        with refused(StorageError):
            run_into(plan, directory, jobs=1, journal=Journal(directory))
        assert [f.name for f in plan.files if Journal(directory).has(f.name, f.nbytes)] == ["masters/1"]
    assert not {f for f in _open_files() if f.startswith(str(out))}


def test_files_with_padding_or_copied_by_the_kernel_are_complete(source: Path, tmp_path: Path) -> None:
    plan = _plan(source, 10)
    (copied,) = plan.files
    padded = replace(copied, name="padded", nbytes=copied.nbytes + 7, zeros=((copied.nbytes, 7),))
    files = (copied, padded, TargetFile("padding", 5, (), np.zeros(0, COPY), zeros=((0, 5),)))
    with Directory.open(str(tmp_path)) as directory:
        run_into(replace(plan, files=files), directory, journal=Journal(directory))
        journal = Journal(directory)
        assert [file.name for file in files if not journal.has(file.name, file.nbytes)] == []
    assert (tmp_path / "padded").read_bytes() == (tmp_path / "out").read_bytes() + bytes(7)
    assert (tmp_path / "padding").read_bytes() == bytes(5)


CASTS = (("F32", "F32"), ("F32", "BF16"), ("F32", "F16"), ("F64", "F32"), ("U8", "U8"))
ELEMENTS = 64
"""Of the widest type that a source file holds."""
VALUES = np.array([0.0, 1.0, -2.5, 1e-3, 70000.0, -1e5, 3e38, np.inf])
"""Some of them are too large for fp16."""


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[bytes], list[tuple[str, Any]]]:
    """Bytes of source files, and the pieces of one target file in its order."""
    sources = []
    for _ in range(draw(st.integers(1, 3))):
        numbers = draw(st.lists(st.sampled_from(VALUES.tolist()), min_size=2 * ELEMENTS, max_size=2 * ELEMENTS))
        sources.append(np.array(numbers, dtype=np.float32).tobytes())
    pieces: list[tuple[str, Any]] = []
    for _ in range(draw(st.integers(0, 8))):
        kind = draw(st.sampled_from(["copy", "copy", "copy", "literal", "zeros"]))
        if kind == "literal":
            pieces.append(("literal", draw(st.binary(max_size=40))))
        elif kind == "zeros":
            pieces.append(("zeros", draw(st.integers(0, 40))))
        else:
            chosen = draw(st.integers(0, len(CASTS) - 1))
            width = itemsize(CASTS[chosen][0])
            room = len(sources[0]) // width
            first = draw(st.integers(0, room))
            numel = draw(st.integers(0, room - first))
            pieces.append(("copy", (draw(st.integers(0, len(sources) - 1)), first * width, numel, chosen)))
    return sources, pieces


def _expected(sources: list[bytes], pieces: list[tuple[str, Any]]) -> bytes:
    """All bytes of the file, put together by the plainest of means."""
    out = b""
    for kind, what in pieces:
        if kind == "copy":
            file, start, numel, chosen = what
            source, target = CASTS[chosen]
            values = np.frombuffer(sources[file], numpy_dtype(source), numel, start)
            out += cast(values, target).tobytes()
        else:
            out += what if isinstance(what, bytes) else bytes(what)
    return out


def _overflowed(sources: list[bytes], pieces: list[tuple[str, Any]]) -> int:
    total = 0
    for kind, what in pieces:
        if kind == "copy":
            file, start, numel, chosen = what
            source, target = CASTS[chosen]
            if source != target:
                values = np.frombuffer(sources[file], numpy_dtype(source), numel, start)
                total += count_overflowed(values, cast(values, target))
    return total


def _plan_of(sources: list[bytes], pieces: list[tuple[str, Any]], save: Callable[[bytes], SourceFile]) -> CopyPlan:
    rows, literals, zeros = [], [], []
    at = 0
    for kind, what in pieces:
        if kind == "copy":
            file, start, numel, chosen = what
            rows.append((file, start, numel, at, chosen))
            at += numel * itemsize(CASTS[chosen][1])
        elif isinstance(what, bytes):
            literals.append((at, what))
            at += len(what)
        else:
            zeros.append((at, int(what)))
            at += int(what)
    # In any order: nothing in a plan says that they are sorted.
    copies = np.array(rows[::-1], dtype=COPY) if rows else np.zeros(0, dtype=COPY)
    target = TargetFile("out", at, tuple(literals[::-1]), copies, zeros=tuple(zeros))
    return CopyPlan(tuple(save(data) for data in sources), CASTS, (target,))


def _in_memory(data: bytes) -> SourceFile:
    url = f"memory://windows/{uuid.uuid4().hex}"
    fsspec.filesystem("memory").pipe_file(url, data)
    storage = open_storage(url)
    with storage.open(url) as reader:
        return SourceFile(url, reader.nbytes, reader.version, storage.spec)


@given(plans(), st.integers(1, 400))
def test_parts_of_any_size_join_to_the_file(drawn: tuple[list[bytes], list[tuple[str, Any]]], size: int) -> None:
    sources, pieces = drawn
    plan = _plan_of(sources, pieces, _in_memory)
    expected = _expected(sources, pieces)
    with Sources(plan.sources) as opened:
        assembler = PartAssembler(plan, plan.files[0], opened)
        found = [assembler.assemble(at, min(at + size, len(expected))) for at in range(0, len(expected), size)]
        assert b"".join(data for data, _ in found) == expected
        whole, overflowed = assembler.assemble(0, len(expected))
    assert whole == expected
    assert overflowed == _overflowed(sources, pieces)


@pytest.mark.parametrize("elements", [1, 7, 50, 51])
def test_local_values_are_cast_a_few_at_a_time(elements: int, tmp_path: Path) -> None:
    data = np.arange(51, dtype=np.float32).tobytes()

    def save(data: bytes) -> SourceFile:
        path = tmp_path / "source"
        path.write_bytes(data)
        with open_storage(str(path)).open(str(path)) as reader:
            return SourceFile(str(path), reader.nbytes, reader.version, LOCAL.spec)

    number = next(i for i, (source, target) in enumerate(CASTS) if source == "F32" and target != "F32")
    pieces = [("copy", (0, 0, 51, number))]
    plan = _plan_of([data], pieces, save)
    with Sources(plan.sources) as opened:
        assembler = PartAssembler(plan, plan.files[0], opened, Sizes(cast_elements=elements))
        found, _ = assembler.assemble(0, plan.files[0].nbytes)
    assert bytes(found) == _expected([data], pieces)


@given(plans(), st.sampled_from([64, 128, 192]))
def test_overflows_are_counted_once(drawn: tuple[list[bytes], list[tuple[str, Any]]], size: int) -> None:
    sources, pieces = drawn
    aligned = [p for p in pieces if p[0] == "copy"]  # of elements that begin on a multiple of their size
    aligned.sort(key=lambda p: -itemsize(CASTS[p[1][3]][1]))
    plan = _plan_of(sources, aligned, _in_memory)
    with Sources(plan.sources) as opened:
        assembler = PartAssembler(plan, plan.files[0], opened)
        nbytes = plan.files[0].nbytes
        total = sum(assembler.assemble(at, min(at + size, nbytes))[1] for at in range(0, nbytes, size))
    assert total == _overflowed(sources, aligned)


def test_a_part_that_equals_a_source_range_is_not_copied() -> None:
    source = _in_memory(bytes(range(64)))
    copies = np.array([(0, 0, 32, 0, 0), (0, 40, 16, 32, 0)], dtype=COPY)
    plan = CopyPlan((source,), (("U8", "U8"),), (TargetFile("out", 48, (), copies),))
    with Sources(plan.sources) as opened:
        assembler = PartAssembler(plan, plan.files[0], opened)
        found = [assembler.assemble(start, end)[0] for start, end in [(4, 32), (32, 48), (16, 48)]]
    # What a storage gives can only be read, memory of our own be written.
    assert [data.readonly for data in found] == [True, True, False]
    assert found == [bytes(range(4, 32)), bytes(range(40, 56)), bytes([*range(16, 32), *range(40, 56)])]


def test_an_empty_piece_hides_nothing() -> None:
    """A plan may hold empty pieces anywhere, even in the middle of others."""
    source = _in_memory(bytes(range(64)))
    copies = np.array([(0, 0, 32, 16, 0), (0, 9, 0, 20, 0), (0, 9, 0, 40, 0)], dtype=COPY)
    literals = ((0, b"0123456789abcdef"), (8, b""))
    plan = CopyPlan((source,), (("U8", "U8"),), (TargetFile("out", 48, literals, copies),))
    expected = b"0123456789abcdef" + bytes(range(32))
    with Sources(plan.sources) as opened:
        assembler = PartAssembler(plan, plan.files[0], opened)
        for size in range(1, 49):
            parts = [assembler.assemble(at, min(at + size, 48))[0] for at in range(0, 48, size)]
            assert b"".join(parts) == expected
