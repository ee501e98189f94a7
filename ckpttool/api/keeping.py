"""``ls``, ``pin``, ``unpin`` and ``prune``: list the checkpoints of a root, keep some and remove the others."""

from __future__ import annotations

import posixpath
import time
from typing import TYPE_CHECKING, Any

from ckpttool.arguments import checked_path
from ckpttool.errors import ArgumentError, PlanError, StorageError
from ckpttool.formats import Opening
from ckpttool.registry import carry_out, with_options
from ckpttool.storage import THINNING

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from ckpttool.catalog.listing import Catalog
    from ckpttool.catalog.retention import Decisions
    from ckpttool.commit.marks import Pin
    from ckpttool.formats import Source
    from ckpttool.storage import WritableStorage
    from ckpttool.units import Progress


@with_options
def ls(
    root: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> Catalog:
    """List the checkpoints in a directory, sorted by step, and whether each is whole.

    Raises:
        CkptError: The directory cannot be read, or contains no checkpoint.
    """
    from ckpttool.catalog.entries import catalog

    opening = Opening(storage_options, follow_links)
    return catalog(checked_path("root", root), opening=opening)


@with_options
def pin(
    src: Source,
    *,
    why: str,
    tag: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> Pin:
    """Pin a checkpoint: no rule of ``prune``, ``CheckpointManager`` or a trainer's rotation removes or thins it.

    The pin is a small file in its directory. It replaces an earlier pin, and is removed with the directory: a save that
    replaces the checkpoint removes it.

    Args:
        why: The reason, for people.

    Raises:
        CkptError: The checkpoint is missing or damaged, another process removes or thins it, the reason is empty, or
            the pin cannot be written.
    """
    from ckpttool.commit import read_mark
    from ckpttool.commit.marks import Pin, is_alive, write_pin
    from ckpttool.storage import BESIDE, PIN, is_half_removed, walk

    if not why.strip():
        raise ArgumentError("why", "is empty", "say why the checkpoint is to be kept")
    storage, directory = _find(src, tag, Opening(storage_options, follow_links))
    made = Pin(_who(), time.time(), why.strip(), directory)
    write_pin(storage, directory, made)
    storage.refresh([])
    there = storage.is_dir(directory) and any(name not in BESIDE for name, _ in walk(storage, directory))
    if not there or is_half_removed(storage, directory) or is_alive(read_mark(storage, directory, THINNING)):
        if storage.exists(path := posixpath.join(directory, PIN)):
            storage.delete([path])
        problem = "is removed or thinned by another process meanwhile, and is not pinned"
        raise StorageError(directory, problem, "list the checkpoints with ls, and pin one that is there")
    return made


@with_options
def unpin(
    src: Source,
    *,
    tag: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
) -> Pin:
    """Remove the pin of a checkpoint; return it.

    Raises:
        PlanError: The checkpoint is not pinned.
        CkptError: The checkpoint is missing, or the pin cannot be removed.
    """
    from ckpttool.commit.marks import find_pin
    from ckpttool.storage import PIN

    storage, directory = _find(src, tag, Opening(storage_options, follow_links))
    found = find_pin(storage, directory)
    if found is None:
        raise PlanError(directory, "is not pinned", "ls shows which checkpoints are")
    storage.delete([posixpath.join(directory, PIN)])
    return found


def _find(src: Source, tag: str | None, opening: Opening) -> tuple[WritableStorage, str]:
    """Return the storage and the directory of a checkpoint; a pinned directory need not be sound."""
    from ckpttool.formats import open_checkpoint, source_paths
    from ckpttool.storage import PIN, local_path, open_storage, without_credentials

    paths = source_paths(src)
    if len(paths) > 1:
        raise ArgumentError("src", "names several directories", "pass one of them")
    storage = open_storage(paths[0], opening.storage_options)
    path = without_credentials(local_path(paths[0])).rstrip("/") or paths[0]
    if tag is None and storage.is_dir(path) and storage.exists(posixpath.join(path, PIN)):
        return storage, path
    return storage, open_checkpoint(paths[0], tag=tag, opening=opening).location


def _who() -> str:
    """Return user and host."""
    import getpass
    import os
    import socket

    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container without an entry for the user
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


@with_options
def prune(  # noqa: PLR0913  public API
    root: str | os.PathLike[str],
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: str | None = None,
    keep_for: float | str | None = None,
    torn: bool = False,
    grace: float | str = "1h",
    dry_run: bool = False,
    jobs: int | None = None,
    memory: int | str | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
    **given: Any,
) -> Decisions:
    """Remove the checkpoints of a root that no rule keeps, or thin them: remove only their optimizer states.

    Only whole saves of runs are removed or thinned: of ZeRO, and distributed checkpoints of torch with an optimizer,
    also such as a framework has saved. It always keeps the newest of them, the one that ``latest`` names, those in the
    snapshot of a Ray Train run, and pinned ones. A thin checkpoint replaces a whole one when its weights have been read
    back and have the digest of the source. The next ``prune`` deletes the leftovers of a killed one.

    Args:
        keep_last: Number of newest checkpoints to keep.
        keep_every: Keep those whose step is a multiple of this.
        keep_best: Keep the one with the smallest value of this number in its client state ("loss", "eval.loss"); with
            the suffix ":max", the largest.
        keep_for: Keep those younger than this: seconds, or a text like "7d".
        torn: Remove incomplete and uncommitted checkpoints too, unless a save may still write them.
        grace: With ``torn``, the least age of their newest file: seconds, or a text like "1h".
        dry_run: Decide, but change nothing.
        progress: Called with (bytes of thin checkpoints written, bytes in all).

    Returns:
        A decision with its reason for each checkpoint, oldest first.

    Raises:
        ArgumentError: No rule is given, or one is malformed.
        CkptError: The directory cannot be read, or no checkpoint has the number; nothing was changed.
        PruneError: A checkpoint cannot be removed or thinned; the others were. Its ``decisions`` have the results.
    """
    opening = Opening(storage_options, follow_links)
    from ckpttool.api.options import Options
    from ckpttool.catalog.pruning import prune_root
    from ckpttool.catalog.retention import Rules

    (action,) = carry_out("prune", given) or (None,)
    rules = Rules(keep_last, keep_every, keep_best, keep_for, action, torn, grace)
    options = Options(jobs=jobs, memory=memory, opening=opening)
    where = checked_path("root", root)
    return prune_root(where, rules, opening, dry_run=dry_run, jobs=jobs, memory=options.memory_bytes, progress=progress)
