"""CRC-32 checks of the bytes that a command reads, made in the same pass.

``torch.save`` records a CRC-32 of every storage, and a manifest one of every chunk of a file. A command reads such a
record in pieces, in several threads, processes or ranks. Each piece is hashed while it is in the processor's cache; the
checksums of the pieces are combined, so that the record is compared as a whole before anything is committed.
"""

from __future__ import annotations

import bisect
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from ckpttool.checksums import Record, combine, crc32
from ckpttool.concurrency import in_threads
from ckpttool.containers.torch_zip import MAGIC, parse
from ckpttool.dtypes import itemsize
from ckpttool.errors import ChecksumError
from ckpttool.model import stored_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from ckpttool.model import Checkpoint
    from ckpttool.plan import SourceFile
    from ckpttool.storage import Storage

FRAGMENT = np.dtype([("file", "<u8"), ("start", "<u8"), ("end", "<u8"), ("crc", "<u8")])
"""One row: the CRC-32 of the bytes [start, end) of a file (its index among the sources), inside one record."""

ALLOWANCE_BYTES = 1 << 20
"""Bytes of a record that no output needs, and that are read all the same to check it: padding, mostly."""
ALLOWANCE_SHARE = 16
"""For a longer record, this part of it."""
ARCHIVES = (".pt", ".pth", ".pkl", ".bin")
"""How names of files end that ``torch.save`` may have written."""
READ_BYTES = 1 << 23
"""Bytes that are read at a time to complete a record."""
RESTORE = "its bytes have changed since: restore the file from a copy, or use another tag"


@dataclass(frozen=True, slots=True)
class UncheckedRecord:
    """A record that was read in part, so that its checksum could not be compared."""

    file: str
    """Path of its file."""
    record: str
    """Name of the record."""
    nbytes: int
    """Its size."""


@dataclass(frozen=True, slots=True)
class ReadReport:
    """What was compared with recorded checksums."""

    records: int = 0
    """Records whose CRC-32 was compared."""
    nbytes: int = 0
    """Their bytes."""
    unchecked: tuple[UncheckedRecord, ...] = ()
    """Records of which only a part was read."""
    without: tuple[str, ...] = ()
    """Files that hold bytes without a recorded checksum."""


Check = Literal["read", "full", "off"]
"""Compare the records that are read whole, or nearly; those that are read in part as well; or none."""

Owners = Callable[[str, int, int], Sequence[str]]
"""Names the parameters in the bytes [start, end) of a file, by its path."""


def no_owners(path: str, start: int, end: int) -> Sequence[str]:
    """Name no parameter."""
    return ()


class ReadChecks:
    """Collects the checksums of all pieces that are read of some files. Threads may share it.

    Args:
        files: The files, as ``Sources`` numbers them.
        full: Read the rest of every record that was read in part, however long it is.
        owners: Names parameters in errors.
        told: Paths of the files that the report names if they have no checksum; None for all.
    """

    def __init__(
        self,
        files: Sequence[SourceFile],
        *,
        full: bool = False,
        owners: Owners = no_owners,
        told: frozenset[str] | None = None,
    ) -> None:
        self._files = files
        self._told = told
        self._full = full
        self._owners = owners
        self._recorded: dict[int, _Recorded] = {}
        self._lock = threading.Lock()
        self._threads: list[_Pieces] = []
        self._of_thread = threading.local()
        self._others: list[NDArray[np.void]] = []
        self._required: dict[int, list[tuple[int, int]]] = {}
        self._checked: set[tuple[int, int]] = set()
        """(file, number of the record) of all that was compared."""
        self.report = ReadReport()
        """What the last ``finish`` compared."""

    def note(self, file: int, start: int, data: bytes | memoryview) -> None:
        """Hash bytes that were read of a file from ``start`` on."""
        pieces: _Pieces | None = getattr(self._of_thread, "pieces", None)
        if pieces is None:
            pieces = self._of_thread.pieces = _Pieces()
            with self._lock:
                self._threads.append(pieces)
        pieces.note(file, self._recorded_of(file), start, memoryview(data))

    def require_all(self, ranges: Iterable[tuple[int, int, int]]) -> None:
        """Check the records of ranges (file, start, end) that an earlier run has read, and this one will not."""
        for file, start, end in ranges:
            self._required.setdefault(file, []).append((start, end))

    def take_fragments(self) -> NDArray[np.void]:
        """What was noted since the last call, as rows of FRAGMENT; no other thread may be reading."""
        with self._lock:
            rows = [np.frombuffer(pieces.take(), dtype=FRAGMENT) for pieces in self._threads]
            others, self._others = self._others, []
        return np.concatenate([*rows, *others, np.zeros(0, dtype=FRAGMENT)])

    def note_files(self, files: Iterable[int]) -> None:
        """Note files that another process has read, whether they have checksums or not."""
        for file in files:
            self._recorded_of(file)

    def add(self, fragments: NDArray[np.void]) -> None:
        """Take over what another process has noted, of files with the same numbers."""
        with self._lock:
            self._others.append(fragments)

    def finish(self, read_into: Callable[[int, int, memoryview], None], *, jobs: int = 1) -> ReadReport:
        """Compare every record that was read; no other thread may be reading.

        It may be called again after more was read: a record of which too much is missing is looked at anew then.

        Args:
            read_into: Reads bytes of a file by its index, from a byte on, to complete records.
            jobs: Threads that complete records.

        Raises:
            ChecksumError: Bytes are not what was saved; names the file, the record and the parameters.
            StorageError: The rest of a record cannot be read.
        """
        rows = np.unique(self.take_fragments())  # sorted by file, start, end, CRC-32
        self._compare_repeated(rows)
        in_pieces: list[_OpenRecord] = []
        for file in sorted({*np.unique(rows["file"]).tolist(), *self._required}):
            whole, others = self._split(file, self._recorded_of(file), rows[rows["file"] == file])
            self._checked |= {(file, n) for n in whole}
            in_pieces += others
        unchecked = self._complete(in_pieces, read_into, jobs)
        for record in unchecked:
            kept = [(record.file, *piece) for piece in record.joined()]
            self._others.append(np.array(kept, dtype=FRAGMENT))
        self.report = ReadReport(
            len(self._checked),
            sum(self._recorded[f].ends[n] - self._recorded[f].starts[n] for f, n in self._checked),
            tuple(UncheckedRecord(self._files[r.file].path, r.name, r.end - r.start) for r in unchecked),
            self._without(),
        )
        return self.report

    def _recorded_of(self, file: int) -> _Recorded:
        known = self._recorded.get(file)
        if known is None:
            known = self._recorded[file] = _Recorded(self._files[file].records)
        return known

    def _without(self) -> tuple[str, ...]:
        """Files that were read and hold bytes without a recorded checksum."""
        paths = (self._files[n].path for n, known in sorted(self._recorded.items()) if not known.complete)
        return tuple(path for path in dict.fromkeys(paths) if self._told is None or path in self._told)

    def _compare_repeated(self, rows: NDArray[np.void]) -> None:
        """Bytes that were read twice must be the same."""
        again = (rows["file"][1:] == rows["file"][:-1]) & (rows["start"][1:] == rows["start"][:-1])
        again &= rows["end"][1:] == rows["end"][:-1]
        for n in np.flatnonzero(again)[:1]:
            row = rows[n]
            path = self._files[int(row["file"])].path
            problem = f"bytes {int(row['start']):,} to {int(row['end']):,} were read twice and differ"
            raise ChecksumError(path, problem, "a disk or memory may be failing: try again")

    def _split(self, file: int, known: _Recorded, rows: NDArray[np.void]) -> tuple[list[int], list[_OpenRecord]]:
        """The records that were read in one piece, compared at once, and those that are to be put together."""
        number = np.searchsorted(known.start_array, rows["start"], side="right") - 1
        whole = (rows["start"] == known.start_array[number]) & (rows["end"] == known.end_array[number])
        for n in np.flatnonzero(whole & (rows["crc"] != known.crc_array[number]))[:1]:
            self._refuse(file, known, int(number[n]), int(rows["crc"][n]))
        required = {n for start, end in self._required.get(file, ()) for n in known.within(start, end)}
        whole_numbers = set(number[whole].tolist())
        in_pieces = {*number[~whole].tolist(), *(required - whole_numbers)}
        in_pieces -= {n for f, n in self._checked if f == file} if self._checked else set()
        by_number: dict[int, list[tuple[int, int, int]]] = {n: [] for n in in_pieces}
        own = np.isin(number, np.array(sorted(in_pieces), dtype=number.dtype))
        for n, (_, start, end, crc) in zip(number[own].tolist(), rows[own].tolist(), strict=True):
            by_number[n].append((start, end, crc))
        open_records = [
            _OpenRecord(file, n, known.names[n], known.starts[n], known.ends[n], by_number[n], n in required)
            for n in sorted(in_pieces)
        ]
        return sorted(whole_numbers - in_pieces), open_records

    def _complete(
        self, records: Sequence[_OpenRecord], read_into: Callable[[int, int, memoryview], None], jobs: int
    ) -> list[_OpenRecord]:
        """Read what is missing of records, and compare them; returns those of which too much is missing."""
        checked: list[_OpenRecord] = []
        unchecked: list[_OpenRecord] = []
        missing: list[tuple[_OpenRecord, int, int]] = []
        for record in records:
            gaps = record.gaps()
            wanted = sum(end - start for start, end in gaps)
            if wanted > record.allowance and not (self._full or record.required):
                unchecked.append(record)
                continue
            checked.append(record)
            missing += [(record, a, b) for start, end in gaps for a, b in _steps(start, end)]
        _read_pieces(read_into, missing, jobs)
        self._compare_loose(checked, read_into, jobs)
        for record in checked:
            known = self._recorded_of(record.file)
            crc = record.crc32()
            if crc != known.crcs[record.number]:
                self._refuse(record.file, known, record.number, crc)
            self._checked.add((record.file, record.number))
        return unchecked

    def _compare_loose(
        self, records: Sequence[_OpenRecord], read_into: Callable[[int, int, memoryview], None], jobs: int
    ) -> None:
        """Read again, within the allowance, what was read twice and is compared with no checksum otherwise."""
        again: list[tuple[_OpenRecord, int, int]] = []
        for record in records:
            left = record.allowance
            for start, end, _ in record.loose():
                left -= end - start
                again += [(record, start, end)] if left >= 0 else []
        _read_pieces(read_into, again, jobs)
        for record, start, end in again:
            if len({crc for first, last, crc in record.pieces if (first, last) == (start, end)}) > 1:
                self._refuse(record.file, self._recorded_of(record.file), record.number, None)

    def _refuse(self, file: int, known: _Recorded, number: int, crc: int | None) -> None:
        path, start, end = self._files[file].path, known.starts[number], known.ends[number]
        owners = list(self._owners(path, start, end))
        of = f" (with {', '.join(owners[:3])}{f' and {len(owners) - 3:,} more' if len(owners) > 3 else ''})"
        name = f"record {known.names[number]}, " if known.names[number] else ""
        what = "gave two contents" if crc is None else f"has CRC-32 {crc:08x}"
        problem = (
            f"{name}bytes {start:,} to {end:,}{of if owners else ''}, {what}, but {known.crcs[number]:08x} was recorded"
            " when it was saved"
        )
        raise ChecksumError(path, problem, RESTORE)


def archive_records(storage: Storage, path: str) -> tuple[Record, ...]:
    """The records of a file beside a checkpoint, if ``torch.save`` wrote it as an archive; else none.

    Raises:
        ContainerError: It begins as an archive, and is cut off or damaged.
        StorageError: It cannot be read.
    """
    if not path.endswith(ARCHIVES):
        return ()
    with storage.open(path) as reader:
        if reader.read(0, min(reader.nbytes, len(MAGIC))) != MAGIC:
            return ()
        return tuple(parse(reader).values())


def checks_for(sources: Sequence[SourceFile], checkpoint: Checkpoint, check: Check) -> ReadChecks | None:
    """The checks of one command; None for "off".

    Args:
        sources: The files that it reads.
        checkpoint: What errors take the names of parameters from.
        check: Which checks.

    Raises:
        ValueError: ``check`` is none of the three.
    """
    if check not in {"read", "full", "off"}:
        raise ValueError(f"check is {check!r}, not read, full or off")
    if check == "off":
        return None
    held = frozenset(checkpoint.path(n) for n in range(len(checkpoint.files)))  # not the configuration beside it
    return ReadChecks(sources, full=check == "full", owners=partial(_owners, checkpoint), told=held)


def _owners(checkpoint: Checkpoint, path: str, start: int, end: int) -> list[str]:
    """The parameters and buffers in a range of a checkpoint's file."""
    index = next((n for n in range(len(checkpoint.files)) if checkpoint.path(n) == path), None)
    names: dict[str, None] = {}
    for name, _, state in checkpoint.states() if index is not None else ():
        width = itemsize(state.dtype)
        rows = stored_blocks(state.extents[state.extents["file"] == index], width)
        if any(int(r["offset"]) < end and int(r["offset"]) + int(r["numel"]) * width > start for r in rows):
            names[name] = None
    return list(names)


class _Recorded:
    """The records of one file that have a checksum, in the order of their bytes."""

    def __init__(self, records: Iterable[Record]) -> None:
        every = list(records)
        held = sorted((r for r in every if r.where.nbytes and r.crc_recorded), key=lambda r: r.where.start)
        self.complete = bool(every) and all(r.crc_recorded for r in every)
        """Whether all bytes that matter have one."""
        self.names = [r.name for r in held]
        self.starts = [r.where.start for r in held]
        self.ends = [r.where.end for r in held]
        self.crcs = [r.crc32 for r in held]
        self.start_array = np.array(self.starts, dtype=np.uint64)
        self.end_array = np.array(self.ends, dtype=np.uint64)
        self.crc_array = np.array(self.crcs, dtype=np.uint64)

    def within(self, start: int, end: int) -> range:
        """The numbers of the records that have bytes in [start, end)."""
        return range(bisect.bisect_right(self.ends, start), bisect.bisect_left(self.starts, end))


class _Pieces:
    """What one thread has read: runs of bytes that go on where the thread stopped reading the file become one piece."""

    def __init__(self) -> None:
        self._done = array("Q")
        self._open: dict[int, list[int]] = {}
        """By file: the first byte of a run, the byte after its last, its CRC-32, and where its record ends."""

    def note(self, file: int, known: _Recorded, at: int, view: memoryview) -> None:
        first, end = at, at + len(view)
        run = self._open.get(file)
        while at < end:
            if run is None or run[1] != at or at == run[3]:
                number = bisect.bisect_right(known.starts, at) - 1
                if number < 0 or at >= known.ends[number]:  # between records
                    if number + 1 == len(known.starts):
                        break
                    at = known.starts[number + 1]
                    continue
                self._close(file, run)
                run = self._open[file] = [at, at, 0, known.ends[number]]
            count = min(end, run[3]) - at
            run[2] = crc32(view[at - first : at - first + count], run[2])
            at += count
            run[1] = at

    def take(self) -> bytes:
        """Rows of FRAGMENT, which are forgotten here."""
        rows, self._done = self._done, array("Q")
        for file, (start, end, crc, _) in self._open.items():
            rows.extend((file, start, end, crc))
        self._open.clear()
        return rows.tobytes()

    def _close(self, file: int, run: list[int] | None) -> None:
        if run is not None:
            self._done.extend((file, run[0], run[1], run[2]))


@dataclass(slots=True)
class _OpenRecord:
    """A record of which pieces are known."""

    file: int
    number: int
    name: str
    start: int
    end: int
    pieces: list[tuple[int, int, int]]
    """(first byte, byte after the last, CRC-32), in any order; they may overlap."""
    required: bool
    """Whether it must be checked, however much of it is missing."""

    @property
    def allowance(self) -> int:
        """Bytes that may be read of it for the check alone."""
        return max(ALLOWANCE_BYTES, (self.end - self.start) // ALLOWANCE_SHARE)

    def gaps(self) -> list[tuple[int, int]]:
        """The ranges to read so that pieces lead from the first byte to the last; none if they do already."""
        known = {self.start}
        for start, end, _ in sorted(self.pieces):
            if start in known:
                known.add(end)
        if self.end in known:
            return []
        reached, known, result = [self.start], {self.start}, []
        for start, end, _ in sorted(self.pieces):
            if start not in known:
                before = reached[bisect.bisect_right(reached, start) - 1]
                result.append((before, start))
                known.add(start)
                bisect.insort(reached, start)
            if end not in known:
                known.add(end)
                bisect.insort(reached, end)
        if reached[-1] < self.end:
            result.append((reached[-1], self.end))
        return result

    def loose(self) -> list[tuple[int, int, int]]:
        """The pieces that lie on no chain of pieces from the first byte to the last: a second read of some bytes."""
        ordered = sorted(self.pieces)
        from_start, to_end = {self.start}, {self.end}
        for start, end, _ in ordered:
            if start in from_start:
                from_start.add(end)
        for start, end, _ in sorted(ordered, key=lambda p: p[1], reverse=True):
            if end in to_end:
                to_end.add(start)
        return [p for p in ordered if p[0] not in from_start or p[1] not in to_end]

    def joined(self) -> list[tuple[int, int, int]]:
        """The pieces, those that follow one another as one."""
        result: list[tuple[int, int, int]] = []
        for start, end, crc in sorted(self.pieces):
            if result and result[-1][1] == start:
                first, _, before = result[-1]
                result[-1] = first, end, combine(before, crc, end - start)
            else:
                result.append((start, end, crc))
        return result

    def crc32(self) -> int | None:
        """CRC-32 of the whole, from those of the pieces; None if two chains of pieces disagree."""
        known = {self.start: 0}
        for start, end, crc in sorted(self.pieces):
            if start not in known:
                continue  # loose
            value = combine(known[start], crc, end - start)
            if known.setdefault(end, value) != value:
                return None
        return known[self.end]


def _steps(start: int, end: int) -> Iterator[tuple[int, int]]:
    for at in range(start, end, READ_BYTES):
        yield at, min(at + READ_BYTES, end)


def _read_pieces(
    read_into: Callable[[int, int, memoryview], None], wanted: Iterable[tuple[_OpenRecord, int, int]], jobs: int
) -> None:
    """Read ranges of records, and add them to their pieces."""
    for record, piece in in_threads((partial(_hash, read_into, *w) for w in wanted), jobs):
        record.pieces.append(piece)


def _hash(
    read_into: Callable[[int, int, memoryview], None], record: _OpenRecord, start: int, end: int
) -> tuple[_OpenRecord, tuple[int, int, int]]:
    buffer = memoryview(bytearray(end - start))
    read_into(record.file, start, buffer)
    return record, (start, end, crc32(buffer))
