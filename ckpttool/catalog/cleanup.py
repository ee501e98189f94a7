"""Remove old checkpoints and leftovers of killed saves after a save."""

from __future__ import annotations

import logging
import math
import posixpath
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ckpttool.catalog.entries import committed
from ckpttool.catalog.retention import decide, parse_best
from ckpttool.commit import is_commit
from ckpttool.commit.manifest import REPLACED, commits, directories
from ckpttool.commit.marks import PARTIAL, is_alive, is_unfinished, read_mark
from ckpttool.errors import CkptError
from ckpttool.formats.whole import is_whole, open_whole
from ckpttool.messages import printable
from ckpttool.storage import MARK, is_half_removed, is_linked, walk

if TYPE_CHECKING:
    from ckpttool.catalog.retention import Decision, Rules
    from ckpttool.storage import WritableStorage

LOG = logging.getLogger("ckpttool")
SCRATCH = ".ckpttool-scratch-"
"""Prefix of a scratch directory for swap files copied by DeepSpeed."""


def tidy(storage: WritableStorage, root: str, rules: Rules | None, *, grace: float) -> list[Decision]:
    """Remove checkpoints without a rule to keep them, and leftovers; log failures: the next save tries again.

    Args:
        storage: Storage of the checkpoints.
        root: The directory of all checkpoints.
        rules: Retention rules; None to keep all.
        grace: Age in seconds of leftovers to remove, counted from the newest of their files.

    Returns:
        The decisions about checkpoints to thin, for the caller to carry out.
    """
    decisions: list[Decision] = []
    try:
        doomed = left_over(storage, root, grace=grace)
        if rules is not None:
            decisions = _decisions(storage, root, rules)
            doomed += [d.entry.path for d in decisions if not d.keep]
        whole = [d for d in commits(storage, root) if not is_linked(storage, root, d)]
        marks = (posixpath.join(directory, MARK) for directory in whole)
        marks_left = [mark for mark in marks if storage.exists(mark)]
        marks_left += _partial_files(storage, root, grace=grace)
    except CkptError as error:
        LOG.warning("old checkpoints were not removed: %s", error)
        return []
    removals = [partial(storage.remove_tree, path) for path in dict.fromkeys(doomed)]
    removals += [partial(storage.delete, [path]) for path in marks_left]
    for remove, path in zip(removals, [*dict.fromkeys(doomed), *marks_left], strict=True):
        try:
            remove()
            LOG.info("removed %s", printable(path))
        except CkptError as error:
            LOG.warning("could not remove an old checkpoint or a leftover: %s", error)
    return [d for d in decisions if d.thin is not None]


def _decisions(storage: WritableStorage, root: str, rules: Rules) -> list[Decision]:
    """Return the decisions about checkpoints to remove or to thin; none while the newest one cannot be opened."""
    entries = committed(storage, root)
    if rules.best is not None:
        metric = parse_best(rules.best)[0]
        if not any(e.whole and math.isfinite(e.metrics.get(metric, math.nan)) for e in entries):
            if rules.last is None and rules.every is None and rules.age is None:
                return []
            rules = replace(rules, best=None)  # without metrics no checkpoint is better than another
    doomed = [d for d in decide(entries, rules, root=root) if not d.keep or d.thin is not None]
    newest = max((e for e in entries if e.whole), key=lambda e: e.order, default=None)
    if not doomed or newest is None:
        return []
    try:
        for path in dict.fromkeys([newest.path, *(e.path for e in entries if e.latest)]):
            open_whole(storage, path)
    except CkptError as error:
        LOG.warning("no checkpoint was removed, because the newest one cannot be read: %s", error)
        return []
    return doomed


def left_over(storage: WritableStorage, root: str, *, grace: float) -> list[str]:
    """Return the directories left by killed saves and removals."""
    found = []
    here = [posixpath.join(root, e.name) for e in storage.listing(root) if e.is_dir] if storage.is_dir(root) else []
    for directory in dict.fromkeys([*here, *directories(storage, root)]):
        if not _is_left_over(storage, directory):
            continue
        if is_linked(storage, root, directory):
            LOG.warning("%s is reached through a link and is not removed", printable(directory))
            continue
        newest = max((e.modified or 0.0 for _, e in walk(storage, directory)), default=0.0)
        if is_old(newest, grace) and is_alive(read_mark(storage, directory)) is not True:
            found.append(directory)
    return found


def is_old(modified: float, grace: float) -> bool:
    """Return whether a modification time is at least ``grace`` seconds away from now, in the past or the future."""
    return abs(time.time() - modified) >= grace


def _partial_files(storage: WritableStorage, root: str, *, grace: float) -> list[str]:
    """Return the incomplete small files in a root, left by a killed process."""
    entries = storage.listing(root) if storage.is_dir(root) else []
    found = [e for e in entries if not e.is_dir and e.name.endswith(PARTIAL)]
    return [posixpath.join(root, e.name) for e in found if is_old(e.modified or 0.0, grace)]


def _is_left_over(storage: WritableStorage, directory: str) -> bool:
    if posixpath.basename(directory).startswith(SCRATCH) or is_half_removed(storage, directory):
        return True
    if directory.endswith(REPLACED):
        return is_commit(storage, directory.removesuffix(REPLACED)) and is_whole(
            storage, directory.removesuffix(REPLACED)
        )
    return is_unfinished(storage, directory)
