"""``apply``: a checkpoint and deltas -> the weights that the last delta ends at."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckpttool.api._common import check_prove, open_for
from ckpttool.api._deltas import after, check_digest, open_result
from ckpttool.api.consolidate import WrittenFile
from ckpttool.api.options import Options
from ckpttool.arguments import checked_path, checked_size
from ckpttool.dtypes import SHORT_NAMES
from ckpttool.errors import ArgumentError, LayoutError
from ckpttool.execution.output.destination import Destination
from ckpttool.formats import Source, open_checkpoint
from ckpttool.formats.delta import open_delta
from ckpttool.formats.sidecars import find_sidecars
from ckpttool.model.derived.average import place_of, weights_of
from ckpttool.plan.copy_checks import sample_checks
from ckpttool.storage import connect
from ckpttool.targets.sidecars import with_sidecars
from ckpttool.targets.weights import Weight, WeightSelection
from ckpttool.units import Meter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.execution.forecast import Needs
    from ckpttool.execution.read_checks import Check, ReadReport
    from ckpttool.model import Checkpoint
    from ckpttool.model.derived.delta import Delta, Result
    from ckpttool.units import Progress


@dataclass(frozen=True, slots=True)
class ApplyReport:
    """Result of ``apply``: the files written, or planned by a dry run."""

    out: str
    """The output directory."""
    dry_run: bool
    """True if nothing was written."""
    a: str
    """The checkpoint that the first delta was applied to."""
    deltas: tuple[str, ...]
    """The deltas, in order."""
    step: int | None
    """Step that the last delta ends at; None if not recorded."""
    files: tuple[WrittenFile, ...]
    """Files of the output."""
    tensors: int
    """Tensors in them; tied tensors count once."""
    elements: int
    """Elements in them."""
    dtype: str
    """Type of most values: "fp32", "bf16" or "fp16"."""
    nbytes_read: int
    """Bytes of tensors of a, and of the deltas; each is read twice, to check and to write."""
    nbytes_written: int
    """Bytes of all files."""
    seconds: float
    """Wall time."""
    ends: str
    """Fingerprint of the result, as the last delta recorded it."""
    tied: Mapping[str, str]
    """Tied names: alias to the name the tensor is stored under."""
    companions: tuple[str, ...]
    """Sidecar files that were copied from a."""
    overflowed: int
    """Finite values of a that became infinite in their type."""
    notes: tuple[str, ...]
    """Remarks on the checkpoint."""
    digest: str | None = None
    """Digest of the result's weights, if the last delta recorded it or ``prove`` is set."""
    checks: ReadReport | None = None
    """Comparisons with recorded checksums; None for a dry run and for ``check="off"``."""
    needs: Needs | None = None
    """For a dry run, what the run needs."""


def apply(  # noqa: PLR0913  public API
    a: Source,
    deltas: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    max_shard_size: int | str = "5GB",
    prove: bool = False,
    check: Check = "read",
    dry_run: bool = False,
    overwrite: bool = False,
    jobs: int | None = None,
    memory: int | str | None = None,
    progress: Progress | None = None,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> ApplyReport:
    """Write the weights that deltas make of a checkpoint, as safetensors; they appear whole or not at all.

    Before anything is written, the weights of ``a`` are compared with those that the first delta begins at, each delta
    with the one before it, and the result with what the last delta ends at.

    Args:
        a: The checkpoint that the first delta begins at, as for ``inspect``: of any format, stage and number of ranks.
        deltas: Outputs of ``delta``, in order.
        out: Directory to write.
        tag: As for ``inspect``.
        max_shard_size: As for ``consolidate``.
        prove: Digest the result and the output, and commit only if they are equal.
        check: As for ``consolidate``.
        dry_run: Check, but write nothing; the report has what a run needs.
        overwrite: As for ``consolidate``.
        jobs: As for ``consolidate``.
        memory: As for ``consolidate``.
        progress: Called with (bytes done, bytes in all).
        trust_names: As for ``inspect``.
        storage_options: As for ``inspect``, for the checkpoint, the deltas and ``out``.

    Raises:
        CkptError: A wrong argument, a delta that begins elsewhere, files that are not sound, or ``out`` not writable.
    """
    options = Options(
        tag=tag, jobs=jobs, memory=memory, progress=progress, check=check, prove=prove, dry_run=dry_run,
        overwrite=overwrite, trust_names=trust_names, storage_options=storage_options,
    )  # fmt: skip
    paths = [deltas] if isinstance(deltas, str | os.PathLike) else list(deltas)
    if not paths:
        raise ArgumentError("deltas", "is empty", "name the deltas to apply")
    return _apply(a, paths, checked_path("out", out), checked_size("max_shard_size", max_shard_size), options)


def _apply(a: Source, paths: Sequence[str | os.PathLike[str]], out: str, limit: int, options: Options) -> ApplyReport:
    from ckpttool.targets.safetensors import INDEX, plan_safetensors

    began = time.perf_counter()
    destination = Destination(out, options.storage_options)
    check_prove(destination, options)
    base = open_for(destination, a, options)
    deltas = [open_delta(path, options.storage_options) for path in paths]
    for opened in deltas:
        destination.check_apart(opened.checkpoint)
    result, read, digest = _checked(base, deltas, options)
    header = deltas[-1].header
    selection = WeightSelection(
        tuple(Weight(n, step.state, step.start.dtype) for n, step in result.steps.items()), header.aliases
    )
    plan = plan_safetensors(
        result.checkpoint, selection, max_shard_bytes=limit, consistency=sample_checks(result.checkpoint)
    )
    companions = find_sidecars(connect(base.storage), base.root)
    plan = with_sidecars(plan, companions, header.dtype)
    checks = options.read_checks(plan.sources, result.checkpoint)
    work, needs, overflowed = after(read, options).run_options(checks), None, 0

    def check_written(directory: str) -> None:
        nonlocal digest
        if options.prove:
            from ckpttool.analysis.same_digests import same_weights

            written = open_checkpoint(directory, options=options.storage_options, unfinished=True)
            digest = same_weights(result.checkpoint, selection.states, written, options.jobs)

    if options.dry_run:
        needs = destination.forecast(plan, work, spent=time.perf_counter() - began)
    else:
        overflowed = destination.write(plan, work, last=(INDEX,), check=check_written, resume=None)
    return ApplyReport(
        out=destination.out,
        dry_run=options.dry_run,
        a=place_of(base),
        deltas=tuple(d.path for d in deltas),
        step=header.ends.step,
        files=tuple(WrittenFile(f.name, f.nbytes) for f in plan.files),
        tensors=len(selection.weights),
        elements=sum(w.state.numel for w in selection.weights),
        dtype=SHORT_NAMES[header.dtype],
        nbytes_read=read.total + sum(d.checkpoint.nbytes for d in deltas),
        nbytes_written=plan.nbytes_written,
        seconds=time.perf_counter() - began,
        ends=header.ends.fingerprint,
        tied=dict(selection.aliases),
        companions=tuple(c.name for c in companions),
        overflowed=overflowed,
        notes=(*map(str, base.notes), *base.remarks),
        digest=digest,
        # Files without checksums of their own were compared with the fingerprints.
        checks=None if options.dry_run or checks is None else replace(checks.report, without=()),
        needs=needs,
    )


def _checked(base: Checkpoint, deltas: Sequence[Delta], options: Options) -> tuple[Result, Meter, str | None]:
    """Check that each delta begins where the one before it ends, and return the result.

    Returns:
        The result; the meter of the bytes of the first checkpoint; the digest, if the last delta has one.

    Raises:
        LayoutError: A delta begins elsewhere, or is damaged.
    """
    from ckpttool.analysis.delta import fingerprints

    for before, behind in itertools.pairwise(deltas):
        if behind.header.begins.fingerprint != before.header.ends.fingerprint:
            problem = (
                f"does not begin where {before.path} ends{_steps(before.header.ends.step, behind.header.begins.step)}"
            )
            raise LayoutError(behind.path, problem, "name the deltas in order, and none twice")
    result = open_result(base, weights_of(base), deltas)
    meter = Meter(sum(t.state.nbytes for t in result.base.values()), options.progress)
    begins, ends = fingerprints(result, options.check, jobs=options.jobs, advance=meter)
    header = deltas[0].header
    if begins != header.begins.fingerprint:
        problem = f"holds other weights than {deltas[0].path} begins at{_steps(base.step, header.begins.step)}"
        raise LayoutError(place_of(base), problem, "apply the delta to the checkpoint that it was made from")
    last = deltas[-1]
    if ends != last.header.ends.fingerprint:
        problem = "leads to other weights than it records"
        raise LayoutError(last.path, problem, "it or a delta before it is damaged: make it again, or copy it again")
    return result, meter, check_digest(result, last, options.jobs)


def _steps(found: int | None, expected: int | None) -> str:
    if found is None or expected is None or found == expected:
        return ""
    return f" (step {found:,}, not {expected:,})"
