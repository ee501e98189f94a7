"""Is a checkpoint whole and sound? Every finding, not only the first."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.checksums import crc32, cuts
from ckpttool.commit.manifest import is_commit, read_manifest, size_problems
from ckpttool.concurrency import default_jobs, in_threads
from ckpttool.containers.torch_file import read_torch_file
from ckpttool.dtypes import DTYPES, itemsize
from ckpttool.errors import CkptError, PlanError
from ckpttool.execution.check_copies import failed_proofs
from ckpttool.execution.sources import Scratch, Sources
from ckpttool.formats import open_checkpoint
from ckpttool.model import stored_blocks
from ckpttool.plan.copy_checks import full_checks, sample_checks, source_files
from ckpttool.storage import without_secrets
from ckpttool.units import Meter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckpttool.checksums import Checksums, Record
    from ckpttool.commit.manifest import Manifest
    from ckpttool.model import Checkpoint, State
    from ckpttool.plan import ConsistencyChecks
    from ckpttool.storage import Reader
    from ckpttool.units import Advance, Progress

CHUNK_BYTES = 1 << 22
"""Bytes looked at in one go."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong."""

    path: str
    """File or directory."""
    problem: str
    """What is wrong, with the tensor where there is one."""
    hint: str
    """What to do next."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What verifying found out."""

    location: str
    """Directory of the tag."""
    tag: str | None
    """Its name; None if not even that could be found."""
    deep: bool
    """Whether every byte was looked at."""
    files: int
    """Files read."""
    nbytes: int
    """Their size."""
    tensors: int
    """States of parameters, and buffers, whose place was checked."""
    records_checked: int
    """CRC-32 that were computed and compared: of the chunks in a manifest, or else of records."""
    records_unrecorded: int
    """Records for which no CRC-32 is recorded: those of zero checksum, and all of legacy files (counted as one)."""
    unplaced: tuple[str, ...]
    """Files in which nothing tells whose they are, where no manifest lies beside them: if two that hold tensors of one
    shape were swapped, nobody would notice. NVMe swap files, states of a universal checkpoint, distributed files."""
    findings: tuple[Finding, ...]
    """Everything that is wrong; empty if nothing is."""


def verify_checkpoint(
    src: Sequence[str],
    *,
    tag: str | None,
    deep: bool,
    jobs: int | None,
    progress: Progress | None,
    options: Mapping[str, Any] | None = None,
    trust_names: bool = False,
    key: bytes | None = None,
) -> VerifyReport:
    """Check that every rank's file is there, whole and in agreement with the others.

    Args:
        src: As for ``open_checkpoint``.
        tag: As for ``open_checkpoint``.
        deep: Also compare every recorded CRC-32, look for NaN and infinity, and compare each 16-bit copy with the cast
            of its master, element by element. Without it, only samples of the latter.
        jobs: Threads; None for one for each core, up to MAX_JOBS.
        progress: Told how far it is.
        options: As for ``open_checkpoint``.
        trust_names: As for ``open_checkpoint``.
        key: The manifest must be signed with it; reads every byte and compares the SHA-256, as ``deep`` does CRC-32.
    """
    deep = deep or key is not None
    errors: list[CkptError] = []
    checkpoint: Checkpoint | None = None
    try:
        checkpoint = open_checkpoint(src, tag=tag, options=options, report=errors.append, trust_names=trust_names)
    except CkptError as error:
        if error not in errors:
            errors.append(error)
    checked = unrecorded = 0
    manifest: Manifest | None = None
    if checkpoint is not None:
        errors += checkpoint.notes
        try:
            if key is not None and not is_commit(checkpoint.storage, checkpoint.location):
                problem = "has no manifest, so that nobody has signed it"
                errors.append(PlanError(checkpoint.location, problem, "do not load it"))
            elif is_commit(checkpoint.storage, checkpoint.location):
                manifest = read_manifest(checkpoint.storage, checkpoint.location, key)
                errors += size_problems(checkpoint.storage, checkpoint.location, manifest)
        except CkptError as error:
            errors.append(error)
        proofs = full_checks(checkpoint) if deep else sample_checks(checkpoint)
        meter = Meter(_bytes_to_read(checkpoint, proofs, deep=deep), progress)
        if deep:
            workers = jobs or default_jobs(distant=checkpoint.storage.distant)
            found, checked, unrecorded = _deep(checkpoint, manifest.files if manifest else {}, workers, meter)
            errors += found
        try:
            errors += failed_proofs(proofs, advance=meter)
        except CkptError as error:
            errors.append(error)
    return VerifyReport(
        location=checkpoint.location if checkpoint else without_secrets(src[0]),
        tag=checkpoint.tag if checkpoint else None,
        deep=deep,
        files=len(checkpoint.files) if checkpoint else 0,
        nbytes=checkpoint.nbytes if checkpoint else 0,
        tensors=sum(1 for _ in checkpoint.states()) if checkpoint else 0,
        records_checked=checked,
        records_unrecorded=unrecorded,
        unplaced=_unplaced(checkpoint) if checkpoint and manifest is None else (),
        findings=tuple(dict.fromkeys(Finding(e.path, e.problem, e.hint) for e in errors)),
    )


def _unplaced(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Files whose content says nothing of the rank or the parameter that they belong to."""
    shards = any(file.kind == "shard" for file in checkpoint.files)
    return tuple(file.name for file in checkpoint.files if shards or file.kind in {"state", "swapped"})


def _bytes_to_read(checkpoint: Checkpoint, proofs: ConsistencyChecks, *, deep: bool) -> int:
    """Bytes that will be looked at, those looked at twice counted twice."""
    if not deep:
        return proofs.nbytes
    return checkpoint.nbytes + proofs.nbytes + sum(s.nbytes for _, _, s in checkpoint.states() if _floating(s))


def _floating(state: State) -> bool:
    return DTYPES[state.dtype].floating


def _deep(
    checkpoint: Checkpoint, manifest: Mapping[str, Checksums], jobs: int, advance: Advance
) -> tuple[list[CkptError], int, int]:
    """Checksums of every file, then values of every tensor: (errors, checksums compared, records without one)."""
    errors: list[CkptError] = []
    checked = unrecorded = 0
    files = source_files(checkpoint)
    with Sources(files) as sources:
        sums = (
            partial(
                _check_sums, sources, i, f.container, manifest.get(f.name) if f.directory is None else None, advance
            )
            for i, f in enumerate(checkpoint.files)
        )
        with contextlib.closing(in_threads(sums, jobs)) as results:
            for found, count, none in results:
                errors += found
                checked += count
                unrecorded += none
        scans = (
            partial(_scan, checkpoint, sources, name, key, state, advance)
            for name, key, state in checkpoint.states()
            if _floating(state)
        )
        with contextlib.closing(in_threads(scans, jobs)) as results:
            for found in results:
                errors += found
    return errors, checked, unrecorded


def _check_sums(
    sources: Sources, index: int, container: str, saved: Checksums | None, advance: Advance
) -> tuple[list[CkptError], int, int]:
    try:
        reader = sources[index]
        bad = None
        if saved is not None and saved.nbytes == reader.nbytes and (bad := _check_chunks(reader, saved)) is None:
            advance(reader.nbytes)
            return [], len(saved.crcs), 0
        if container != "torch":
            advance(reader.nbytes)
            return [], 0, 1
        file = read_torch_file(reader)
        recorded = [r for r in file.records if r.crc_recorded]
        found = [error for record in recorded if (error := _check_sum(reader, record))]
        if bad is not None and not found:
            found.append(bad)  # between the records
    except CkptError as error:
        return [error], 0, 0
    advance(reader.nbytes)
    return found, len(recorded), len(file.records) - len(recorded) if file.records else 1


def _check_chunks(reader: Reader, saved: Checksums) -> CkptError | None:
    """Compare a file with what its manifest has; no byte of it is left out."""
    buffer = memoryview(bytearray(min(saved.chunk_bytes, max(saved.nbytes, 1))))
    for n, (start, end) in enumerate(cuts(0, saved.nbytes, saved.chunk_bytes)):
        chunk = buffer[: end - start]
        reader.read_into(start, chunk)
        changed = crc32(chunk) != saved.crcs[n]
        if changed or (saved.sha256 and hashlib.sha256(chunk).digest() != saved.sha256[n]):
            problem = f"bytes {start:,} to {end:,} are not what was saved"
            return CkptError(reader.path, problem, "restore the file from a copy")
    return None


def _check_sum(reader: Reader, record: Record) -> CkptError | None:
    crc = 0
    buffer = bytearray(min(CHUNK_BYTES, max(record.where.nbytes, 1)))
    at = record.where.start
    while at < record.where.end:
        chunk = memoryview(buffer)[: min(len(buffer), record.where.end - at)]
        reader.read_into(at, chunk)
        crc = crc32(chunk, crc)
        at += len(chunk)
    if crc == record.crc32:
        return None
    problem = f"record {record.name} has CRC-32 {crc:08x}, but {record.crc32:08x} was recorded when it was saved"
    return CkptError(reader.path, problem, "its bytes have changed since: restore the file from a copy")


def _scan(
    checkpoint: Checkpoint, sources: Sources, name: str, key: str, state: State, advance: Advance
) -> list[CkptError]:
    """Count what is not finite in one state of one parameter, for each file that holds some of it."""
    counts: dict[int, list[int]] = {}
    scratch = Scratch()
    blocks = [stored_blocks(s.extents, itemsize(s.dtype)) for s in (state, *state.mean_with)]
    for row in np.concatenate(blocks):
        file = int(row["file"])
        try:
            for values in _chunks(scratch, sources[file], int(row["offset"]), int(row["numel"]), state.dtype):
                advance(values.nbytes)
                # A sum that is finite has only finite terms; most chunks are settled by it.
                with np.errstate(all="ignore"):
                    if np.isfinite(values.sum(dtype=np.float64)):
                        continue
                    count = counts.setdefault(file, [0, 0])
                    count[0] += int(np.isnan(values).sum())
                    if key != "buffer":  # a mask of -inf is what it should be
                        count[1] += int(np.isinf(values).sum())
        except CkptError as error:
            return [error]
    what = name if key == "buffer" else f"{key} of {name}"
    return [
        CkptError(checkpoint.path(file), f"{what} has {nan:,} NaN and {inf:,} infinite values", "training had diverged")
        for file, (nan, inf) in counts.items()
        if nan or inf
    ]


def _chunks(
    scratch: Scratch, reader: Reader, start: int, numel: int, dtype: str
) -> Iterator[np.ndarray[Any, np.dtype[Any]]]:
    step = CHUNK_BYTES // itemsize(dtype)
    for first in range(0, numel, step):
        yield scratch.read(reader, start + first * itemsize(dtype), min(step, numel - first), dtype)
