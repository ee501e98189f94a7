"""``cp``: copy a checkpoint to another storage."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.api._run import Run, Written, WrittenFile
from ckpttool.api.options import Options
from ckpttool.arguments import checked_path
from ckpttool.blocks import Line, Shown
from ckpttool.errors import LayoutError, StorageError
from ckpttool.execution.destination import Destination
from ckpttool.execution.permissions import mode_of, mode_of_directory, mode_of_file
from ckpttool.formats import Opening, Source, open_checkpoint, source_paths
from ckpttool.registry import with_options
from ckpttool.storage import connect
from ckpttool.units import format_size

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from ckpttool.blocks import Block
    from ckpttool.execution.checks import Check
    from ckpttool.model import Checkpoint
    from ckpttool.units import Progress


ATTEMPTS = 100
"""Most attempts to write ``latest`` while other processes write it."""


@dataclass(frozen=True, slots=True)
class CpReport(Shown):
    """Result of ``cp``."""

    written: Written
    """The copy, and the sidecar files in its root; ``there`` if only these and ``latest`` were written."""
    src: str
    """Directory of the checkpoint."""
    tag: str
    """Its name."""
    latest: bool
    """Whether the root's ``latest`` names the copy now."""
    notes: tuple[str, ...]
    """Remarks on the checkpoint, and files that were left out."""

    def blocks(self) -> Iterator[Block]:
        """Yield the size of the copy and its notes."""
        written = self.written
        verb = "was there already, with the same bytes:" if written.there else "copied"
        yield Line(
            f"{written.out}: {verb} {len(written.files)} files, {format_size(written.nbytes_written)} in "
            f"{written.seconds:.1f} s{', latest names it' if self.latest else ''}"
        )
        yield from written.remarks(self.notes)


@with_options
def cp(  # noqa: PLR0913  public API
    src: Source,
    out: str | os.PathLike[str],
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
    follow_links: bool = False,
) -> CpReport:
    """Copy a whole checkpoint from one storage to another; ``latest`` is written last.

    Args:
        src: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``; a
            universal checkpoint; a directory of ``torch.distributed.checkpoint``; safetensors, or ``torch.save`` files
            of weights. Several directories if each contains the files of some ranks (node-local storage). Several
            directories become one.
        out: The root that gets a directory of the same tag and the sidecar files; for a format without tags, the
            directory itself.
        prove: Digest the checkpoint and the copy, and commit only if they are equal.

    Raises:
        ArgumentError: An argument is outside its range.
        CkptError: The checkpoint is not whole, or the copy cannot be written or differs.
    """
    opening = Opening(storage_options, follow_links)
    options = Options(
        tag=tag,
        jobs=jobs,
        memory=memory,
        progress=progress,
        check=check,
        prove=prove,
        resume=resume,
        overwrite=None,
        trust_names=trust_names,
        opening=opening,
    )
    return _cp(src, checked_path("out", out), options)


def _cp(src: Source, out: str, options: Options) -> CpReport:
    from ckpttool.catalog import copy_plan
    from ckpttool.catalog.cleanup import remove_left_over_files

    checkpoint = options.open(src)
    root = Destination(out, options.opening.storage_options)
    tagged = copy_plan.is_tagged(checkpoint)
    below = checkpoint.tag if tagged else copy_plan.below_run(checkpoint, source_paths(src)[0])
    mode = mode_of_directory(connect(checkpoint.storage), checkpoint.root) if below else 0
    run = Run(root.within(below, mode) if below else root, options)
    run.destination.check_apart(checkpoint)
    copy_plan.check_outside(checkpoint, root.storage, root.out)
    plan = copy_plan.plan_copy(checkpoint)
    sidecars = (
        copy_plan.root_sidecars(checkpoint, root.storage, root.out)
        if tagged
        else copy_plan.step_sidecars(checkpoint, below)
    )
    # A run that was killed after its commit has only ``latest`` left to write.
    verify = partial(_check_copy, checkpoint, options=options)
    written = run.write(plan, checkpoint, last=copy_plan.INDICES, verify=verify, may_be_there=True)
    remove_left_over_files(root.storage, root.out, ())
    for name, data in sidecars.sidecars.items():
        root.put(name, data, sidecars.modes.get(name, 0o666))
    notes = [*map(str, checkpoint.notes), *checkpoint.remarks, *sidecars.notes]
    newest = tagged and _put_latest(checkpoint, root, options)
    if tagged and not newest:
        notes.append(f"{copy_plan.latest_name(checkpoint)} names a newer one there: left as it is")
    beside = {name: len(data) for name, data in sidecars.sidecars.items()}
    if newest:
        beside[copy_plan.latest_name(checkpoint)] = len(checkpoint.tag.encode())
    files = (*written.files, *(WrittenFile(name, nbytes) for name, nbytes in beside.items()))
    return CpReport(
        written=replace(written, files=files, nbytes_written=written.nbytes_written + sum(beside.values())),
        src=checkpoint.location,
        tag=checkpoint.tag,
        latest=newest,
        notes=tuple(notes),
    )


def _check_copy(checkpoint: Checkpoint, directory: str, *, options: Options) -> str | None:
    """Compare a copy with its source; returns the digest of the weights with ``prove``.

    Raises:
        LayoutError: It lacks files, or its values differ.
    """
    copy = open_checkpoint(directory, opening=options.opening, unfinished=True, trust_names=options.trust_names)
    if sorted((f.name, f.nbytes) for f in copy.files) != sorted((f.name, f.nbytes) for f in checkpoint.files):
        raise LayoutError(directory, f"does not hold the files of {checkpoint.location}", "try again")
    if not options.prove:
        return None
    from ckpttool.analysis.digest import same_digest

    return same_digest(checkpoint, copy, directory, options.jobs)


def _put_latest(checkpoint: Checkpoint, root: Destination, options: Options) -> bool:
    """Write the root's ``latest``, unless it names a newer checkpoint; returns whether it was written.

    Raises:
        StorageError: The file cannot be written, or other processes keep writing it.
    """
    from ckpttool.catalog import copy_plan

    name = copy_plan.latest_name(checkpoint)
    path = posixpath.join(root.out, name)
    latest = posixpath.join(checkpoint.root, name)
    source = connect(checkpoint.storage)
    mode = mode_of_file(source, latest) if source.exists(latest) else mode_of(checkpoint)
    for _ in range(ATTEMPTS):
        root.storage.refresh([])
        held = next((e for e in root.storage.listing(root.out) if e.name == name and not e.is_dir), None)
        if held is not None and not copy_plan.is_newest(checkpoint, root.storage, root.out, options.opening):
            return False
        over = None if held is None else held.version
        if root.storage.put_new(path, checkpoint.tag.encode(), over=over, mode=mode):
            return True
    raise StorageError(path, "is written by other processes all the time", "run cp again")
