"""Remove old checkpoints after a save, or act on them, and remove leftovers of killed processes."""

from __future__ import annotations

import contextlib
import logging
import math
import posixpath
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ckpttool.catalog.entries import committed
from ckpttool.catalog.listing import by_series
from ckpttool.catalog.retention import decide, parse_best
from ckpttool.catalog.runs import trainer_commits
from ckpttool.commit import is_commit, read_mark
from ckpttool.commit.manifest import REPLACED
from ckpttool.commit.marks import (
    TakenError,
    below,
    find_pin,
    is_alive,
    is_old,
    state_of,
)
from ckpttool.errors import CkptError, StorageError
from ckpttool.execution.run import MEMORY
from ckpttool.formats import is_whole, open_every
from ckpttool.formats.layouts import OWN_OF_RAY, Place, is_named, trainer_folders
from ckpttool.formats.nested import why_kept
from ckpttool.formats.scan import Found, named_tag, scan
from ckpttool.formats.unfinished import is_unfinished, saved_by_another, unfinished_below
from ckpttool.messages import printable
from ckpttool.registry import actions, imported
from ckpttool.storage import (
    MARK,
    is_gone,
    is_half_removed,
    is_linked,
    link_into,
    links_below,
    walk,
)
from ckpttool.storage.base import PINNED, SET_ASIDE, WHOLE, PinnedError
from ckpttool.storage.safe_files import PARTIAL, is_temporary

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from ckpttool.catalog.actions import Work
    from ckpttool.catalog.retention import Decision, Rules
    from ckpttool.storage import Storage, WritableStorage

LOG = logging.getLogger("ckpttool")


def maintain(storage: WritableStorage, root: str, rules: Rules | None, *, grace: float) -> None:
    """Remove checkpoints after a save, or act on them, and remove leftovers; log failures: the next save tries again.

    Args:
        storage: Storage of the checkpoints.
        root: The directory of all checkpoints.
        rules: Retention rules; None to keep all.
        grace: Age in seconds of leftovers to remove, counted from the newest of their files.
    """
    try:
        found = scan(storage, root)
        unlinked = [one for one in found if not one.hidden and not one.link]
        finish_killed(storage, [one.path for one in unlinked], grace=grace)
        leftovers = left_over(found, grace=grace)
        decisions = [] if rules is None else _decisions(storage, root, found, rules)
        doomed = {d.entry.path: d.entry.state for d in decisions if not d.keep and d.entry.path not in leftovers}
        whole = [one.path for one in unlinked if one.committed]
        finished = [path for path in whole if "over" not in read_mark(storage, path)]
        finished += [one.path for one in unlinked if not one.committed and saved_by_another(storage, one.path)]
        marks_left = [mark for path in finished if storage.exists(mark := posixpath.join(path, MARK))]
        marks_left += _left_over_files(storage, root, whole)
    except CkptError as error:
        LOG.warning("old checkpoints were not removed: %s", error)
        return
    removals: list[Callable[[], str | None]]
    removals = [partial(remove_unchanged, storage, path, state) for path, state in leftovers.items()]
    removals += [partial(remove_unchanged, storage, path, state, root) for path, state in doomed.items()]
    removals += [partial(storage.delete, [path]) for path in marks_left]
    for remove, path in zip(removals, [*leftovers, *doomed, *marks_left], strict=True):
        try:
            why = remove()
            LOG.info("removed %s" if why is None else f"%s is kept: {why}", printable(path))
        except CkptError as error:
            LOG.warning("could not remove an old checkpoint or a leftover: %s", error)
    for decision in decisions:
        if decision.thin is not None and rules is not None and rules.action is not None:
            plan = partial(rules.action.plan, jobs=1, memory=MEMORY, grace=grace)
            _act(storage, root, decision, plan)


def _act(storage: WritableStorage, root: str, decision: Decision, plan: Callable[[Storage, str], Work]) -> None:
    path = decision.entry.path
    try:
        if (why := changed_since(storage, path, decision.entry.state, root)) is not None:
            LOG.info("%s is kept whole: %s", printable(path), why)
            return
        plan(storage, path).carry_out(storage, lambda _: None)
        LOG.info("thinned %s: kept its weights in %s", printable(path), decision.thin)
    except CkptError as error:
        LOG.warning("an old checkpoint was not thinned: %s", error)


def finish_killed(
    storage: WritableStorage, checkpoints: Iterable[str], *, grace: float
) -> tuple[bool, dict[str, StorageError]]:
    """Finish or undo interrupted actions on checkpoints; actions that still run are not touched.

    Args:
        storage: Storage of the checkpoints.
        checkpoints: Their directories, or directories above them.
        grace: Seconds after which another machine's marker counts as left by a killed process.

    Returns:
        Whether leftovers were deleted, and the failures by checkpoint; they are logged, and the next
        call tries again.
    """
    found, failed = False, {}
    for path in checkpoints:
        try:
            found = _finish_killed(storage, path, grace=grace) or found
        except StorageError as error:
            if not is_gone(storage, error):  # else another process has removed it
                failed[path] = error
                LOG.warning("could not delete leftovers of an interrupted thinning: %s", error)
    return found, failed


def _finish_killed(storage: WritableStorage, path: str, *, grace: float) -> bool:
    found = False
    for action in actions():
        for directory in {directory for directory, _ in below(storage, path, action.marker)}:
            try:
                found = imported(action.recover)(storage, directory, grace=grace) or found
            except TakenError as error:
                LOG.info("%s", error)
    return found


def remove_unchanged(storage: WritableStorage, path: str, state: str, root: str | None = None) -> str | None:
    """Remove a directory, unless it has changed since the decision about it; return why it is kept.

    Args:
        storage: Storage of the directory.
        path: The directory.
        state: As for ``changed_since``.
        root: As for ``changed_since``.

    Raises:
        StorageError: It cannot be removed.
    """
    why = changed_since(storage, path, state, root) or why_kept(storage, path)
    if why is None:
        try:
            storage.remove_tree(path, unless_pinned=True)
        except PinnedError as error:
            return error.problem
    return why


def changed_since(storage: Storage, path: str, state: str, root: str | None = None) -> str | None:
    """Return why a directory must not be removed or thinned as decided; None if nothing changed.

    Args:
        storage: Storage of the directory.
        path: The directory.
        state: ``state_of`` the directory before its files were read.
        root: The root of a checkpoint, whose ``latest`` may name it meanwhile; None for a leftover.

    Raises:
        StorageError: It cannot be listed.
    """
    storage.refresh([])
    if root is not None:
        named = named_tag(storage, root)
        if f"{posixpath.normpath(named)}/".startswith(f"{path.removeprefix(root.rstrip('/') + '/')}/"):
            return "latest names it meanwhile"
    if find_pin(storage, path) is not None:  # a dangling link is a pin, and not part of the state
        return PINNED
    return None if state_of(storage, path) == state else "changed meanwhile: saved again"


def _decisions(storage: WritableStorage, root: str, found: Iterable[Found], rules: Rules) -> list[Decision]:
    """Return the decisions about checkpoints to remove or to thin; none while the newest one cannot be opened."""
    entries = committed(storage, root, found)
    if rules.best is not None:
        metric = parse_best(rules.best)[0]
        if not any(e.whole and math.isfinite(e.metrics.get(metric, math.nan)) for e in entries):
            if rules.last is None and rules.every is None and rules.age is None:
                return []
            rules = replace(rules, best=None)  # without metrics no checkpoint is better than another
    doomed = [d for d in decide(entries, rules, root=root) if not d.keep or d.thin is not None]
    newest = [max(own, key=lambda e: e.rank) for own in by_series([e for e in entries if e.whole])]
    if not doomed or not newest:
        return []
    try:
        for path in dict.fromkeys(e.path for e in (*newest, *entries) if e.latest or e in newest):
            open_every(storage, path)
    except CkptError as error:
        LOG.warning("no checkpoint was removed, because the newest one cannot be read: %s", error)
        return []
    return doomed


def left_over(found: Iterable[Found], *, grace: float) -> dict[str, str]:
    """Return the directories left by killed saves and removals, with the state of each."""
    states: dict[str, str] = {}
    for one in found:
        try:
            if not _is_left_over(one.storage, one.path):
                continue
            state = state_of(one.storage, one.path)
            if one.link:
                LOG.warning("%s is reached through a link and is not removed", printable(one.path))
            elif _is_abandoned(one.storage, one.path, [one.path], grace):
                states[one.path] = state
        except StorageError as error:
            if not is_gone(one.storage, error):  # else another process has removed it
                raise
    return states


def left_by_workers(
    storage: Storage, run: str, whole: Collection[str], *, grace: float
) -> tuple[dict[str, str], set[str]]:
    """Find the directories of killed workers of Ray Train.

    Args:
        storage: Storage of the run.
        run: The run's directory.
        whole: Names of directories that are known to have a commit.
        grace: Seconds after which an unfinished directory is abandoned, counted from the newest of its files.

    Returns:
        The state of each abandoned directory by its path, and the names of further directories with a commit.
    """
    states: dict[str, str] = {}
    others: set[str] = set()
    storage.refresh([])
    for one in Place(storage, run).reported:
        if one.tag in whole:
            continue
        directory, state = one.path, state_of(storage, one.path)
        if any(tag.committed for tag in scan(storage, directory, depth=1)):
            others.add(one.tag)
            continue
        times = [one.modified, *(e.modified for _, e in walk(storage, directory))]
        newest = max((t for t in times if t is not None), default=math.inf)
        unfinished = unfinished_below(storage, directory)
        if not unfinished and not is_named(one.tag, OWN_OF_RAY):
            continue  # the run's script wrote it
        alive = any(is_alive(read_mark(storage, marked)) for marked in unfinished)
        if newest < math.inf and is_old(newest, grace) and not alive:
            states[directory] = state
    return states, others


def remove_left_over_files(storage: WritableStorage, root: str, checkpoints: Iterable[str]) -> bool:
    """Remove small temporary files of killed processes from a root and its checkpoints; log a failure.

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
    """Return incomplete files (``is_temporary``), and markers of outputs that are committed.

    If another process is writing such a small file, ``LocalStorage.put`` writes it again.
    """
    if storage.remote:  # without incomplete files and such markers
        return []
    names = [e.name for e in storage.listing(root) if not e.is_dir] if storage.is_dir(root) else []
    partial = [name for name in names if is_temporary(name)]
    # In a staging directory, which has the suffix, a later run needs the marker.
    committed = (c for c in checkpoints if storage.is_dir(c) and not c.endswith(PARTIAL))
    marks = [posixpath.join(d, name) for c in committed for d, name in below(storage, c, WHOLE) if name == WHOLE]
    return [*(posixpath.join(root, name) for name in partial), *marks]


def _is_abandoned(storage: Storage, path: str, marked: Iterable[str], grace: float) -> bool:
    """Return whether no file below a path is new, and no known process runs that marked one of some directories."""
    newest = max((entry.modified or 0.0 for _, entry in walk(storage, path)), default=0.0)
    return is_old(newest, grace) and not any(is_alive(read_mark(storage, directory)) for directory in marked)


def _is_left_over(storage: Storage, directory: str) -> bool:
    if is_half_removed(storage, directory):
        return True
    if directory.endswith(REPLACED) and storage.exists(posixpath.join(directory, SET_ASIDE)):
        replacing = directory.removesuffix(REPLACED)
        return is_commit(storage, replacing) and is_whole(storage, replacing)
    return is_unfinished(storage, directory)


def rotate(storage: WritableStorage, root: str, limit: int | None, *, keep: Collection[str], grace: float) -> list[str]:
    """Remove the oldest checkpoints of a run and leftovers of interrupted saves; return their directories.

    Unlike the Trainer's own rotation it counts whole checkpoints only, so that an incomplete one never takes the place
    of a checkpoint that a run can resume from. Pinned and thin checkpoints are kept, and not counted.

    Args:
        storage: Storage of the run.
        root: The output directory.
        limit: Number of checkpoints to keep, pinned ones not counted; None or 0 for all.
        keep: Names of folders to keep.
        grace: Seconds after which the folder of a killed save is removed.

    Raises:
        StorageError: The root cannot be read.
    """
    storage.refresh([])
    found = scan(storage, root, depth=1)
    folders = trainer_folders(found)
    half = [one.path for one in found if one.hidden and is_half_removed(storage, one.path)]
    seen = {}
    for path in [*(folder.path for folder in folders), *half]:
        with contextlib.suppress(StorageError):  # kept; another process may be removing it
            seen[path] = state_of(storage, path)
    every = [one.name for one in trainer_commits(folders)]
    counted = [path for path in every if find_pin(storage, path) is None]
    spare = [path for path in counted if path != every[0] and posixpath.basename(path) not in keep]
    surplus = max(0, len(counted) - limit) if limit else 0
    doomed = spare[::-1][:surplus]
    doomed += [one.path for one in folders if one.path not in every and _is_leftover(storage, one.path, grace)]
    doomed += [path for path in half if path in seen]
    removed = []
    links = links_below(root) if doomed else []
    for folder in doomed:
        if is_linked(storage, root, folder) or link_into(links, root, folder) is not None:
            continue
        try:
            why = remove_unchanged(storage, folder, seen.get(folder, ""))
        except CkptError as error:
            LOG.warning("an old checkpoint was not removed: %s", error)
            continue
        removed += [folder] if why is None else []
        LOG.info("removed %s" if why is None else f"%s is kept: {why}", folder)
    return removed


def _is_leftover(storage: Storage, folder: str, grace: float) -> bool:
    """Return whether a folder has only an unfinished save of a process that does not run any more."""
    if is_half_removed(storage, folder):
        return True
    unfinished = unfinished_below(storage, folder)
    return bool(unfinished) and _is_abandoned(storage, folder, unfinished, grace)
