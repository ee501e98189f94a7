"""``cp``: copy a checkpoint to another storage."""

from __future__ import annotations

import posixpath
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.api.options import Options
from ckpttool.arguments import checked_path
from ckpttool.errors import LayoutError
from ckpttool.execution.output.destination import Destination
from ckpttool.execution.permissions import mode_of, mode_of_directory, mode_of_file
from ckpttool.formats import Source, open_checkpoint
from ckpttool.storage import connect

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from ckpttool.execution.read_checks import Check, ReadReport
    from ckpttool.model import Checkpoint
    from ckpttool.units import Progress


@dataclass(frozen=True, slots=True)
class TransferReport:
    """Result of ``cp``."""

    src: str
    """Its directory."""
    out: str
    """Directory of the copy."""
    tag: str
    """Its name."""
    files: int
    """Files copied."""
    nbytes: int
    """Their size in bytes."""
    seconds: float
    """Wall time."""
    latest: bool
    """Whether the root's ``latest`` names the copy now."""
    digest: str | None
    """With ``prove``, the digest of the weights, equal for source and copy."""
    notes: tuple[str, ...]
    """Remarks on the checkpoint, and files that were left out."""
    checks: ReadReport | None = None
    """Comparisons with recorded checksums; None if nothing was copied, and for ``check="off"``."""
    there: bool = False
    """Whether ``out`` held the copy already, byte for byte: only ``latest`` and sidecar files were written."""


def cp(  # noqa: PLR0913  public API
    src: Source,
    dst: str | os.PathLike[str],
    *,
    tag: str | None = None,
    prove: bool = False,
    check: Check = "read",
    resume: bool = False,
    jobs: int | None = None,
    memory: int | str | None = None,
    progress: Progress | None = None,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> TransferReport:
    """Copy a whole checkpoint from one storage to another; ``latest`` is written last.

    Args:
        src: As for ``inspect``. Several directories become one.
        dst: The root that gets a directory of the same tag and the sidecar files; for a format without tags, the
            directory itself.
        tag: As for ``inspect``.
        prove: Digest the checkpoint and the copy, and commit only if they are equal.
        check: As for ``consolidate``.
        resume: As for ``convert``.
        jobs: As for ``consolidate``.
        memory: As for ``consolidate``.
        progress: Called with (bytes done, bytes in all).
        trust_names: As for ``inspect``.
        storage_options: As for ``inspect``.

    Raises:
        ArgumentError: An argument is outside its range.
        CkptError: The checkpoint is not whole, or the copy cannot be written or differs.
    """
    options = Options(
        tag=tag, jobs=jobs, memory=memory, progress=progress, check=check, prove=prove, resume=resume,
        trust_names=trust_names, storage_options=storage_options,
    )  # fmt: skip
    return _cp(src, checked_path("dst", dst), options)


def _cp(src: Source, dst: str, options: Options) -> TransferReport:
    from ckpttool.catalog import copies
    from ckpttool.catalog.cleanup import remove_left_over_files

    began = time.perf_counter()
    checked_path("dst", dst)
    checkpoint = options.open(src)
    root = Destination(dst, options.storage_options)
    tagged = copies.is_tagged(checkpoint)
    target = (
        root.within(checkpoint.tag, mode_of_directory(connect(checkpoint.storage), checkpoint.root)) if tagged else root
    )
    target.check_apart(checkpoint)
    copies.check_outside(checkpoint, root.storage, root.out)
    plan = copies.plan_copy(checkpoint)
    checks = options.read_checks(plan.sources, checkpoint)
    work = options.run_options(checks)
    # A run that was killed after its commit has left only latest to write.
    there = target.holds_output(plan, work)
    if not there:
        target.check_target(overwrite=None)
    sidecars = copies.root_sidecars(checkpoint, root.storage, root.out)
    digest: str | None = None

    def check_copy(directory: str) -> None:
        nonlocal digest
        digest = _check_copy(checkpoint, directory, options)

    if there:
        check_copy(target.out)
    else:
        target.write(plan, work, last=copies.INDICES, check=check_copy, resume=options.resume)
    remove_left_over_files(root.storage, root.out, ())
    for name, data in sidecars.sidecars.items():
        root.put(name, data, sidecars.modes.get(name, 0o666))
    notes = [*map(str, checkpoint.notes), *sidecars.notes]
    newest = tagged and _put_latest(checkpoint, root, options)
    if tagged and not newest:
        notes.append(f"{copies.latest_name(checkpoint)} names a newer one there: left as it is")
    return TransferReport(
        src=checkpoint.location,
        out=target.out,
        tag=checkpoint.tag,
        files=len(plan.files) + len(sidecars.sidecars) + newest,
        nbytes=plan.nbytes_written,
        seconds=time.perf_counter() - began,
        latest=newest,
        digest=digest,
        notes=tuple(notes),
        checks=None if there or checks is None else checks.report,
        there=there,
    )


def _check_copy(checkpoint: Checkpoint, directory: str, options: Options) -> str | None:
    """Compare a copy with its source; returns the digest of the weights with ``prove``.

    Raises:
        LayoutError: It lacks files, or its values differ.
    """
    copy = open_checkpoint(directory, options=options.storage_options, unfinished=True, trust_names=options.trust_names)
    if sorted((f.name, f.nbytes) for f in copy.files) != sorted((f.name, f.nbytes) for f in checkpoint.files):
        raise LayoutError(directory, f"does not hold the files of {checkpoint.location}", "try again")
    if not options.prove:
        return None
    from ckpttool.analysis.same_digests import same_digest

    return same_digest(checkpoint, copy, directory, options.jobs)


def _put_latest(checkpoint: Checkpoint, root: Destination, options: Options) -> bool:
    """Write the root's ``latest``, unless it names a newer checkpoint; returns whether it was written."""
    from ckpttool.catalog import copies

    if not copies.is_newest(checkpoint, root.storage, root.out, options.storage_options):
        return False
    name = copies.latest_name(checkpoint)
    latest = posixpath.join(checkpoint.root, name)
    source = connect(checkpoint.storage)
    there = source.exists(latest)
    mode = mode_of_file(source, latest) if there else mode_of(checkpoint)
    root.put(name, checkpoint.tag.encode(), mode)
    return True
