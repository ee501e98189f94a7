"""Order the checkpoints of a root, the newest first, and find those to resume from."""

from __future__ import annotations

import contextlib
import logging
import posixpath
import time
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.commit.manifest import REPLACED
from ckpttool.errors import CkptError, LayoutError, StorageError
from ckpttool.formats import open_checkpoint
from ckpttool.formats.dcp import ACCELERATE_MODEL, ACCELERATE_OPTIMIZER, LIGHTNING_STATE, METADATA
from ckpttool.formats.layouts import WEIGHTS, Place, is_name
from ckpttool.formats.locate import refuse_part, refuse_several
from ckpttool.formats.scan import Found, natural_order, pattern_of
from ckpttool.messages import brief, name_some
from ckpttool.storage import LATEST, MANIFEST
from ckpttool.storage.base import MISSING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.commit.manifest import Manifest
    from ckpttool.storage import Entry, Storage

LOG = logging.getLogger(__name__)
ATTEMPTS = 10
"""Maximum number of attempts to list checkpoints while another process replaces or removes them."""
SECOND_LOOK = 1.0
"""Seconds after which a restore looks again for a checkpoint that ``latest`` names."""


class Saved(NamedTuple):
    """The facts about one checkpoint of a run that decide its place in the order."""

    name: str
    """A unique name."""
    step: int
    """Steps of the engine; -1 if unknown."""
    number: int = 0
    """``Manifest.number``; 0 without a manifest."""
    attempt: str = ""
    """``Manifest.attempt``."""
    parent: str = ""
    """``Manifest.parent``."""
    origin: str = ""
    """Attempt of the commit that it was trained from: ``Manifest.origin``, or else the parent."""
    marked: bool = False
    """Whether it is committed and still has its in-progress marker."""
    written: float = 0.0
    """Time of the save in seconds since 1970; 0 if unknown."""

    @classmethod
    def of(
        cls, name: str, step: int, manifest: Manifest | None, *, marked: bool = False, written: float = 0.0
    ) -> Saved:
        """Return the facts of the manifest; without one, the step and the time."""
        if manifest is None:
            return cls(name, step, written=written)
        origin = manifest.parent if manifest.origin is None else manifest.origin
        own = manifest.number, manifest.attempt, manifest.parent, origin, marked, manifest.created
        return cls(name, manifest.step, *own)


def newest_first(found: Sequence[Saved], named: str = "") -> list[Saved]:
    """Order the checkpoints of a run, the newest first.

    The newest is the one that ``latest`` names, or else the last commit. A later commit that still has its marker is
    newer: its run was killed before it wrote ``latest``. The checkpoints that these were trained from follow, from
    parent to parent; then others by step, from which they may have been trained; then the commits of later steps than
    the last parent's, which a run has abandoned when it went back. Clocks do not count, except without ``latest`` to
    place a checkpoint that is not a commit: before the commits that are neither of a later step nor of a later time.

    Args:
        found: The checkpoints; checkpoints that nothing else orders keep this order.
        named: The one that ``latest`` names; "" without one.
    """
    if not found:
        return []
    latest = next((one for one in found if one.name == named), None)
    head = latest or max(found, key=lambda one: (one.number, one.step))
    order: list[Saved] = []
    if latest is not None:
        marked = [one for one in found if one.marked and one.name != named]
        order = [one for one in marked if not one.number or one.parent == latest.attempt]
        order.sort(key=lambda one: (one.number, one.step), reverse=True)
    tail = head
    by_attempt = {one.attempt: one for one in found if one.attempt}
    while tail not in order:
        order.append(tail)
        tail = by_attempt.get(tail.origin, tail)
    rest = [one for one in found if one not in order]
    abandoned = {one.name for one in rest if one.number and one.step > tail.step}
    rest.sort(key=lambda one: (one.name not in abandoned, one.step, one.number), reverse=True)
    loose = [one for one in rest if not one.number and one.written] if latest is None and head.number else []
    order += [one for one in rest if one not in loose]
    for one in loose:
        newer = (one.step >= c.step and one.written > c.written for c in order)
        places = (n for n, c in enumerate(order) if next(newer) or c.name in abandoned)
        order.insert(next(places, len(order)), one)
    return order


def last_after(found: Sequence[Saved], named: str) -> str:
    """Return the last checkpoint that was trained from the one that ``latest`` names; else that one.

    A user may have set ``latest`` back: until a run saves again, nothing has been abandoned.
    """
    current = next((one for one in found if one.name == named), None)
    passed = set()
    while current is not None and current.attempt and current.name not in passed:
        passed.add(current.name)
        after = [one for one in found if one.origin == current.attempt]
        current = max(after, key=lambda one: (one.number, one.step), default=None)
        named = named if current is None else current.name
    return named


def may_follow(found: Sequence[Saved], named: str) -> str:
    """Return the last commit that may have been trained from the one that ``latest`` names; "" without one.

    Rotation, or a copy that was cut off before ``latest``, leaves out commits between them: their numbers show that the
    chain of parents may lead to it. A commit that another branch has abandoned has a parent of a number that is there.
    """
    current = next((one for one in found if one.name == named), None)
    if current is None or not current.number:
        return ""
    by_attempt = {one.attempt: one for one in found if one.attempt}
    later = []
    for one in found:
        first = one
        while (above := by_attempt.get(first.parent)) is not None and above.number < first.number:
            first = above
        if first.number - 1 > current.number:
            later.append(one)
    return max(later, key=lambda one: (one.number, one.step)).name if later else ""


def candidates(storage: Storage, root: str) -> list[Found]:
    """Return the checkpoints from which a run can resume, best first.

    The order is the same as in ``newest_first``. Unfinished saves, damaged checkpoints that
    a save has moved, and links not followed by the storage, are omitted.

    Raises:
        StorageError: The root cannot be read.
        LinkError: ``latest`` is or names a link that the storage does not follow.
    """
    missing: StorageError | None = None
    for _ in range(ATTEMPTS):
        before = _entries(storage, root)
        try:
            missing, found = None, _candidates(storage, root)
        except StorageError as error:
            if error.problem != MISSING:
                raise
            missing, found = error, []
        if found:
            return found
        # A checkpoint that a save or a prune renames or removes meanwhile might be missed, and the run would start from
        # scratch.
        storage.refresh([])
        if missing is None and _entries(storage, root) == before:
            return []
    if missing is not None:
        raise missing
    return []


def of_folder(storage: Storage, folder: str) -> list[Found]:
    """Return the checkpoints in the folder of a trainer, best first: the folder itself, if it is one of FSDP2 or DDP.

    Raises:
        StorageError: The folder cannot be read.
    """
    own = Found(storage, *posixpath.split(folder.rstrip("/")))
    names = {entry.name for entry in _entries(storage, folder)}
    committed = MANIFEST in names and own.committed  # also with the marker of a save that died after the commit
    alone = _is_fsdp2(storage, folder, names) or _has_state_files(names)
    return [own] if committed or (alone and not own.marked) else candidates(storage, folder)


def _is_fsdp2(storage: Storage, folder: str, names: set[str]) -> bool:
    """Return whether a folder has all that Lightning, or Accelerate, saves of FSDP2, by the files written last."""
    pair = {ACCELERATE_MODEL, ACCELERATE_OPTIMIZER}
    whole_pair = pair <= names and all(storage.exists(posixpath.join(folder, name, METADATA)) for name in pair)
    return whole_pair or {METADATA, LIGHTNING_STATE} <= names


def _has_state_files(names: set[str]) -> bool:
    """Return whether a folder has the two files of a whole run, and the file that the framework writes after them."""
    kinds = (("optimizer.pt", "trainer_state.json"), ("optimizer.bin", "random_states_0.pkl"))
    return any({*kind} <= names for kind in kinds) and any(map(WEIGHTS.fullmatch, names)) and LATEST not in names


def _entries(storage: Storage, root: str) -> list[Entry]:
    return storage.listing(root) if storage.is_dir(root) else []


def _candidates(storage: Storage, root: str) -> list[Found]:
    here = Place(storage, root)
    found = {one.tag: one for one in here.saved}
    steps = _steps(storage, [*found.values()])
    saved = [Saved.of(tag, steps[tag], one.manifest, marked=one.marked) for tag, one in found.items()]
    saved.sort(key=lambda one: natural_order(one.name), reverse=True)
    return [found[one.name] for one in newest_first(saved, here.newest)]


def _steps(storage: Storage, found: Sequence[Found]) -> dict[str, int]:
    """Return the steps of checkpoints by their tags; -1 if unknown.

    The last number in the name of a tag is its step if all tags without a manifest have names of one pattern; else the
    step that its files record.
    """
    steps = {one.tag: one.step for one in found}
    plain = [one for one in found if not one.committed]
    if len({pattern_of(one.tag) for one in plain}) > 1:
        for one in plain:
            with contextlib.suppress(CkptError):
                recorded = open_checkpoint(one.path, storage=storage).step
                steps[one.tag] = steps[one.tag] if recorded is None else recorded
    return steps


def find(storage: Storage, root: str, tag: str | None) -> list[Found]:
    """Return the checkpoints to try, best first.

    Raises:
        CkptError: The root cannot be read, or contains no checkpoint of that tag.
    """
    storage.refresh([])
    if storage.exists(root) and not storage.is_dir(root):
        refuse_part(Place(storage, root))
        raise StorageError(root, "is a file", "pass a directory")
    if tag is None:
        return newest(storage, root)
    if not is_name(tag):
        raise LayoutError(root, f"holds no checkpoint of tag {brief(tag, 200)}", "pass the name of a tag, not a path")
    chosen = Found(storage, root, tag)
    if not storage.is_dir(chosen.path):
        names = ", ".join(one.tag for one in candidates(storage, root)) or "none"
        raise LayoutError(root, f"holds no checkpoint of tag {tag!r}", f"choose one of: {names}")
    return [chosen]


def newest(storage: Storage, root: str) -> list[Found]:
    """Return the ``candidates`` of a root; warn if ``latest`` names another checkpoint than the first of them.

    If ``latest`` names a checkpoint that is not there, it looks again after a moment: a client of NFS may see a new
    directory later than another one.

    Raises:
        CkptError: The root cannot be read.
    """
    refuse_several(Place(storage, root))
    found = candidates(storage, root)
    problem = contradiction(storage, root, found)
    if problem and (not found or Place(storage, root).newest not in {one.tag for one in found}):
        time.sleep(SECOND_LOOK)
        storage.refresh([])
        found = candidates(storage, root)
        problem = contradiction(storage, root, found)
    if problem:
        LOG.warning("%s: %s; resuming from %s", root, problem, found[0].tag if found else "nothing")
    elif not found and (below := Place(storage, root).below()):
        LOG.warning("%s: holds no checkpoint itself, but %s; nothing is restored", root, name_some(below, 5))
    return found


def contradiction(storage: Storage, root: str, found: Sequence[Found]) -> str:
    """Describe a contradiction between ``latest`` and the candidates or their steps; "" without one."""
    pointer = Place(storage, root).pointer
    latest = "" if pointer is None else posixpath.basename(pointer.path)
    if pointer is not None and pointer.error is not None:
        return f"{latest} cannot be read: {pointer.error.problem}"
    if pointer is not None and not is_name(pointer.tag):
        return f"{latest} names {brief(pointer.tag, 200)}, which is not a tag in this root"
    named = "." if pointer is None else posixpath.normpath(pointer.tag)
    steps = _steps(storage, found)
    if named not in {".", *(tag.removesuffix(REPLACED) for tag in steps), *steps}:
        there = storage.is_dir(posixpath.join(root, named))
        what = "which holds no finished checkpoint" if there else "which is not there"
        return f"{latest} names {brief(named, 200)}, {what}"
    if not found:
        return ""
    first = found[0].tag
    if named != first:
        # Without a valid latest the candidate of the last step is first.
        return f"{latest} names {named}, but {first} was committed after it" if named in steps else ""
    best = max(steps, key=lambda tag: steps[tag])
    if steps[best] > steps[first]:
        return f"{latest} names {first} of step {steps[first]}, but {best} has step {steps[best]}"
    return ""
