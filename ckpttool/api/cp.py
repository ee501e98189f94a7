"""``cp``: a checkpoint from one storage to another."""

from __future__ import annotations

import os
import posixpath
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.errors import LayoutError
from ckpttool.execution.output.destination import Destination
from ckpttool.execution.permissions import mode_of, mode_of_directory, mode_of_file
from ckpttool.execution.read_checks import checks_for
from ckpttool.execution.streaming import memory_bytes
from ckpttool.formats import Source, open_checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.execution.read_checks import Check, ReadReport
    from ckpttool.units import Progress


@dataclass(frozen=True, slots=True)
class TransferReport:
    """A checkpoint that was copied."""

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
    """Digest of the weights, if it was asked for: the same of the checkpoint and of the copy."""
    notes: tuple[str, ...]
    """What was noticed about the checkpoint, and what was left out."""
    checks: ReadReport | None = None
    """What was compared with recorded checksums; None if nothing was copied, or to no check."""


def cp(
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
    """Copy a whole checkpoint from one storage to another; ``latest`` is written when all of it is there.

    Args:
        src: As for ``inspect``. Several directories become one.
        dst: The root that gets a directory of the same tag, and the small files beside it; for a format without tags,
            the directory itself.
        tag: As for ``inspect``.
        prove: Digest the checkpoint and the copy, and commit only if they are the same.
        check: As for ``consolidate``.
        resume: As for ``convert``.
        jobs: As for ``consolidate``.
        memory: As for ``convert``.
        progress: Called with (bytes done, bytes in all).
        trust_names: As for ``inspect``.
        storage_options: What to tell the fsspec class of URLs: keys, an endpoint, ... Default: what it finds itself.

    Raises:
        CkptError: The checkpoint is not whole, or the copy cannot be written or differs.
    """
    from ckpttool.api._digests import are_same, same_digest
    from ckpttool.catalog import copies

    began = time.perf_counter()
    checkpoint = open_checkpoint(src, tag=tag, options=storage_options, trust_names=trust_names)
    root = Destination(os.fspath(dst), storage_options)
    tagged = copies.is_tagged(checkpoint)
    target = root.within(checkpoint.tag, mode_of_directory(checkpoint.storage, checkpoint.root)) if tagged else root
    target.check_apart(checkpoint)
    plan = copies.plan_copy(checkpoint)
    # A run that was killed after all of it was committed has left but latest to be written.
    there = copies.is_there(target.storage, target.out, plan) and are_same(
        checkpoint, open_checkpoint(target.out, options=storage_options, trust_names=trust_names), jobs
    )
    if not there:
        target.check_target(overwrite=None)
    around = copies.beside(checkpoint, root.storage, root.out)
    digested: str | None = None

    checks = checks_for(plan.sources, checkpoint, check)

    def check_copy(directory: str) -> None:
        nonlocal digested
        copy = open_checkpoint(directory, options=storage_options, unfinished=True, trust_names=trust_names)
        if sorted((f.name, f.nbytes) for f in copy.files) != sorted((f.name, f.nbytes) for f in checkpoint.files):
            raise LayoutError(directory, f"does not hold the files of {checkpoint.location}", "try again")
        if prove:
            digested = same_digest(checkpoint, copy, directory, jobs)

    if there:
        check_copy(target.out)
    else:
        target.write(
            plan, last=copies.INDICES, jobs=jobs, memory=memory_bytes(memory), progress=progress,
            check=check_copy, resume=resume, checks=checks,
        )  # fmt: skip
    for name, data in around.carried.items():
        root.put(name, data, around.modes.get(name, 0o666))
    notes = [*map(str, checkpoint.notes), *around.notes]
    if there:
        notes.append(f"{target.out} was there already, with the same values")
    newest, name = False, copies.latest_name(checkpoint)
    if tagged:
        newest = copies.is_newest(checkpoint, root.storage, root.out, storage_options)
        if newest:
            latest = posixpath.join(checkpoint.root, name)
            there_too = checkpoint.storage.exists(latest)
            mode = mode_of_file(checkpoint.storage, latest) if there_too else mode_of(checkpoint)
            root.put(name, checkpoint.tag.encode(), mode)
        else:
            notes.append(f"{name} names a newer one there: left as it is")
    return TransferReport(
        src=checkpoint.location,
        out=target.out,
        tag=checkpoint.tag,
        files=len(plan.files) + len(around.carried) + newest,
        nbytes=plan.nbytes_written,
        seconds=time.perf_counter() - began,
        latest=newest,
        digest=digested,
        notes=tuple(notes),
        checks=None if there or checks is None else checks.report,
    )
