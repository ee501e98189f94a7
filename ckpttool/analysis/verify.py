"""``verify``: check the files, checksums and values of a checkpoint, and list all defects."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.blocks import Line, Shown
from ckpttool.checksums import crc32, cuts
from ckpttool.commit.manifest import find_manifest, size_problems
from ckpttool.concurrency import default_jobs, in_order
from ckpttool.containers.torch_file import read_torch_file
from ckpttool.dtypes import DTYPES, itemsize, numpy_dtype
from ckpttool.errors import CkptError, PlanError, StorageError
from ckpttool.execution.copies import failed_checks
from ckpttool.execution.sources import Sources
from ckpttool.formats import Opening, open_checkpoint
from ckpttool.formats.locate import NoCheckpointError, SeveralModelsError
from ckpttool.model.extents import stored_blocks
from ckpttool.plan.builder import full_checks, sample_checks, source_files
from ckpttool.ranges import ByteRange
from ckpttool.storage import connect, is_unread, without_secrets
from ckpttool.storage.buffers import ReadBuffer
from ckpttool.units import Meter, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from ckpttool.blocks import Block
    from ckpttool.checksums import Checksums
    from ckpttool.commit.manifest import Manifest
    from ckpttool.model import Checkpoint, CheckpointFile, State
    from ckpttool.storage import Reader
    from ckpttool.units import Advance, Progress

PIECE_BYTES = 1 << 21
"""Bytes read, hashed and searched for NaN at once: they fit into the cache; with less, threads wait for each other."""
CHUNK_BYTES = 1 << 22
"""Bytes read at once to count NaN."""
REMOTE_BYTES = 1 << 26
"""Bytes requested at once from remote storages, of all files together; ``PIECE_BYTES`` of each file at least."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One defect."""

    path: str
    """File or directory."""
    problem: str
    """The defect, with the name of the tensor, if any."""
    hint: str
    """The next step."""
    options: tuple[str, ...] = field(default=(), repr=False, metadata={"json": False})
    """Parameters that ``hint`` names; the command line shows its flags in their place."""


@dataclass(frozen=True, slots=True)
class VerifyReport(Shown):
    """Result of ``verify``."""

    location: str
    """Directory of the tag."""
    tag: str | None
    """Name of the tag; None if it was not found."""
    deep: bool
    """Whether every byte was read."""
    files: int
    """Files read."""
    nbytes: int
    """Their size."""
    tensors: int
    """States of parameters, and buffers, whose byte ranges were checked."""
    records_checked: int
    """Number of compared CRC-32: of the chunks in a manifest, or else of records."""
    records_unrecorded: int
    """Records without a recorded CRC-32: those with a checksum of zero; a legacy file counts as one."""
    unplaced: tuple[str, ...]
    """Files that identify neither their rank nor their parameter, without a manifest: a swap of two such files with
    tensors of one shape cannot be detected. NVMe swap files, states of universal checkpoints, files of DCP."""
    findings: tuple[Finding, ...]
    """All defects; empty for a sound checkpoint."""
    notes: tuple[str, ...] = ()
    """Facts that no file records, and states that are not read."""

    @property
    def sound(self) -> bool:
        """Whether ``findings`` is empty; ``deep`` and ``records_unrecorded`` give the extent of the check."""
        return not self.findings

    def blocks(self) -> Iterator[Block]:
        """Yield one line for each finding, then the number of files, tensors and checksums."""
        for finding in self.findings:
            yield Line(f"{finding.path}: {finding.problem}" + (f"; {finding.hint}" if finding.hint else ""))
        if not self.files:
            yield Line(f"{self.location}: cannot be read as a checkpoint", color="red")
            return
        contents = f"{self.files} files, {format_size(self.nbytes)}, {self.tensors} tensors"
        count = len(self.findings)
        compared = self.deep and not self.records_unrecorded
        verdict = f"{count} finding{'s' if count > 1 else ''}" if count else "sound" if compared else "no finding"
        line = f"{self.location}: {verdict} ({contents}; {self._depth()})"
        yield Line(line, color="red" if count else "green" if compared else "yellow")
        if self.unplaced:
            shown = f"{', '.join(self.unplaced[:2])}{', ...' if len(self.unplaced) > 2 else ''}"
            problem = f"{len(self.unplaced)} files do not identify their rank or parameter ({shown}) without a manifest"
            yield Line(f"note: {problem}: two of one shape that were swapped would not be noticed")
        for note in self.notes:
            yield Line(f"note: {note}", color="yellow")

    def _depth(self) -> str:
        """Return which parts of a checkpoint were compared."""
        if not self.deep:
            return "structure and samples; --deep reads every byte"
        compared, without = self.records_checked, self.records_unrecorded
        if not without:
            return f"{compared:,} checksums; every byte read"
        where = f"{without:,} records have no checksum: of these" if compared else "no checksums recorded:"
        only = f"{where} only structure, NaN and infinity were checked"
        return f"{compared:,} checksums compared; {only}" if compared else only


def verify_checkpoint(
    src: Sequence[str],
    *,
    tag: str | None,
    deep: bool,
    jobs: int | None,
    progress: Progress | None,
    opening: Opening = Opening(),
    trust_names: bool = False,
) -> VerifyReport:
    """Check that every rank's file exists, is complete and agrees with the others.

    Args:
        src: As for ``open_checkpoint``.
        tag: As for ``open_checkpoint``.
        deep: Also compare every recorded CRC-32, look for NaN and infinity, and compare each 16-bit copy with the cast
            of its fp32 master weights, element by element. Without it, only samples of the copies.
        jobs: Threads; None for one for each core, up to MAX_JOBS.
        progress: Called with (bytes done, bytes in all).
        opening: How to open its storage.
        trust_names: As for ``open_checkpoint``.
    """
    errors: list[CkptError] = []
    checkpoint: Checkpoint | None = None
    try:
        checkpoint = open_checkpoint(src, tag=tag, opening=opening, report=errors.append, trust_names=trust_names)
    except CkptError as error:
        of_source = error.path.rstrip("/") == src[0].rstrip("/")
        missing = of_source and isinstance(error, StorageError | NoCheckpointError)
        several = isinstance(error, SeveralModelsError) or ("tag" in error.options and (of_source or tag is not None))
        if missing or several:
            raise  # there is nothing to judge
        if error not in errors:
            errors.append(error)
    if checkpoint is None:
        _refuse_unread(errors)
        return VerifyReport(without_secrets(src[0]), None, deep, 0, 0, 0, 0, 0, (), _findings(errors))
    errors += checkpoint.notes
    manifest = _manifest(checkpoint, errors)
    checked, unrecorded = _compare(checkpoint, manifest, errors, deep=deep, jobs=jobs, progress=progress)
    _refuse_unread(errors)
    return VerifyReport(
        location=checkpoint.location,
        tag=checkpoint.tag,
        deep=deep,
        files=len(checkpoint.files),
        nbytes=checkpoint.nbytes,
        tensors=sum(1 for _ in checkpoint.states()),
        records_checked=checked,
        records_unrecorded=unrecorded,
        unplaced=unplaced_files(checkpoint) if manifest is None else (),
        findings=_findings(errors),
        notes=checkpoint.remarks,
    )


def _refuse_unread(errors: Sequence[CkptError]) -> None:
    """Raise the first error if each is about a file that could not be read: no error shows damage."""
    if errors and all(map(is_unread, errors)):
        raise errors[0]


def _findings(errors: Sequence[CkptError]) -> tuple[Finding, ...]:
    return tuple(dict.fromkeys(Finding(e.path, e.problem, e.hint, e.options) for e in errors))


def _manifest(checkpoint: Checkpoint, errors: list[CkptError]) -> Manifest | None:
    """Return the checkpoint's manifest, or None; compare it with the sizes of the files, and add errors."""
    manifest: Manifest | None = None
    try:
        storage = connect(checkpoint.storage)
        manifest = find_manifest(storage, checkpoint.location)
        if manifest is not None:
            errors += size_problems(storage, checkpoint.location, manifest)
    except CkptError as error:
        errors.append(error)
    return manifest


def _compare(
    checkpoint: Checkpoint,
    manifest: Manifest | None,
    errors: list[CkptError],
    *,
    deep: bool,
    jobs: int | None,
    progress: Progress | None,
) -> tuple[int, int]:
    """Compare values and checksums; add errors, and return (checksums compared, records without one)."""
    checks = full_checks(checkpoint) if deep else sample_checks(checkpoint)
    # Weights and their copies are read again for the comparison of both.
    read, again = checkpoint.nbytes if deep else 0, checks.nbytes
    meter = Meter(read + again, progress, shown=read or again)
    checked = unrecorded = 0
    workers = jobs or default_jobs(remote=checkpoint.storage.remote)
    if deep:
        found, checked, unrecorded = _deep(checkpoint, manifest.files if manifest else {}, workers, meter)
        errors += found
    try:
        failed = failed_checks(checks, advance=meter, jobs=workers if deep else 1)
        # Unknown names of masters are not damage.
        errors += (e for e in failed if not isinstance(e, PlanError))
    except CkptError as error:
        errors.append(error)
    return checked, unrecorded


def unplaced_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the files that identify neither their rank nor their parameter."""
    shards = any(file.kind == "shard" for file in checkpoint.files)
    return tuple(file.name for file in checkpoint.files if shards or file.kind in {"state", "swapped"})


def _floating(state: State) -> bool:
    return DTYPES[state.dtype].floating


def _deep(
    checkpoint: Checkpoint, manifest: Mapping[str, Checksums], jobs: int, advance: Advance
) -> tuple[list[CkptError], int, int]:
    """Check every file and every tensor; return (errors, checksums compared, records without one)."""
    errors: list[CkptError] = []
    checked = unrecorded = 0
    files = source_files(checkpoint)
    floats = [_Floats() for _ in files]
    window = max(PIECE_BYTES, REMOTE_BYTES // max(1, len(files)))
    for _, _, state in checkpoint.states():
        for row in _blocks(state) if _floating(state) else ():
            start, nbytes = int(row["offset"]), int(row["numel"]) * itemsize(state.dtype)
            floats[int(row["file"])].add(start, start + nbytes, state.dtype)
    with Sources(files) as sources:
        sums = (
            partial(
                _check_sums,
                sources,
                i,
                f,
                manifest.get(f.name) if f.directory is None else None,
                partial(_crc32_of, sources, i, floats[i], window),
                advance,
            )
            for i, f in enumerate(checkpoint.files)
        )
        for found, count, none in in_order(sums, jobs):
            errors += found
            checked += count
            unrecorded += none
        scans = (
            partial(_scan, checkpoint, sources, name, key, state)
            for name, key, state in checkpoint.states()
            if _floating(state) and not all(floats[int(row["file"])].finite for row in _blocks(state))
        )
        for found in in_order(scans, jobs):
            errors += found
    return errors, checked, unrecorded


def _blocks(state: State) -> NDArray[np.void]:
    """Return the contiguous blocks of a state in its files."""
    return np.concatenate([stored_blocks(s.extents, itemsize(s.dtype)) for s in (state, *state.mean_with)])


class _Floats:
    """The ranges of a file that contain floating-point numbers; notes whether all of them are finite."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int, str]] = []
        self._sorted = True
        self._nbytes = 0
        self._seen = 0
        self._finite = True

    def add(self, start: int, end: int, dtype: str) -> None:
        """Add a range."""
        self._nbytes += end - start
        if self._spans and self._spans[-1][1:] == (start, dtype):
            start = self._spans.pop()[0]
        self._sorted &= not self._spans or self._spans[-1][1] <= start
        self._spans.append((start, end, dtype))

    def see(self, at: int, piece: memoryview) -> None:
        """Search the bytes from ``at`` on."""
        if not self._sorted:
            self._spans.sort()
            self._sorted = True
        end, n = at + len(piece), bisect.bisect_right(self._spans, at, key=lambda span: span[1])
        while n < len(self._spans) and self._spans[n][0] < end:
            start, stop, dtype = self._spans[n]
            first, last, width = max(start, at), min(stop, end), itemsize(dtype)
            if (first - start) % width or (last - start) % width:
                self._finite = False
                return
            self._finite = self._finite and _is_finite(piece[first - at : last - at], dtype)
            self._seen += last - first
            n += 1

    @property
    def finite(self) -> bool:
        """True if every number was seen, and is finite."""
        return self._finite and self._seen == self._nbytes


_INFINITY = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F80 << 16, "F64": 0x7FF0 << 48}
"""Bits of positive infinity; the bits of positive NaN are larger numbers."""


def _is_finite(data: memoryview, dtype: str) -> bool:
    if not len(data) or dtype not in _INFINITY:
        return bool(np.isfinite(np.frombuffer(data, dtype=numpy_dtype(dtype))).all())
    # The largest as a signed number has the largest positive exponent; as an unsigned one, the largest negative.
    bits, width = np.frombuffer(data, dtype=f"i{itemsize(dtype)}"), 8 * itemsize(dtype)
    infinity, sign = _INFINITY[dtype], 1 << (width - 1)
    return bool(bits.max() < infinity and bits.view(f"u{width // 8}").max() < infinity | sign)


def _check_sums(
    sources: Sources,
    index: int,
    file: CheckpointFile,
    saved: Checksums | None,
    crc32_of: Callable[[Sequence[ByteRange]], list[int]],
    advance: Advance,
) -> tuple[list[CkptError], int, int]:
    try:
        reader = sources[index]
        bad = None
        if saved is not None and saved.nbytes == reader.nbytes:
            chunks = [ByteRange(*where) for where in cuts(0, saved.nbytes, saved.chunk_bytes)]
            differing = [
                where for where, crc, own in zip(chunks, crc32_of(chunks), saved.crcs, strict=True) if crc != own
            ]
            if not differing:
                advance(reader.nbytes)
                return [], len(saved.crcs), 0
            problem = f"bytes {differing[0].start:,} to {differing[0].end:,} differ from those saved"
            bad = CkptError(reader.path, problem, "restore the file from a copy")
        # The files of a DCP checkpoint contain an archive for each tensor; their records are known since it was opened.
        records = read_torch_file(reader).records if file.container == "torch" else file.records
        recorded = [r for r in records if r.crc_recorded]
        found: list[CkptError] = []
        for record, crc in zip(recorded, crc32_of([r.where for r in recorded]), strict=True):
            if crc != record.crc32:
                problem = (
                    f"record {record.name} has CRC-32 {crc:08x}, but {record.crc32:08x} was recorded when it was saved"
                )
                found.append(CkptError(reader.path, problem, "restore the file from a copy: its bytes have changed"))
        if bad is not None and not found:
            found.append(bad)  # the bytes between the records
    except CkptError as error:
        return [error], 0, 0
    advance(reader.nbytes)
    return found, len(recorded), len(records) - len(recorded) if records else 1


def _crc32_of(sources: Sources, index: int, floats: _Floats, window: int, ranges: Sequence[ByteRange]) -> list[int]:
    """Return the CRC-32 of each range of a file; note in the same pass whether its floats are finite."""
    sums = [0] * len(ranges)
    for n, at, piece in _pieces(sources, index, window, ranges):
        floats.see(at, piece)
        sums[n] = crc32(piece, sums[n])
    return sums


def _pieces(
    sources: Sources, index: int, window: int, ranges: Sequence[ByteRange]
) -> Iterator[tuple[int, int, memoryview]]:
    """Yield the bytes of ranges of a file in pieces, each with the number of its range and its first byte.

    A piece is valid until the next. Remote files are read ``window`` bytes at once.
    """
    cut = (
        (n, at, min(at + PIECE_BYTES, end))
        for n, (start, end) in enumerate(ranges)
        for at in range(start, end, PIECE_BYTES)
    )
    if not sources.remote:
        reader, buffer = sources[index], ReadBuffer()
        for n, at, stop in cut:
            yield n, at, buffer.read_bytes(reader, at, stop - at)
        return
    for batch in _batches(cut, window):
        found = sources.fetch([(index, at, stop) for _, at, stop in batch], hashed=False)
        for (n, at, _), piece in zip(batch, found, strict=True):
            yield n, at, piece


def _batches(cut: Iterable[tuple[int, int, int]], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """Yield the pieces (range, start, end) in lists of at most so many bytes."""
    batch: list[tuple[int, int, int]] = []
    nbytes = 0
    for piece in cut:
        if batch and nbytes + piece[2] - piece[1] > most:
            yield batch
            batch, nbytes = [], 0
        batch.append(piece)
        nbytes += piece[2] - piece[1]
    if batch:
        yield batch


def _scan(checkpoint: Checkpoint, sources: Sources, name: str, key: str, state: State) -> list[CkptError]:
    """Count NaN and infinity in one state of one parameter, for each file that contains a part of it."""
    counts: dict[int, list[int]] = {}
    buffer = ReadBuffer()
    for row in _blocks(state):
        file = int(row["file"])
        try:
            for values in _chunks(buffer, sources[file], int(row["offset"]), int(row["numel"]), state.dtype):
                # A finite sum has only finite terms; most chunks need only the sum.
                with np.errstate(all="ignore"):
                    if np.isfinite(values.sum(dtype=np.float64)):
                        continue
                    count = counts.setdefault(file, [0, 0])
                    count[0] += int(np.isnan(values).sum())
                    count[1] += int(np.isinf(values).sum())
        except CkptError as error:
            return [error]
    what = name if key == "buffer" else f"{key} of {name}"
    return [
        CkptError(
            checkpoint.path(file),
            f"{what} has {nan:,} NaN and {inf:,} infinite values",
            f"training had diverged{', or the model sets them' * (key == 'buffer')}: go back to an earlier checkpoint",
        )
        for file, (nan, inf) in counts.items()
        if nan or (inf and key != "buffer")  # attention masks contain -inf
    ]


def _chunks(
    buffer: ReadBuffer, reader: Reader, start: int, numel: int, dtype: str
) -> Iterator[np.ndarray[Any, np.dtype[Any]]]:
    step = CHUNK_BYTES // itemsize(dtype)
    for first in range(0, numel, step):
        yield buffer.read(reader, start + first * itemsize(dtype), min(step, numel - first), dtype)
