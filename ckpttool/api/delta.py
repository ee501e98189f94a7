"""``delta``: what changed between two checkpoints, as one file."""

from __future__ import annotations

import posixpath
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.api._common import check_prove, open_each
from ckpttool.api._deltas import after, check_digest, digest_of_typed, open_result
from ckpttool.api.consolidate import WrittenFile
from ckpttool.api.options import Options
from ckpttool.arguments import check_choice, checked_path
from ckpttool.dtypes import SHORT_NAMES, TRAINING_DTYPES
from ckpttool.errors import ArgumentError
from ckpttool.execution.output.destination import Destination
from ckpttool.formats.delta import FILE, open_delta
from ckpttool.model import CheckpointFile
from ckpttool.model.derived.average import place_of
from ckpttool.model.derived.delta import DeltaHeader, End
from ckpttool.storage import LOCAL
from ckpttool.storage.spool import Spool
from ckpttool.targets.delta import main_dtype, plan_delta, typed_pair
from ckpttool.units import Meter

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from ckpttool.analysis.delta import Comparison
    from ckpttool.execution.read_checks import Check, ReadReport
    from ckpttool.formats import Source
    from ckpttool.model import Checkpoint
    from ckpttool.model.derived.delta import TypedState
    from ckpttool.units import Progress


@dataclass(frozen=True, slots=True)
class DeltaReport:
    """Result of ``delta``: the file written, or what a dry run found."""

    out: str
    """The output directory."""
    a: str
    """The checkpoint that the delta begins at."""
    b: str
    """The checkpoint that it ends at."""
    dry_run: bool
    """True if nothing was written."""
    dtype: str
    """Type of most values: "fp32", "bf16" or "fp16"."""
    files: tuple[WrittenFile, ...]
    """The file; empty for a dry run."""
    tensors: int
    """Tensors of b; tied tensors count once."""
    changed_tensors: int
    """Tensors of b that differ from a."""
    whole_tensors: int
    """Of these, tensors that are stored whole, as that takes fewer bytes than indices and values."""
    added: tuple[str, ...]
    """Tensors of b that a lacks, or has in another shape or kind of type; stored whole."""
    removed: tuple[str, ...]
    """Tensors of a that b lacks, or has in another shape or kind of type."""
    elements: int
    """Elements of b."""
    changed: int
    """Elements of b with other bits than in a, those of new tensors included."""
    nbytes_payload: int
    """Bytes of indices and values."""
    nbytes_read: int
    """Bytes of tensors read from both checkpoints."""
    nbytes_written: int
    """Bytes of the file; 0 for a dry run."""
    seconds: float
    """Wall time."""
    begins: str
    """Fingerprint of a in the delta's types."""
    ends: str
    """Fingerprint of b in the delta's types."""
    overflowed: int
    """Finite values of b that became infinite in their type."""
    notes: tuple[str, ...]
    """Remarks on the checkpoints."""
    digest: str | None = None
    """With ``prove``, the digest of b's weights, equal for b and the delta applied to a."""
    checks: tuple[ReadReport, ...] = ()
    """Comparisons with recorded checksums, of a and b; empty for ``check="off"``."""


def delta(  # noqa: PLR0913  public API
    a: Source,
    b: Source,
    out: str | os.PathLike[str],
    *,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    tag_a: str | None = None,
    tag_b: str | None = None,
    prove: bool = False,
    check: Check = "read",
    dry_run: bool = False,
    overwrite: bool = False,
    jobs: int | None = None,
    memory: int | str | None = None,
    progress: Progress | None = None,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> DeltaReport:
    """Write what changed between two checkpoints, as indices and new values; the output appears whole or not at all.

    Both are read once, in small parts, and compared bit for bit in the types of the delta. Weights are the fp32 master
    weights where a checkpoint has them, cast to ``dtype``. The weights of ``apply(a, [out])`` are those of ``b``.

    Args:
        a: The checkpoint to begin at, as for ``inspect``.
        b: The checkpoint to end at, of any other format, stage and number of ranks.
        out: Directory to write: it holds ``delta.safetensors``.
        dtype: Type of the parameters; buffers keep theirs. Default: trained parameters in the type that the module of
            ``b`` computes in, all others as they are stored.
        tag_a: Which checkpoint of a.
        tag_b: Which checkpoint of b.
        prove: Record the digest of ``b``, apply the delta to ``a`` without writing the result, and commit only if the
            result has that digest. ``apply`` compares it too.
        check: As for ``consolidate``.
        dry_run: Compare, but write nothing.
        overwrite: As for ``consolidate``.
        jobs: As for ``consolidate``.
        memory: As for ``consolidate``.
        progress: Called with (bytes done, bytes in all).
        trust_names: As for ``inspect``.
        storage_options: As for ``inspect``, for both checkpoints and ``out``.

    Raises:
        CkptError: A wrong argument, a checkpoint that is not sound, no common tensor, or ``out`` not writable.
    """
    options = Options(
        jobs=jobs, memory=memory, progress=progress, check=check, prove=prove, dry_run=dry_run, overwrite=overwrite,
        trust_names=trust_names, storage_options=storage_options,
    )  # fmt: skip
    if dtype is not None:
        check_choice("dtype", dtype, tuple(TRAINING_DTYPES))
    return _delta((a, tag_a), (b, tag_b), checked_path("out", out), dtype, options)


def _delta(
    a: tuple[Source, str | None], b: tuple[Source, str | None], out: str, dtype: str | None, options: Options
) -> DeltaReport:
    from ckpttool.analysis.delta import Compared

    began = time.perf_counter()
    if options.prove and options.dry_run:
        raise ArgumentError("prove", "needs the output that dry_run=True does not write", "leave out one", ("dry_run",))
    destination = Destination(out, options.storage_options)
    check_prove(destination, options)
    first, second = (open_each(destination, [src], replace(options, tag=tag))[0] for src, tag in (a, b))
    tensors = typed_pair(first, second, None if dtype is None else TRAINING_DTYPES[dtype])
    meter = Meter(sum(t.state.nbytes for side in tensors for t in side.values()), options.progress)
    compared = Compared(first, second, options.check)
    digest, plan = None, None
    with nullcontext() if options.dry_run else Spool(destination.scratch_directory) as spool:
        found = compared.compare(*tensors, spool, jobs=options.jobs, advance=meter)
        if options.prove:
            digest = digest_of_typed(second, tensors[1], options.jobs)
        header = _header((first, second), tensors, found, digest)
        if spool is not None:
            plan = plan_delta(second, tensors[1], found.changes, _spooled(spool), header)
            checks = options.read_checks(plan.sources, second)
            work = after(meter, options).run_options(checks)
            destination.write(plan, work, last=(FILE,), check=_proof(first, tensors[0], options), resume=None)
    whole = [c for c in found.changes if c.indices is None]
    return DeltaReport(
        out=destination.out,
        a=place_of(first),
        b=place_of(second),
        dry_run=options.dry_run,
        dtype=SHORT_NAMES[header.dtype],
        files=() if plan is None else tuple(WrittenFile(f.name, f.nbytes) for f in plan.files),
        tensors=len(tensors[1]),
        changed_tensors=len(found.changes),
        whole_tensors=len(whole),
        added=tuple(n for n in tensors[1] if n not in tensors[0] or n in header.removed),
        removed=tuple(header.removed),
        elements=sum(t.state.numel for t in tensors[1].values()),
        changed=header.changed,
        nbytes_payload=_payload(found, tensors[1]),
        nbytes_read=meter.total,
        nbytes_written=0 if plan is None else plan.nbytes_written,
        seconds=time.perf_counter() - began,
        begins=found.begins,
        ends=found.ends,
        overflowed=found.overflowed,
        notes=tuple(
            n for c in (first, second) for n in (*map(str, c.notes), *(f"{place_of(c)}: {r}" for r in c.remarks))
        ),
        digest=digest,
        checks=tuple(c.report for c in compared.checks if c is not None),
    )


def _header(
    ends: tuple[Checkpoint, Checkpoint],
    tensors: tuple[Mapping[str, TypedState], Mapping[str, TypedState]],
    found: Comparison,
    digest: str | None,
) -> DeltaHeader:
    first, second = tensors
    return DeltaHeader(
        begins=End(found.begins, None, ends[0].step),
        ends=End(found.ends, digest, ends[1].step),
        dtype=main_dtype(second),
        tensors={n: t.type for n, t in second.items()},
        removed={n: t.type for n, t in first.items() if n not in second or second[n].type != t.type},
        aliases=dict(ends[1].aliases),
        changed=sum(c.changed for c in found.changes),
    )


def _payload(found: Comparison, tensors: Mapping[str, TypedState]) -> int:
    """Return the bytes of indices and values, and of tensors that are stored whole."""
    total = 0
    for change in found.changes:
        if change.indices is not None and change.values is not None:
            total += change.indices.nbytes + change.values.nbytes
        else:
            state, dtype = tensors[change.name]
            total += replace(state, dtype=dtype).nbytes
    return total


def _spooled(spool: Spool) -> CheckpointFile:
    """Return the spool as a file of a checkpoint."""
    directory, name = posixpath.split(spool.path)
    with LOCAL.open(spool.path) as reader:
        return CheckpointFile(
            name, reader.nbytes, "weights", None, reader.version, container="raw", directory=directory,
            storage=LOCAL.spec,
        )  # fmt: skip


def _proof(a: Checkpoint, tensors: Mapping[str, TypedState], options: Options) -> Callable[[str], None]:
    """Return the check of the written delta before the commit."""

    def check_written(directory: str) -> None:
        if options.prove:
            written = open_delta(directory, options.storage_options, unfinished=True)
            states = {n: t.state for n, t in tensors.items()}
            check_digest(open_result(replace(a, aliases={}), states, [written]), written, options.jobs)

    return check_written
