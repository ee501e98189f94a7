"""How many ranks save one checkpoint so that it is there as a whole, or not at all.

1. Every rank says what it is going to write; the first checks that they agree, that there is room, and marks the
   directory as unfinished.
2. Each writes its own files to their final place, durably.
3. Every rank says how that went. If all is well the first writes the manifest, which is the commit; then ``latest``;
   and takes the mark away. If not it removes the directory, and all ranks raise the same error.

A run that is killed in between leaves a directory with a mark and no manifest: readers refuse it, and the next save
under the same name clears it away.
"""

from __future__ import annotations

import json
import logging
import posixpath
import secrets
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.checksums import Checksums
from ckpttool.commit.manifest import REPLACED, Manifest, commits, is_commit, read_manifest
from ckpttool.commit.marks import ALIVE, TAKEN, TakenError, identity, is_alive, is_unfinished, read_mark
from ckpttool.errors import CkptError, StorageError
from ckpttool.formats.whole import is_whole
from ckpttool.saving import files as rank_files
from ckpttool.saving.coordination import RankError
from ckpttool.saving.files import put_new, take_over
from ckpttool.saving.payloads import HashedFile
from ckpttool.storage import MANIFEST, MARK, is_linked, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckpttool.saving.coordination import Ranks
    from ckpttool.saving.payloads import OutgoingFile
    from ckpttool.storage import Storage, WritableStorage

LOG = logging.getLogger("ckpttool")
LATEST = "latest"
ROOM = 1.02
"""Directories and the like take some, too."""
SEEN_WITHIN = 60.0
"""Seconds that file systems of networks may take to show one node what another wrote."""


WATCHED = 20.0
"""Seconds for which a directory that another machine saves is watched: if nothing changes in it, that has died."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be saved."""

    tag: str
    """Its name."""
    step: int
    """Steps of the engine."""
    stage: int
    """ZeRO stage."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    overwrite: bool = False
    """Whether to replace a checkpoint of that name."""
    groups: Sequence[Sequence[str]] = ()
    """As in the manifest."""
    before: tuple[str, int] | None = None
    """Attempt and number of the commit before it, where that has another root; None: as ``latest`` tells."""
    beside: Mapping[str, bytes] = field(default_factory=dict)
    """Small files that lie in the root."""
    sign_key: bytes | None = field(default=None, repr=False)
    """Signs the manifest."""


def save(
    storage: WritableStorage,
    root: str,
    ranks: Ranks,
    request: Request,
    files: Sequence[OutgoingFile],
    *,
    timeout: float,
    failed: CkptError | None = None,
) -> Manifest:
    """Save one checkpoint, on every rank.

    Args:
        storage: Where.
        root: The directory of all checkpoints.
        ranks: Who takes part.
        request: The same on all ranks, but for what is said of the first.
        files: What this rank writes.
        timeout: Seconds that a rank may be behind the first.
        failed: Why this rank cannot take part.

    Raises:
        RankError: A rank failed or was not heard of; nothing was committed.
        CkptError: The checkpoint is there already, or there is no room for it.
    """
    directory = posixpath.join(root, request.tag)
    said = {
        "tag": request.tag,
        "step": request.step,
        "nbytes": sum(f.nbytes for f in files),
        "names": [f.name for f in files],
        "error": _as_text(failed),
    }
    claimed: list[str] = []
    try:
        attempt = ranks.agree(
            directory,
            said,
            lambda all_said: _claim(storage, root, directory, request, all_said, claimed),
            timeout=timeout,
        )
        return _save(storage, root, ranks, request, files, attempt, timeout)
    finally:
        ALIVE.difference_update(claimed)


def _save(
    storage: WritableStorage, root: str, ranks: Ranks, request: Request, files: Sequence[OutgoingFile], attempt: str,
    timeout: float,
) -> Manifest:  # fmt: skip
    """The part of a save behind the claim."""
    directory = posixpath.join(root, request.tag)
    done: dict[str, Any] = {"files": {}, "error": None}
    try:
        if ranks.rank:
            _see_mark(storage, directory, attempt)
        else:
            _check_ours(storage, directory, attempt)
        check = partial(_check_ours, storage, directory, attempt)
        outgoing: Sequence[OutgoingFile] = files if request.sign_key is None else [HashedFile(file) for file in files]
        for file, sums in zip(outgoing, rank_files.write_files(storage, directory, outgoing, check), strict=True):
            done["files"][file.name] = _as_said(sums)
    except CkptError as error:
        done["error"] = str(error)
    except Exception as error:  # the other ranks wait to hear of it
        LOG.exception("this rank's files were not written")
        done["error"] = f"{type(error).__name__}: {error}"
    found = ranks.agree(
        directory,
        done,
        lambda all_said: _finish(storage, root, directory, request, attempt, all_said),
        timeout=timeout,
        last=True,
    )
    return Manifest(**found)


def _as_said(sums: Checksums) -> list[Any]:
    """Checksums as ranks tell them to the first."""
    return [sums.nbytes, sums.chunk_bytes, list(sums.crcs), sums.directory, [digest.hex() for digest in sums.sha256]]


def _heard(said: Sequence[Any]) -> Checksums:
    nbytes, size, crcs, directory, sha256 = said
    return Checksums(
        nbytes, size, tuple(crcs), None if directory is None else tuple(directory), tuple(map(bytes.fromhex, sha256))
    )


def _as_text(error: CkptError | None) -> str | None:
    return None if error is None else str(error)


def _raise_failures(directory: str, said: list[Any]) -> None:
    failures = [(rank, one["error"]) for rank, one in enumerate(said) if one["error"]]
    if failures:
        rank, text = failures[0]
        more = f" (and {len(failures) - 1} more ranks)" if len(failures) > 1 else ""
        raise RankError(directory, f"was not saved: rank {rank}: {text}{more}", "nothing was committed")


def _claim(
    storage: WritableStorage, root: str, directory: str, request: Request, said: list[Any], claimed: list[str]
) -> str:
    """See that a save can begin, and mark its directory; what the mark says."""
    _raise_failures(directory, said)
    for rank, one in enumerate(said):
        if (one["tag"], one["step"]) != (request.tag, request.step):
            problem = f"rank 0 saves it at step {request.step}, rank {rank} {one['tag']!r} at step {one['step']}"
            raise RankError(directory, problem, "give all ranks the same tag at the same step")
    names = [name for one in said for name in one["names"]]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise RankError(directory, f"two ranks would write {twice}", "this is a bug in ckpttool")
    storage.make_directory(root)
    if is_linked(storage, root, directory):
        raise StorageError(directory, "is reached through a link", "choose another tag, or remove the link")
    found = _look(storage, directory, request)
    needed, free = int(ROOM * sum(one["nbytes"] for one in said)), storage.free_bytes(root)
    if free is not None and free < needed:
        problem = f"takes {needed:,} bytes, and only {free:,} are free"
        raise StorageError(directory, problem, "free some space, keep fewer checkpoints, or choose another root")
    attempt = secrets.token_hex(8)
    mark = json.dumps({"key": f"save {attempt}", "files": [], **identity()}).encode()
    claimed.append(attempt)
    ALIVE.add(attempt)
    if found == "unfinished":
        take_over(storage, directory, mark)
        return attempt
    if found == "replaced":
        _make_way(storage, root, directory)
    try:
        storage.make_directory(directory)
        put_new(storage, posixpath.join(directory, MARK), mark)
    except TakenError:
        raise
    except CkptError:
        if found == "replaced":
            _try_each([partial(_remove_if_there, storage, directory), partial(_put_back, storage, directory)])
        raise
    return attempt


def _see_that_it_is_dead(storage: WritableStorage, directory: str) -> None:
    """Make sure that nobody saves into a directory any more.

    Raises:
        TakenError: Somebody does.
    """
    mark = read_mark(storage, directory)
    who = f"process {mark.get('process')} of {mark.get('host')}"
    taken = TakenError(directory, f"is being saved by {who}", TAKEN)
    alive = is_alive(mark)
    if alive:
        raise taken
    if alive is False:
        return
    before = _snapshot(storage, directory)
    end = time.monotonic() + WATCHED
    while time.monotonic() < end:
        time.sleep(1.0)
        if _snapshot(storage, directory) != before:
            raise taken


def _snapshot(storage: WritableStorage, directory: str) -> list[tuple[Any, ...]]:
    storage.refresh([])
    try:
        return [(name, entry.nbytes, entry.version) for name, entry in walk(storage, directory)]
    except StorageError:
        return []


def _look(storage: WritableStorage, directory: str, request: Request) -> str:
    """See to what lies where a checkpoint is to be: "", "unfinished" or "replaced"."""
    if not storage.is_dir(directory):
        if storage.exists(directory):
            raise StorageError(directory, "is in the way and no directory", "move it, or choose another tag")
        return ""
    if not storage.listing(directory):
        return ""
    if is_unfinished(storage, directory):
        _see_that_it_is_dead(storage, directory)
        return "unfinished"
    if not request.overwrite:
        what = "is saved already" if is_commit(storage, directory) else "holds files that are none of this save's"
        raise StorageError(directory, what, "choose another tag, or pass overwrite=True")
    if commits(storage, directory):
        raise StorageError(directory, "holds other checkpoints", "choose another tag")
    return "replaced"


def _make_way(storage: WritableStorage, root: str, directory: str) -> None:
    """Set aside what is to be replaced, until that is done."""
    aside = f"{directory}{REPLACED}"
    if storage.exists(aside):
        if is_commit(storage, aside) and not is_commit(storage, directory):
            raise StorageError(aside, "may be the only whole checkpoint of this name", "choose another tag, or move it")
        if is_commit(storage, aside) and not is_whole(storage, directory):
            storage.remove_tree(directory)  # what was set aside is the better of the two
            return
        storage.remove_tree(aside)
    try:
        moved = storage.rename(directory, aside)
    except StorageError:
        if not storage.exists(directory):  # it was renamed, and that could not be made to last
            _try_each([partial(_put_back, storage, directory)])
        raise
    if not moved:
        if not any(c != directory for c in commits(storage, root)):
            problem = "is the only whole checkpoint, and a store cannot keep it while it is replaced"
            raise StorageError(directory, problem, "choose another tag")
        storage.remove_tree(directory)


def _is_ours(storage: WritableStorage, directory: str, attempt: str) -> bool:
    """Whether the mark still bears an attempt."""
    path = posixpath.join(directory, MARK)
    storage.refresh([])
    return storage.exists(path) and attempt in storage.read_text(path)


def _check_ours(storage: WritableStorage, directory: str, attempt: str) -> None:
    """Make sure that nobody has taken a directory over, who thought that we were dead.

    Raises:
        TakenError: Somebody has.
    """
    if not _is_ours(storage, directory, attempt):
        raise TakenError(directory, "was taken over by another process while it was being saved", TAKEN)


def _see_mark(storage: Storage, directory: str, attempt: str) -> None:
    """Make sure that this rank sees what the first wrote.

    Raises:
        StorageError: It does not.
    """
    path = posixpath.join(directory, MARK)
    end = time.monotonic() + SEEN_WITHIN
    while True:
        storage.refresh([path])
        try:
            if storage.exists(path) and attempt in storage.read_text(path):
                return
        except StorageError:
            pass  # it may come yet
        if time.monotonic() > end:
            problem = "is not seen by all ranks: rank 0 made it"
            raise StorageError(directory, problem, "choose a root that all nodes share")
        time.sleep(0.05)


def _finish(
    storage: WritableStorage, root: str, directory: str, request: Request, attempt: str, said: list[Any]
) -> dict[str, Any]:  # fmt: skip
    """Commit, or clear away; what the manifest says, but for the files."""
    latest = posixpath.join(root, LATEST)
    named: str | None = None
    written = False
    try:
        _raise_failures(directory, said)
        files = {name: _heard(f) for one in said for name, f in one["files"].items()}
        bare = next((name for name, sums in files.items() if len(sums.sha256) != len(sums.crcs)), None)
        if request.sign_key is not None and bare is not None:
            raise RankError(directory, f"no rank computed the SHA-256 of {bare}", "give all ranks the same sign_key")
        values: dict[str, Any] = {
            "tag": request.tag,
            "step": request.step,
            "created": time.time(),
            "attempt": attempt,
            "world_size": len(said),
            "stage": request.stage,
            "metrics": dict(request.metrics),
            "versions": dict(request.versions),
            "groups": [list(names) for names in request.groups],
        }
        for name, data in request.beside.items():
            if not storage.exists(posixpath.join(root, name)):
                storage.put(posixpath.join(root, name), data)
        _check_ours(storage, directory, attempt)
        named = storage.read_text(latest) if storage.exists(latest) else None
        values |= _descent(storage, root, named, request)
        put_new(storage, posixpath.join(directory, MANIFEST), Manifest(**values, files=files).to_json(request.sign_key))
        _check_ours(storage, directory, attempt)  # who takes over changes the mark first, and looks for a manifest then
        written = True
        storage.put(latest, request.tag.encode())
    except CkptError:
        if not _is_still_ours(storage, directory, attempt):
            raise  # what lies there is another's
        # All ranks have ended: nobody writes there any more.
        undo = [partial(storage.remove_tree, directory), partial(_put_back, storage, directory)]
        if written:
            undo.append(
                partial(storage.delete, [latest]) if named is None else partial(storage.put, latest, named.encode())
            )
        _try_each(undo)
        raise
    # It is committed, whatever becomes of the rest: ``tidy`` sees to that again.
    _try_each(
        [partial(storage.delete, [posixpath.join(directory, MARK)]), partial(_forget_replaced, storage, directory)]
    )
    return values


def _descent(storage: Storage, root: str, named: str | None, request: Request) -> dict[str, Any]:
    """What a manifest says of the commit before it."""
    if request.before is not None:
        return {"parent": request.before[0], "number": request.before[1] + 1}
    before = (named or "").strip()
    for directory in (posixpath.join(root, before), f"{posixpath.join(root, before)}{REPLACED}") if before else ():
        try:
            if (before != request.tag or directory.endswith(REPLACED)) and is_commit(storage, directory):
                parent = read_manifest(storage, directory)
                return {"parent": parent.attempt, "number": parent.number + 1}
        except CkptError:  # it may be none of ours
            continue
    return {"parent": "", "number": 1}


def _is_still_ours(storage: WritableStorage, directory: str, attempt: str) -> bool:
    try:
        return _is_ours(storage, directory, attempt)
    except CkptError:
        return False  # nobody knows: what is left has a mark


def _remove_if_there(storage: WritableStorage, directory: str) -> None:
    if storage.exists(directory):
        storage.remove_tree(directory)


def _put_back(storage: WritableStorage, directory: str) -> None:
    if storage.exists(f"{directory}{REPLACED}"):
        storage.rename(f"{directory}{REPLACED}", directory)


def _forget_replaced(storage: WritableStorage, directory: str) -> None:
    if storage.exists(f"{directory}{REPLACED}"):
        storage.remove_tree(f"{directory}{REPLACED}")


def _try_each(steps: Sequence[Callable[[], None]]) -> None:
    for step in steps:
        try:
            step()
        except CkptError as error:
            LOG.warning("could not clear away after a save: %s", error)


def settle(storage: WritableStorage, root: str, tag: str) -> None:
    """What is left to do when a checkpoint is committed; a run may have been killed before it.

    Raises:
        StorageError: The storage fails.
    """
    storage.put(posixpath.join(root, LATEST), tag.encode())
    if not is_linked(storage, root, posixpath.join(root, tag)):  # else it is of another root
        storage.delete([posixpath.join(root, tag, MARK)])
