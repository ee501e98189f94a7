"""What is done after a save: old checkpoints go, and what killed saves have left."""

from __future__ import annotations

import logging
import posixpath
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.catalog import committed
from ckpttool.errors import CkptError
from ckpttool.manifest import commits, is_commit
from ckpttool.retention import decide, parse_best
from ckpttool.saving.protocol import REPLACED, is_unfinished
from ckpttool.storage import MARK, is_half_removed, walk

if TYPE_CHECKING:
    from ckpttool.retention import Rules
    from ckpttool.saving.protocol import Place

LOG = logging.getLogger("ckpttool")
SCRATCH = ".ckpttool-scratch-"
"""Begins the name of a directory for what a framework copies by itself."""


def tidy(place: Place, root: str, rules: Rules | None, *, grace: float) -> None:
    """Remove what no rule keeps, and left-overs; what cannot be removed is told to the log, and tried again next time.

    Args:
        place: Where.
        root: The directory of all checkpoints.
        rules: What to keep; None for all.
        grace: Seconds that a left-over must be old, by the newest of its files.
    """
    try:
        doomed = left_over(place, root, grace=grace)
        if rules is not None:
            doomed += _not_kept(place, root, rules)
        marks = (posixpath.join(directory, MARK) for directory in commits(place.storage, root))
        marks_left = [mark for mark in marks if place.storage.exists(mark)]
    except CkptError as error:
        LOG.warning("old checkpoints were not looked at: %s", error)
        return
    for remove, path in [(place.remove, d) for d in doomed] + [(place.delete, m) for m in marks_left]:
        try:
            remove(path)
            LOG.info("removed %s", path)
        except CkptError as error:
            LOG.warning("could not remove what is not needed any more: %s", error)


def _not_kept(place: Place, root: str, rules: Rules) -> list[str]:
    entries = committed(place.storage, root)
    if rules.best is not None and not any(e.whole and parse_best(rules.best)[0] in e.metrics for e in entries):
        if rules.last is None and rules.every is None:
            return []
        rules = replace(rules, best=None)  # none is known to be better than another
    return [d.entry.path for d in decide(entries, rules, root=root) if not d.keep]


def left_over(place: Place, root: str, *, grace: float) -> list[str]:
    """Directories that killed saves and removals have left."""
    storage = place.storage
    found = []
    for entry in storage.listing(root) if storage.is_dir(root) else []:
        directory = posixpath.join(root, entry.name)
        if not entry.is_dir or not _is_left_over(place, directory):
            continue
        newest = max((e.modified or 0.0 for _, e in walk(storage, directory)), default=0.0)
        if time.time() - newest >= grace:
            found.append(directory)
    return found


def _is_left_over(place: Place, directory: str) -> bool:
    storage = place.storage
    if posixpath.basename(directory).startswith(SCRATCH) or is_half_removed(storage, directory):
        return True
    if directory.endswith(REPLACED):
        return is_commit(storage, directory.removesuffix(REPLACED))
    return is_unfinished(storage, directory)
