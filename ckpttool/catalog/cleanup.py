"""Remove old checkpoints and leftovers of killed saves after a save."""

from __future__ import annotations

import logging
import math
import posixpath
import re
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ckpttool.catalog.entries import committed
from ckpttool.catalog.retention import decide, parse_best
from ckpttool.commit import is_commit, read_mark
from ckpttool.commit.manifest import REPLACED, commits, directories
from ckpttool.commit.marks import PARTIAL, below, is_alive, is_unfinished, state_of
from ckpttool.commit.pins import find_pin
from ckpttool.errors import CkptError
from ckpttool.formats.locate import LATEST, named_tag
from ckpttool.formats.whole import is_whole, open_whole
from ckpttool.messages import printable
from ckpttool.storage import MARK, find_text, is_half_removed, is_linked, walk
from ckpttool.storage.base import WHOLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckpttool.catalog.retention import Decision, Rules
    from ckpttool.storage import Storage, WritableStorage

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
    try:
        leftovers = left_over(storage, root, grace=grace)
        decisions = [] if rules is None else _decisions(storage, root, rules)
        doomed = {d.entry.path: d.entry.state for d in decisions if not d.keep and d.entry.path not in leftovers}
        whole = [d for d in commits(storage, root) if not is_linked(storage, root, d)]
        marks = (posixpath.join(d, MARK) for d in whole if "over" not in read_mark(storage, d))
        marks_left = [mark for mark in marks if storage.exists(mark)]
        marks_left += _left_over_files(storage, root, whole)
    except CkptError as error:
        LOG.warning("old checkpoints were not removed: %s", error)
        return []
    removals: list[Callable[[], str | None]]
    removals = [partial(remove_unchanged, storage, path, state) for path, state in leftovers.items()]
    removals += [partial(remove_unchanged, storage, path, state, root) for path, state in doomed.items()]
    removals += [partial(storage.delete, [path]) for path in marks_left]
    for remove, path in zip(removals, [*leftovers, *doomed, *marks_left], strict=True):
        try:
            why = remove()
            LOG.info("removed %s" if why is None else f"%s stays: {why}", printable(path))
        except CkptError as error:
            LOG.warning("could not remove an old checkpoint or a leftover: %s", error)
    return [d for d in decisions if d.thin is not None]


def remove_unchanged(storage: WritableStorage, path: str, state: str, root: str | None = None) -> str | None:
    """Remove a directory, unless it has changed since the decision about it; return why it stays.

    Args:
        storage: Storage of the directory.
        path: The directory.
        state: As for ``changed_since``.
        root: As for ``changed_since``.

    Raises:
        StorageError: It cannot be removed.
    """
    why = changed_since(storage, path, state, root)
    if why is None:
        storage.remove_tree(path)
    return why


def changed_since(storage: Storage, path: str, state: str, root: str | None = None) -> str | None:
    """Return why a directory must stay as it is although it was decided to remove or thin it; None if nothing changed.

    Args:
        storage: Storage of the directory.
        path: The directory.
        state: ``state_of`` the directory before its files were looked at.
        root: The root of a checkpoint, whose ``latest`` may name it meanwhile; None for a leftover.

    Raises:
        StorageError: It cannot be listed.
    """
    storage.refresh([])
    if root is not None:
        named = named_tag(find_text(storage, posixpath.join(root, LATEST)) or "")
        if f"{posixpath.normpath(named)}/".startswith(f"{path.removeprefix(root.rstrip('/') + '/')}/"):
            return "latest names it meanwhile"
    if find_pin(storage, path) is not None:  # a link that leads nowhere is a pin, and no part of the state
        return "pinned meanwhile"
    return None if state_of(storage, path) == state else "changed meanwhile: saved again"


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
    newest = max((e for e in entries if e.whole), key=lambda e: e.rank, default=None)
    if not doomed or newest is None:
        return []
    try:
        for path in dict.fromkeys([newest.path, *(e.path for e in entries if e.latest)]):
            open_whole(storage, path)
    except CkptError as error:
        LOG.warning("no checkpoint was removed, because the newest one cannot be read: %s", error)
        return []
    return doomed


def left_over(storage: WritableStorage, root: str, *, grace: float) -> dict[str, str]:
    """Return the directories left by killed saves and removals, with the state of each."""
    found: dict[str, str] = {}
    here = [posixpath.join(root, e.name) for e in storage.listing(root) if e.is_dir] if storage.is_dir(root) else []
    for directory in dict.fromkeys([*here, *directories(storage, root)]):
        if not _is_left_over(storage, directory):
            continue
        state = state_of(storage, directory)
        if is_linked(storage, root, directory):
            LOG.warning("%s is reached through a link and is not removed", printable(directory))
            continue
        newest = max((e.modified or 0.0 for _, e in walk(storage, directory)), default=0.0)
        if is_old(newest, grace) and is_alive(read_mark(storage, directory)) is not True:
            found[directory] = state
    return found


def is_old(modified: float, grace: float) -> bool:
    """Return whether a modification time is at least ``grace`` seconds away from now, in the past or the future."""
    return abs(time.time() - modified) >= grace


def remove_left_over_files(storage: WritableStorage, root: str, checkpoints: Iterable[str]) -> bool:
    """Remove the small files in a root and its checkpoints that a killed process has left; log a failure.

    Args:
        storage: Storage of the root.
        root: The directory of all checkpoints.
        checkpoints: Directories of checkpoints.

    Returns:
        Whether there were any.
    """
    try:
        found = _left_over_files(storage, root, checkpoints)
        storage.delete(found)
    except CkptError as error:
        LOG.warning("could not remove a leftover: %s", error)
        return False
    return bool(found)


def _left_over_files(storage: Storage, root: str, checkpoints: Iterable[str]) -> list[str]:
    """Return incomplete files like ``latest.0123abcd.partial``, and markers of outputs that are committed.

    If another process is writing such a small file, ``LocalStorage.put`` writes it again.
    """
    if storage.remote:  # it shows no incomplete files, and has no such markers
        return []
    names = [e.name for e in storage.listing(root) if not e.is_dir] if storage.is_dir(root) else []
    partial = [name for name in names if re.fullmatch(rf".+\.[0-9a-f]{{8}}{re.escape(PARTIAL)}", name)]
    # In a staging directory, which has the suffix, a later run needs the marker.
    committed = (c for c in checkpoints if storage.is_dir(c) and not c.endswith(PARTIAL))
    marks = [posixpath.join(d, name) for c in committed for d, name in below(storage, c, WHOLE)]
    return [*(posixpath.join(root, name) for name in partial), *marks]


def _is_left_over(storage: WritableStorage, directory: str) -> bool:
    if posixpath.basename(directory).startswith(SCRATCH) or is_half_removed(storage, directory):
        return True
    if directory.endswith(REPLACED):
        return is_commit(storage, directory.removesuffix(REPLACED)) and is_whole(
            storage, directory.removesuffix(REPLACED)
        )
    return is_unfinished(storage, directory)
