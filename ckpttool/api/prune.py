"""``prune``: remove the checkpoints that no rule keeps."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ckpttool.errors import LayoutError, StorageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.catalog.retention import Decision
    from ckpttool.storage import WritableStorage


def prune(
    root: str | os.PathLike[str],
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: str | None = None,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> list[Decision]:
    """Remove the checkpoints of a root that no rule keeps.

    Only whole native ZeRO checkpoints are removed. The newest of them stays, and so do the one that ``latest`` names
    and those in the snapshot of a Ray Train run.

    Args:
        root: A checkpoint root, or a directory of a trainer's ``checkpoint-N``.
        keep_last: Keep so many of the newest.
        keep_every: Keep those whose step is a multiple of this.
        keep_best: Keep the one with the smallest value of this number in its client state ("loss", "eval.loss"); with
            ":max" behind it, the largest.
        dry_run: Decide, but remove nothing.
        storage_options: As for ``inspect``.

    Returns:
        A decision with its reason for each checkpoint, oldest first.

    Raises:
        ArgumentError: No rule is given, or one is malformed.
        CkptError: The directory cannot be read, no checkpoint has the number, or one cannot be removed.
    """
    from ckpttool.catalog.entries import catalog
    from ckpttool.catalog.retention import Rules, decide
    from ckpttool.storage import open_storage

    rules = Rules(keep_last, keep_every, keep_best)
    found = catalog(os.fspath(root), options=storage_options)
    if found.problems:
        hint = "repair or remove that file first: without it, prune could remove the wrong checkpoint"
        raise LayoutError(found.root, found.problems[0], hint)
    decisions = decide(found.entries, rules, root=found.root)
    if not dry_run:
        _remove(open_storage(os.fspath(root), storage_options), [d for d in decisions if not d.keep])
    return decisions


def _remove(storage: WritableStorage, decisions: Sequence[Decision]) -> None:
    gone: list[str] = []
    for decision in decisions:
        try:
            storage.remove_tree(decision.entry.path)
        except StorageError as error:
            before = f" (removed before it: {', '.join(gone)})" if gone else ""
            problem = f"cannot be removed whole: {error.problem}{before}"
            raise StorageError(decision.entry.path, problem, "repair that, then run it again") from error
        gone.append(decision.entry.name)
