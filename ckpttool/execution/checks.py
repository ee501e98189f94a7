"""Compare the bytes that a run reads with the recorded CRC-32, in the same pass.

``torch.save`` records a CRC-32 of every storage, and a manifest one of every chunk of a file. A command reads such a
record in pieces, in several threads, processes or ranks. Each reader hashes its piece while it is in the core's cache;
the checksums of the pieces are combined and compared with the record's checksum before the output is committed.
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

from ckpttool.arguments import check_choice
from ckpttool.blocks import Line, Shown
from ckpttool.checksums import Record, combine, crc32
from ckpttool.concurrency import in_threads
from ckpttool.containers.torch_zip import MAGIC, parse
from ckpttool.dtypes import itemsize
from ckpttool.errors import ChecksumError
from ckpttool.model.extents import stored_blocks
from ckpttool.options import CHECKS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from ckpttool.blocks import Block
    from ckpttool.model import Checkpoint
    from ckpttool.plan import SourceFile
    from ckpttool.storage import Storage


FRAGMENT = np.dtype([("file", "<u8"), ("start", "<u8"), ("end", "<u8"), ("crc", "<u8")])
"""One row: the CRC-32 of the bytes [start, end) of a file (its index among the sources), inside one record."""
ALLOWANCE_BYTES = 1 << 20
"""Maximum bytes to read only for the check of a record: mostly padding."""
ALLOWANCE_SHARE = 16
"""For longer records: the same maximum, as a fraction of the record (1/16)."""
ARCHIVES = (".pt", ".pth", ".pkl", ".bin")
"""Suffixes of files that ``torch.save`` may have written."""
READ_BYTES = 1 << 23
"""Bytes of one read that completes a record."""
RESTORE = "its bytes have changed since: restore the file from a copy, or use another tag"


@dataclass(frozen=True, slots=True)
class UncheckedRecord:
    """A record read only in part, so that its checksum could not be compared."""

    file: str
    """Path of its file."""
    record: str
    """Name of the record."""
    nbytes: int
    """Its size in bytes."""


@dataclass(frozen=True, slots=True)
class ReadReport(Shown):
    """Records compared with their recorded checksums."""

    records: int = 0
    """Number of records whose CRC-32 was compared."""
    nbytes: int = 0
    """Their bytes."""
    unchecked: tuple[UncheckedRecord, ...] = ()
    """Records read only in part."""
    without: tuple[str, ...] = ()
    """Files with bytes that have no recorded checksum."""

    def blocks(self) -> Iterator[Block]:
        """Yield the records and files without a compared checksum."""
        if self.unchecked:
            first = self.unchecked[0]
            yield Line(
                f"note: {len(self.unchecked):,} records were needed in part and are unchecked ({first.file}: "
                f"{first.record}{', ...' if len(self.unchecked) > 1 else ''}); --check full reads the rest of them",
                color="yellow",
            )
        if self.without:
            yield Line(
                f"note: {len(self.without):,} files have bytes without a checksum "
                f"({self.without[0]}{', ...' if len(self.without) > 1 else ''})",
                color="yellow",
            )


Check = Literal["read", "full", "off"]
"""Records to check: "read" for records that are read whole or nearly so, "full" also for records that are read in part,
"off" for none."""
Owners = Callable[[str, int, int], Sequence[str]]
"""Returns the names of the parameters in the bytes [start, end) of the file at a path."""


def no_owners(path: str, start: int, end: int) -> Sequence[str]:
    """Return no names."""
    return ()


class ReadChecks:
    """Collect the checksums of all pieces read of some files. Threads may share it.

    Args:
        files: The files, in the order of ``Sources``.
        full: Whether to read the rest of every record that was read in part, of any length.
        owners: Returns parameter names, for errors.
        reported: Paths of the files that the report may list as without checksums; None for all.
    """

    def __init__(
        self,
        files: Sequence[SourceFile],
        *,
        full: bool = False,
        owners: Owners = no_owners,
        reported: frozenset[str] | None = None,
    ) -> None:
        self._files = files
        self._reported = reported
        self._full = full
        self._owners = owners
        self._recorded: dict[int, _FileRecords] = {}
        self._lock = threading.Lock()
        self._threads: list[_ThreadFragments] = []
        self._of_thread = threading.local()
        self._others: list[NDArray[np.void]] = []
        self._required: dict[int, list[tuple[int, int]]] = {}
        self._checked: set[tuple[int, int]] = set()
        """The compared records: (file, number of the record)."""
        self.report = ReadReport()
        """Report of the last ``finish``."""

    def note(self, file: int, start: int, data: bytes | memoryview) -> None:
        """Hash bytes read from byte ``start`` of a file."""
        pieces: _ThreadFragments | None = getattr(self._of_thread, "pieces", None)
        if pieces is None:
            pieces = self._of_thread.pieces = _ThreadFragments()
            with self._lock:
                self._threads.append(pieces)
        pieces.note(file, self._file_records(file), start, memoryview(data))

    def require_all(self, ranges: Iterable[tuple[int, int, int]]) -> None:
        """Require checks of the records in ranges (file, start, end): an earlier run read them, this run skips them."""
        for file, start, end in ranges:
            self._required.setdefault(file, []).append((start, end))

    def take_fragments(self) -> NDArray[np.void]:
        """Return and forget the checksums noted since the last call, as rows of FRAGMENT; call it after all reads."""
        with self._lock:
            rows = [np.frombuffer(pieces.take(), dtype=FRAGMENT) for pieces in self._threads]
            others, self._others = self._others, []
        return np.concatenate([*rows, *others, np.zeros(0, dtype=FRAGMENT)])

    def note_files(self, files: Iterable[int]) -> None:
        """Note files read by another process, with or without recorded checksums."""
        for file in files:
            self._file_records(file)

    def add(self, fragments: NDArray[np.void]) -> None:
        """Add the fragments of another process; file indexes must be the same."""
        with self._lock:
            self._others.append(fragments)

    def finish(self, read_into: Callable[[int, int, memoryview], None], *, jobs: int = 1) -> ReadReport:
        """Compare every record that was read; call it after all reads.

        A later call, after more reads, compares the records that were incomplete.

        Args:
            read_into: Reads into a buffer (file index, first byte, buffer), to complete records.
            jobs: Threads that complete records.

        Raises:
            ChecksumError: A record does not match its checksum; names the file, the record and the parameters.
            StorageError: The rest of a record cannot be read.
        """
        rows = np.sort(self.take_fragments())  # by file, start, end, CRC-32
        # Not np.unique: importing numpy.ma takes longer than this function.
        rows = rows[np.append(True, rows[1:] != rows[:-1])[: len(rows)]]
        self._compare_repeated(rows)
        in_pieces: list[_OpenRecord] = []
        for file in sorted({*rows["file"].tolist(), *self._required}):
            whole, others = self._split(file, self._file_records(file), rows[rows["file"] == file])
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
            self._unrecorded_files(),
        )
        return self.report

    def _file_records(self, file: int) -> _FileRecords:
        known = self._recorded.get(file)
        if known is None:
            known = self._recorded[file] = _FileRecords(self._files[file].records)
        return known

    def _unrecorded_files(self) -> tuple[str, ...]:
        """Return the files read that have bytes without a recorded checksum."""
        paths = (self._files[n].path for n, known in sorted(self._recorded.items()) if not known.complete)
        return tuple(path for path in dict.fromkeys(paths) if self._reported is None or path in self._reported)

    def _compare_repeated(self, rows: NDArray[np.void]) -> None:
        """Compare the checksums of ranges read twice."""
        again = (rows["file"][1:] == rows["file"][:-1]) & (rows["start"][1:] == rows["start"][:-1])
        again &= rows["end"][1:] == rows["end"][:-1]
        for n in np.flatnonzero(again)[:1]:
            row = rows[n]
            path = self._files[int(row["file"])].path
            problem = f"bytes {int(row['start']):,} to {int(row['end']):,} were read twice and differ"
            raise ChecksumError(path, problem, "a disk or memory may be failing: try again")

    def _split(self, file: int, known: _FileRecords, rows: NDArray[np.void]) -> tuple[list[int], list[_OpenRecord]]:
        """Compare the records read in one piece; return their numbers, and the records read in several pieces."""
        number = np.searchsorted(known.start_array, rows["start"], side="right") - 1
        whole = (rows["start"] == known.start_array[number]) & (rows["end"] == known.end_array[number])
        for n in np.flatnonzero(whole & (rows["crc"] != known.crc_array[number]))[:1]:
            self._raise_mismatch(file, known, int(number[n]), int(rows["crc"][n]))
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
        """Read the missing ranges of records and compare them; return the records with too many missing bytes."""
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
            known = self._file_records(record.file)
            crc = record.crc32()
            if crc != known.crcs[record.number]:
                self._raise_mismatch(record.file, known, record.number, crc)
            self._checked.add((record.file, record.number))
        return unchecked

    def _compare_loose(
        self, records: Sequence[_OpenRecord], read_into: Callable[[int, int, memoryview], None], jobs: int
    ) -> None:
        """Read overlapping pieces again, within the allowance, if no chain of pieces covers them."""
        again: list[tuple[_OpenRecord, int, int]] = []
        for record in records:
            left = record.allowance
            for start, end, _ in record.loose():
                left -= end - start
                again += [(record, start, end)] if left >= 0 else []
        _read_pieces(read_into, again, jobs)
        for record, start, end in again:
            if len({crc for first, last, crc in record.pieces if (first, last) == (start, end)}) > 1:
                self._raise_mismatch(record.file, self._file_records(record.file), record.number, None)

    def _raise_mismatch(self, file: int, known: _FileRecords, number: int, crc: int | None) -> None:
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


def archive_records(storage: Storage, path: str) -> Sequence[Record]:
    """Return the records of a sidecar file, if it is an archive of ``torch.save``; else none.

    Raises:
        ContainerError: The archive is truncated or damaged.
        StorageError: The file cannot be read.
    """
    if not path.endswith(ARCHIVES):
        return ()
    with storage.open(path) as reader:
        if reader.read(0, min(reader.nbytes, len(MAGIC))) != MAGIC:
            return ()
        return parse(reader)


def checks_for(sources: Sequence[SourceFile], checkpoint: Checkpoint, check: Check) -> ReadChecks | None:
    """Return the checks of one command; None for "off".

    Args:
        sources: The source files of the command.
        checkpoint: The checkpoint, for parameter names in errors.
        check: The records to check.

    Raises:
        ArgumentError: ``check`` is not "read", "full" or "off".
    """
    check_choice("check", check, CHECKS)
    if check == "off":
        return None
    held = frozenset(checkpoint.path(n) for n in range(len(checkpoint.files)))  # not its sidecar files
    return ReadChecks(sources, full=check == "full", owners=partial(_owners, checkpoint), reported=held)


def _owners(checkpoint: Checkpoint, path: str, start: int, end: int) -> list[str]:
    """Return the names of the parameters and buffers in a range of a checkpoint's file."""
    index = next((n for n in range(len(checkpoint.files)) if checkpoint.path(n) == path), None)
    names: dict[str, None] = {}
    for name, _, state in checkpoint.states() if index is not None else ():
        for stored in state.stored:
            width = itemsize(stored.dtype)
            rows = stored_blocks(stored.extents[stored.extents["file"] == index], width)
            if any(int(r["offset"]) < end and int(r["offset"]) + int(r["numel"]) * width > start for r in rows):
                names[name] = None
    return list(names)


class _FileRecords:
    """The records of one file that have a checksum, sorted by offset."""

    def __init__(self, records: Iterable[Record]) -> None:
        every = list(records)
        held = sorted((r for r in every if r.where.nbytes and r.crc_recorded), key=lambda r: r.where.start)
        self.complete = bool(every) and all(r.crc_recorded for r in every)
        """Whether all records have a checksum."""
        self.names = [r.name for r in held]
        self.starts = [r.where.start for r in held]
        self.ends = [r.where.end for r in held]
        self.crcs = [r.crc32 for r in held]
        self.start_array = np.array(self.starts, dtype=np.uint64)
        self.end_array = np.array(self.ends, dtype=np.uint64)
        self.crc_array = np.array(self.crcs, dtype=np.uint64)

    def within(self, start: int, end: int) -> range:
        """Return the numbers of the records that overlap [start, end)."""
        return range(bisect.bisect_right(self.ends, start), bisect.bisect_left(self.starts, end))


class _ThreadFragments:
    """Fragments read by one thread: consecutive reads of a file are joined into one fragment."""

    def __init__(self) -> None:
        self._done = array("Q")
        self._open: dict[int, list[int]] = {}
        """By file: first byte of the open fragment, byte after its last, its CRC-32, and the end of its record."""

    def note(self, file: int, known: _FileRecords, at: int, view: memoryview) -> None:
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
        """Return and forget the fragments, as rows of FRAGMENT."""
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
    """A record read in pieces."""

    file: int
    number: int
    name: str
    start: int
    end: int
    pieces: list[tuple[int, int, int]]
    """(first byte, byte after the last, CRC-32), in any order; they may overlap."""
    required: bool
    """Whether to check the record however many of its bytes were not read."""

    @property
    def allowance(self) -> int:
        """Maximum bytes to read only for the check."""
        return max(ALLOWANCE_BYTES, (self.end - self.start) // ALLOWANCE_SHARE)

    def _sums(self) -> dict[int, int | None]:
        """Return the CRC-32 up to each byte that a chain of pieces from the first reaches; None if two differ."""
        sums: dict[int, int | None] = {self.start: 0}
        for start, end, crc in sorted(self.pieces):
            if start in sums:
                before = sums[start]
                value = None if before is None else combine(before, crc, end - start)
                sums[end] = value if sums.get(end, value) == value else None
        return sums

    def crc32(self) -> int | None:
        """Return the CRC-32 of the record, combined from its pieces; None if two chains of pieces disagree."""
        sums = self._sums()
        return None if None in sums.values() else sums[self.end]

    def gaps(self) -> list[tuple[int, int]]:
        """Return the ranges to read so that pieces form a chain from the first byte to the last."""
        reached = sorted(self._sums())
        if reached[-1] == self.end:
            return []
        result: list[tuple[int, int]] = []
        for start, end, _ in sorted(self.pieces):
            before = reached[bisect.bisect_right(reached, start) - 1]
            if before < start:
                result.append((before, start))
                bisect.insort(reached, start)
            bisect.insort(reached, end)
        if reached[-1] < self.end:
            result.append((reached[-1], self.end))
        return result

    def loose(self) -> list[tuple[int, int, int]]:
        """Return the pieces on no chain from the first byte to the last: second reads of some bytes."""
        from_start, to_end = self._sums(), {self.end}
        for start, end, _ in sorted(self.pieces, key=lambda p: p[1], reverse=True):
            if end in to_end:
                to_end.add(start)
        return [p for p in sorted(self.pieces) if p[0] not in from_start or p[1] not in to_end]

    def joined(self) -> list[tuple[int, int, int]]:
        """Return the pieces, with consecutive pieces joined."""
        result: list[tuple[int, int, int]] = []
        for start, end, crc in sorted(self.pieces):
            if result and result[-1][1] == start:
                first, _, before = result[-1]
                result[-1] = first, end, combine(before, crc, end - start)
            else:
                result.append((start, end, crc))
        return result


def _steps(start: int, end: int) -> Iterator[tuple[int, int]]:
    for at in range(start, end, READ_BYTES):
        yield at, min(at + READ_BYTES, end)


def _read_pieces(
    read_into: Callable[[int, int, memoryview], None], wanted: Iterable[tuple[_OpenRecord, int, int]], jobs: int
) -> None:
    """Read ranges of records and add them to the records' pieces."""
    for record, piece in in_threads((partial(_hash, read_into, *w) for w in wanted), jobs):
        record.pieces.append(piece)


def _hash(
    read_into: Callable[[int, int, memoryview], None], record: _OpenRecord, start: int, end: int
) -> tuple[_OpenRecord, tuple[int, int, int]]:
    buffer = memoryview(bytearray(end - start))
    read_into(record.file, start, buffer)
    return record, (start, end, crc32(buffer))
