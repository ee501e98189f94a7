"""Commands about all checkpoints of a root: ``ls`` and ``prune``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ckpttool.errors import LayoutError, StorageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.catalog.entries import Catalog
    from ckpttool.catalog.retention import Decision


def ls(root: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Catalog:
    """The checkpoints in a directory, older before newer ones, and which of them are whole.

    Args:
        root: A checkpoint root, or a directory of a trainer's ``checkpoint-N``.
        storage_options: What to tell the fsspec class of URLs: keys, an endpoint, ... Default: what it finds itself.

    Raises:
        CkptError: The directory cannot be read, or holds no checkpoint.
    """
    from ckpttool.catalog.entries import catalog

    return catalog(os.fspath(root), options=storage_options)


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

    Only whole native ZeRO checkpoints are removed, never the newest of them, nor the one that ``latest`` names, nor
    those that Ray Train's snapshot of a run lists.

    Args:
        root: A checkpoint root, or a directory of a trainer's ``checkpoint-N``.
        keep_last: Keep so many of the newest.
        keep_every: Keep those whose step is a multiple of this.
        keep_best: Keep the one with the smallest value of this number in its client state ("loss", "eval.loss"); with
            ":max" behind it, the largest.
        dry_run: Decide, but remove nothing.
        storage_options: What to tell the fsspec class of URLs: keys, an endpoint, ... Default: what it finds itself.

    Returns:
        What became of each checkpoint and why, older before newer ones.

    Raises:
        CkptError: The directory cannot be read, no checkpoint has the number, or one cannot be removed.
        ValueError: No rule is given, or one makes no sense.
    """
    from ckpttool.catalog.entries import catalog
    from ckpttool.catalog.retention import Rules, decide
    from ckpttool.storage import open_storage

    rules = Rules(keep_last, keep_every, keep_best)
    found = catalog(os.fspath(root), options=storage_options)
    if found.problems:
        raise LayoutError(found.root, found.problems[0], "mend or remove that file first: what it means must not go")
    decisions = decide(found.entries, rules, root=found.root)
    gone: list[str] = []
    storage = open_storage(os.fspath(root), storage_options)
    for decision in decisions if not dry_run else ():
        if not decision.keep:
            try:
                storage.remove_tree(decision.entry.path)
            except StorageError as error:
                before = f" (removed before it: {', '.join(gone)})" if gone else ""
                problem = f"cannot be removed whole: {error.problem}{before}"
                raise StorageError(decision.entry.path, problem, "mend that, then run it again") from error
            gone.append(decision.entry.name)
    return decisions
