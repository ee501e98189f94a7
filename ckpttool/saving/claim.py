"""Claim the directory of a checkpoint for one attempt of a save, by means of the in-progress marker in it.

The directory may be free; or contain the files of a save that died, which are removed; or contain a checkpoint to
replace, which is renamed until the new one is committed; or one that a restore of the run has skipped as torn or
damaged, which is moved aside for good.
"""

from __future__ import annotations

import json
import logging
import posixpath
import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.commit import is_commit, read_mark
from ckpttool.commit.manifest import REPLACED
from ckpttool.commit.marks import (
    ALIVE,
    TAKEN,
    TakenError,
    damage_of,
    find_pin,
    identity,
    is_alive,
    is_old,
    mark_damaged,
    state_of,
)
from ckpttool.errors import CkptError, PlanError, StorageError
from ckpttool.formats import can_resume, is_whole, open_every
from ckpttool.formats.layouts import WEIGHTS
from ckpttool.formats.nested import why_kept
from ckpttool.formats.scan import commits, has_files_of_tag, scan, tag_in
from ckpttool.formats.unfinished import is_unfinished
from ckpttool.formats.zero.files import is_of_tag
from ckpttool.messages import name_some
from ckpttool.saving.files import put_new
from ckpttool.storage import LATEST, MANIFEST, MARK, aside_name, find_text, is_half_removed, is_linked, walk
from ckpttool.storage.base import SET_ASIDE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ckpttool.storage import Storage, WritableStorage

LOG = logging.getLogger("ckpttool")
SEEN_WITHIN = 60.0
"""Seconds that a network file system may take to show a file to other nodes."""
WATCH_SECONDS = 20.0
"""Seconds to watch the directory of another machine's save; without a change the save is dead."""
ASIDE = ".damaged"
"""Suffix of a checkpoint that a save has moved, because a restore has skipped it; its mark is ``DAMAGED``."""


class Skipped(NamedTuple):
    """A checkpoint that a restore has skipped."""

    state: str
    """``state_of`` its directory at that time."""
    problem: str
    """Why."""


class Claim:
    """The directory of a checkpoint, for one attempt of a save. Rank 0 takes it; the other ranks wait for it.

    Args:
        storage: Storage of the checkpoint.
        root: The directory of all checkpoints.
        tag: Name of the checkpoint.
    """

    def __init__(self, storage: WritableStorage, root: str, tag: str) -> None:
        self._storage = storage
        self.root = root
        """The directory of all checkpoints."""
        self.directory = posixpath.join(root, tag)
        self._replaced = f"{self.directory}{REPLACED}"
        self._marker = posixpath.join(self.directory, MARK)
        self.attempt = ""
        """Identifier of the attempt; "" before it is taken or known."""
        self.problem = ""
        """Why the checkpoint there is moved aside, if it is."""
        self.moved = ""
        """Where the checkpoint is that a restore has skipped; "" without one."""

    def state(self, *, overwrite: bool, step: int, skipped: Skipped | None = None) -> str:
        """Return the state of the directory: "free", "unfinished" (its save is dead), "replaced" or "damaged".

        Args:
            overwrite: Whether to replace a checkpoint.
            step: The step to save.
            skipped: The checkpoint there that a restore of this run has skipped; None without one.

        Raises:
            TakenError: Another save writes it.
            StorageError: It must not be written.
        """
        storage, directory = self._storage, self.directory
        if is_linked(storage, self.root, directory):
            raise StorageError(directory, "is reached through a link", "choose another tag, or remove the link")
        if not storage.exists(directory):
            return "free"
        if not storage.is_dir(directory):
            raise StorageError(directory, "exists and is not a directory", "move it, or choose another tag")
        if not storage.listing(directory):
            return "free"
        if is_unfinished(storage, directory):
            self._check_dead()
            self._check_alone()
            return "unfinished"
        self.problem = "" if skipped is None else skipped.problem
        if self._is_damaged() or (skipped is not None and state_of(storage, directory) == skipped.state):
            self._check_alone()
            return "damaged"
        if not overwrite:
            self.problem = self._torn()
            if self.problem:
                self._check_alone()
                return "damaged"
            other = f"holds other files, so that step {step} is not saved"
            what = "is saved already" if is_commit(storage, directory) else other
            raise StorageError(directory, what, "choose another tag, or pass overwrite=True")
        if commits(scan(storage, directory)):
            raise StorageError(directory, "holds other checkpoints", "choose another tag")
        names = [entry.name for entry in storage.listing(directory)]
        weights = [name for name in names if WEIGHTS.fullmatch(name)]
        if not is_commit(storage, directory) and (weights or not any(map(is_of_tag, names))):
            problem = f"holds {name_some(weights or names)}, which overwrite would remove"
            raise StorageError(directory, problem, "choose another tag, or move it")
        check_not_pinned(storage, directory)
        self._check_alone()
        return "replaced"

    def take(self, state: str) -> str:
        """Write the in-progress marker into the directory; return the identifier of this attempt.

        Args:
            state: As ``state`` returned it.

        Raises:
            TakenError: Another process has taken or committed the directory meanwhile.
            StorageError: The storage fails; a checkpoint to replace is back in its place.
        """
        self.attempt = secrets.token_hex(8)
        ALIVE.add(self.attempt)
        latest = posixpath.join(self.root, LATEST)
        named = tag_in(find_text(self._storage, latest) or "") if self._storage.is_dir(self.root) else ""
        mark = json.dumps({"key": f"save {self.attempt}", "files": [], "latest": named, **identity()}).encode()
        if state == "unfinished":
            self._take_over(mark)
            return self.attempt
        if state == "replaced":
            self._set_aside()
        if state == "damaged":
            self._move()
        try:
            self._storage.make_directory(self.directory)
            put_new(self._storage, self._marker, mark)
        except TakenError:
            raise
        except CkptError:
            if state == "replaced":
                _try_each([self._remove_if_there, self._restore_replaced])
            raise
        return self.attempt

    def wait(self, attempt: str) -> None:
        """Wait until this rank sees the in-progress marker of rank 0's attempt.

        Raises:
            StorageError: This rank does not see it in time.
        """
        self.attempt = attempt
        end = time.monotonic() + SEEN_WITHIN
        while True:
            self._storage.refresh([])
            try:
                if attempt in (find_text(self._storage, self._marker) or ""):
                    return
            except StorageError:
                pass  # the marker may still appear
            if time.monotonic() > end:
                problem = "was created by rank 0, but not all ranks see it"
                raise StorageError(self.directory, problem, "choose a root that all nodes share")
            time.sleep(0.05)

    def check(self) -> None:
        """Check that no other process has taken over the directory, for example because this save seemed dead.

        Raises:
            TakenError: Another process has taken it.
        """
        self._storage.refresh([])
        if self.attempt not in (find_text(self._storage, self._marker) or ""):
            raise TakenError(self.directory, "was taken over by another process while it was being saved", TAKEN)

    def commit(self) -> None:
        """Delete the marker and the replaced checkpoint, after the manifest is written; ``tidy`` repeats a failure."""
        _try_each([partial(self._storage.delete, [self._marker]), self._remove_replaced])

    def undo(self, *more: Callable[[], None]) -> None:
        """Remove the files of this attempt, if the directory is still its own, and put the replaced checkpoint back.

        Args:
            *more: Further steps of the caller, made last.
        """
        try:
            self.check()
        except CkptError:
            return  # of another process; or unknown: the marker makes readers refuse the files
        _try_each([partial(self._storage.remove_tree, self.directory), self._restore_replaced, *more])

    def release(self) -> None:
        """Forget the attempt: from now on other saves of this process treat it as dead."""
        ALIVE.discard(self.attempt)

    def _check_alone(self) -> None:
        """Check that no checkpoint of another run would be removed with this one.

        Raises:
            StorageError: There is one.
        """
        if (why := why_kept(self._storage, self.directory)) is not None:
            raise StorageError(self.directory, why, "choose another tag, or move them")

    def _check_dead(self) -> None:
        """Check that the save that wrote the directory's marker does not run any more.

        Raises:
            TakenError: The save still runs.
        """
        mark = read_mark(self._storage, self.directory)
        who = f"process {mark.get('process')} of {mark.get('host')}"
        taken = TakenError(self.directory, f"is being saved by {who}", TAKEN)
        alive = is_alive(mark)
        if alive:
            raise taken
        if alive is False:
            return
        before = self._snapshot()
        end = time.monotonic() + WATCH_SECONDS
        while time.monotonic() < end:
            time.sleep(1.0)
            if self._snapshot() != before:
                raise taken

    def _snapshot(self) -> list[tuple[Any, ...]]:
        self._storage.refresh([])
        try:
            return [(name, entry.nbytes, entry.version) for name, entry in walk(self._storage, self.directory)]
        except StorageError:
            return []

    def _take_over(self, mark: bytes) -> None:
        """Claim the directory of a dead save, and remove its files.

        Raises:
            TakenError: Another process has committed or claimed the directory meanwhile.
            StorageError: The directory cannot be cleared.
        """
        storage, directory = self._storage, self.directory
        above, name = posixpath.split(directory)
        aside = posixpath.join(above, aside_name(f"{name}.{secrets.token_hex(4)}"))
        # After the rename a save that still runs does not find its files in the directory.
        if storage.rename(directory, aside):
            if storage.exists(posixpath.join(aside, MANIFEST)):
                storage.rename(aside, directory)
                raise TakenError(directory, "was committed by another process meanwhile", TAKEN)
            storage.remove_tree(aside)
            storage.make_directory(directory)
            put_new(storage, self._marker, mark)
            return
        storage.refresh([])
        entries = storage.listing(directory) if storage.is_dir(directory) else ()
        seen = next((entry.version for entry in entries if entry.name == MARK), None)
        removed = bool(seen) and is_half_removed(storage, directory)
        if not storage.put_new(self._marker, mark, over=seen):
            raise TakenError(self._marker, "was claimed by another process meanwhile", TAKEN)
        # From now on a save that still runs finds the marker of another save.
        storage.refresh([])
        if not removed and storage.exists(posixpath.join(directory, MANIFEST)):
            storage.delete([self._marker])
            raise TakenError(directory, "was committed by another process meanwhile", TAKEN)
        storage.abandon(directory)
        storage.delete([posixpath.join(directory, name) for name, _ in walk(storage, directory) if name != MARK])

    def _set_aside(self) -> None:
        """Rename the checkpoint to replace, until the new one is committed."""
        storage, directory, aside = self._storage, self.directory, self._replaced
        if not storage.remote and storage.exists(aside):
            if is_commit(storage, aside) and not is_commit(storage, directory):
                problem = "may be the only whole checkpoint of this name"
                raise StorageError(aside, problem, "choose another tag, or move it")
            if not self._has_replaced():
                problem = "was not made by ckpttool, which keeps the replaced checkpoint under that name"
                raise StorageError(aside, problem, "choose another tag, or move it")
            if is_commit(storage, aside) and not is_whole(storage, directory):
                storage.remove_tree(directory)  # the renamed checkpoint is whole, this one is not
                return
            storage.remove_tree(aside)
        try:
            if not storage.remote:
                storage.put(posixpath.join(directory, SET_ASIDE), b"")
            moved = storage.rename(directory, aside)
        except StorageError:
            _try_each([self._restore_replaced])  # also if the rename succeeded, and its sync failed
            raise
        if not moved:
            others = (one.path for one in commits(scan(storage, self.root)) if one.path != directory)
            check_not_only(storage, directory, others)
            storage.remove_tree(directory)

    def _is_damaged(self) -> bool:
        """Return whether a killed save has begun to move the checkpoint."""
        return damage_of(self._storage, self.directory) is not None

    def _torn(self) -> str:
        """Return why a checkpoint of ranks there cannot be opened; "" if it can, or if a save may still write it."""
        if not has_files_of_tag(self._storage.listing(self.directory)):
            return ""
        times = (entry.modified for _, entry in walk(self._storage, self.directory))
        newest = max((time for time in times if time is not None), default=None)
        if newest is None or not is_old(newest, SEEN_WITHIN):
            return ""
        try:
            open_every(self._storage, self.directory)
        except (PlanError, StorageError):
            return ""  # of a later release, or not readable now
        except CkptError as error:
            return error.problem
        return ""

    def _move(self) -> None:
        """Move the checkpoint that a restore has skipped; readers know it by the mark, which is written first."""
        aside = f"{self.directory}{ASIDE}"
        while self._storage.exists(aside):
            aside += ASIDE
        self.problem = self.problem or damage_of(self._storage, self.directory) or ""
        mark_damaged(self._storage, self.directory, self.problem, for_good=True)
        if self._storage.remote:  # a killed move leaves no checkpoint
            mark_damaged(self._storage, aside, self.problem, for_good=True)
        self._storage.move_tree(self.directory, aside)
        self.moved = aside

    def _remove_if_there(self) -> None:
        if self._storage.exists(self.directory):
            self._storage.remove_tree(self.directory)

    def _has_replaced(self) -> bool:
        # Remote storages cannot rename, so that they have none to look for.
        return not self._storage.remote and self._storage.exists(posixpath.join(self._replaced, SET_ASIDE))

    def _restore_replaced(self) -> None:
        marker = posixpath.join(self.directory, SET_ASIDE)
        if self._has_replaced() and not self._storage.exists(self.directory):
            self._storage.rename(self._replaced, self.directory)
        if not self._storage.remote and self._storage.exists(marker):
            self._storage.delete([marker])

    def _remove_replaced(self) -> None:
        if self._has_replaced():
            self._storage.remove_tree(self._replaced)


def mark_skipped(storage: WritableStorage, found: Mapping[str, Skipped]) -> None:
    """Mark the checkpoints that a restore has skipped, once the run has saved another one.

    Rotations then do not count them, and a later start of the run moves them aside at their steps.

    Args:
        storage: Their storage.
        found: The skipped ones by their directories; one that changed since is not marked.
    """
    for directory, skipped in found.items():
        try:
            if storage.is_dir(directory) and state_of(storage, directory) == skipped.state:
                mark_damaged(storage, directory, skipped.problem, for_good=False)
        except CkptError as error:
            LOG.warning("a checkpoint that cannot be restored was not marked: %s", error)


def check_not_pinned(storage: Storage, directory: str) -> None:
    """Check that a checkpoint to replace is not pinned.

    Raises:
        StorageError: It is.
    """
    if (pin := find_pin(storage, directory)) is not None:
        raise StorageError(directory, f"is pinned by {pin.who or '?'}: {pin.why}", "unpin it, or choose another name")


def check_not_only(storage: Storage, directory: str, others: Iterable[str], hint: str = "choose another tag") -> None:
    """Check before a checkpoint in a bucket is replaced that a run could resume from another one meanwhile.

    Raises:
        StorageError: It could not.
    """
    if not any(can_resume(storage, path) for path in others):
        only = "is the only whole checkpoint with an optimizer"
        problem = f"{only}, and this storage cannot keep it until the new one is committed"
        raise StorageError(directory, problem, hint)


def _try_each(steps: Sequence[Callable[[], None]]) -> None:
    for step in steps:
        try:
            step()
        except CkptError as error:
            LOG.warning("could not clean up after a save: %s", error)
