"""Save one checkpoint from many ranks in two phases, so that it is complete or does not exist.

1. Every rank sends the list of its files. Rank 0 checks that the ranks agree and that the storage has enough space, and
   writes the in-progress marker into the directory.
2. Every rank writes its own files to their final paths, durably.
3. Every rank sends its result. If all ranks have succeeded, rank 0 writes the manifest, which is the commit, then
   ``latest``, and deletes the marker. Otherwise rank 0 removes the directory, and all ranks raise the same error.

A killed run leaves a directory with a marker and without a manifest: readers refuse it, and the next save of the same
tag removes it.
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
from ckpttool.commit import is_commit, read_mark
from ckpttool.commit.manifest import REPLACED, Manifest, read_manifest
from ckpttool.commit.marks import ALIVE, TAKEN, TakenError, identity, is_alive, is_unfinished
from ckpttool.errors import CkptError, StorageError
from ckpttool.formats.scan import commits, scan, tag_in
from ckpttool.formats.whole import is_whole
from ckpttool.saving import files as rank_files
from ckpttool.saving.coordination import RankError
from ckpttool.saving.files import HashedFile, put_new, take_over
from ckpttool.storage import LATEST, MANIFEST, MARK, find_text, is_linked, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckpttool.saving.coordination import Ranks
    from ckpttool.saving.files import OutgoingFile
    from ckpttool.storage import Storage, WritableStorage

LOG = logging.getLogger("ckpttool")
SPACE_FACTOR = 1.02
"""Required free space, as a multiple of the files' bytes; directories and metadata take space too."""
SEEN_WITHIN = 60.0
"""Seconds that a network file system may take to show a file to other nodes."""


WATCH_SECONDS = 20.0
"""Seconds to watch the directory of another machine's save; without a change the save is dead."""


@dataclass(frozen=True, slots=True)
class Request:
    """A checkpoint to save."""

    tag: str
    """Name of the checkpoint."""
    step: int
    """Steps of the engine."""
    stage: int
    """ZeRO stage."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    overwrite: bool = False
    """Whether to replace a checkpoint of the same tag."""
    groups: Sequence[Sequence[str]] = ()
    """``Manifest.groups``."""
    optimizer: str = ""
    """``Manifest.optimizer``."""
    batch: Mapping[str, int] = field(default_factory=dict)
    """``Manifest.batch``."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """``Manifest.provenance``."""
    before: tuple[str, int] | None = None
    """Attempt and number of the previous commit if it has another root; None for the commit that ``latest`` names."""
    sidecars: Mapping[str, bytes] = field(default_factory=dict)
    """Sidecar files of the root, by name; those that exist are kept."""
    root_files: Mapping[str, bytes] = field(default_factory=dict)
    """Files of the root that this rank writes before the commit, by path relative to the root; existing ones are
    replaced."""
    sign_key: bytes | None = field(default=None, repr=False)
    """Key that signs the manifest; None for no signature."""


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
    """Save one checkpoint; call it on every rank.

    Args:
        storage: Storage of the checkpoint.
        root: The directory of all checkpoints.
        ranks: The ranks of the run.
        request: The checkpoint. Tag, step and ``sign_key`` must be the same on all ranks; ``root_files`` are each
            rank's own; other fields count on rank 0.
        files: The files of this rank.
        timeout: Seconds that a rank may be behind rank 0.
        failed: Error of this rank that makes the save fail.

    Raises:
        RankError: A rank failed or sent no message in time; nothing was committed.
        CkptError: The checkpoint exists, or the storage has too little space.
    """
    directory = posixpath.join(root, request.tag)
    message = {
        "tag": request.tag,
        "step": request.step,
        "nbytes": sum(f.nbytes for f in files),
        "names": [f.name for f in files],
        "error": _as_text(failed),
    }
    attempts: list[str] = []
    try:
        attempt = ranks.agree(
            directory,
            message,
            lambda messages: _claim(storage, root, directory, request, messages, attempts),
            timeout=timeout,
        )
        return _save(storage, root, ranks, request, files, attempt, timeout)
    finally:
        ALIVE.difference_update(attempts)


def _save(
    storage: WritableStorage,
    root: str,
    ranks: Ranks,
    request: Request,
    files: Sequence[OutgoingFile],
    attempt: str,
    timeout: float,
) -> Manifest:
    """Write the files of this rank, and commit; ``attempt`` has claimed the directory."""
    directory = posixpath.join(root, request.tag)
    outcome: dict[str, Any] = {"files": {}, "error": None}
    try:
        if ranks.rank:
            _wait_for_mark(storage, directory, attempt)
        else:
            _check_ours(storage, directory, attempt)
        check = partial(_check_ours, storage, directory, attempt)
        outgoing: Sequence[OutgoingFile] = files if request.sign_key is None else [HashedFile(file) for file in files]
        for file, sums in zip(outgoing, rank_files.write_files(storage, directory, outgoing, check), strict=True):
            outcome["files"][file.name] = _to_message(sums)
        if request.root_files:
            check()
            _write_root_files(storage, root, request.root_files)
    except CkptError as error:
        outcome["error"] = str(error)
    except Exception as error:  # the other ranks wait for this rank's message
        LOG.exception("this rank's files were not written")
        outcome["error"] = f"{type(error).__name__}: {error}"
    fields = ranks.agree(
        directory,
        outcome,
        lambda messages: _finish(storage, root, directory, request, attempt, messages),
        timeout=timeout,
        last=True,
    )
    return Manifest(**fields)


def _write_root_files(storage: WritableStorage, root: str, files: Mapping[str, bytes]) -> None:
    for directory in sorted({posixpath.dirname(name) for name in files} - {""}):
        storage.make_directory(posixpath.join(root, directory))
    for name, data in files.items():
        storage.put(posixpath.join(root, name), data)


def _write_sidecars(storage: WritableStorage, root: str, sidecars: Mapping[str, bytes]) -> None:
    """Write the sidecar files that the root lacks."""
    paths = {posixpath.join(root, name): data for name, data in sidecars.items()}
    if paths:
        storage.refresh(list(paths))  # one listing for all of them
    for path in [path for path in paths if not storage.exists(path)]:
        storage.put(path, paths[path])


def _to_message(sums: Checksums) -> list[Any]:
    """Convert checksums to JSON data for the message to rank 0."""
    return [sums.nbytes, sums.chunk_bytes, list(sums.crcs), sums.directory, [digest.hex() for digest in sums.sha256]]


def _from_message(message: Sequence[Any]) -> Checksums:
    nbytes, size, crcs, directory, sha256 = message
    return Checksums(
        nbytes, size, tuple(crcs), None if directory is None else tuple(directory), tuple(map(bytes.fromhex, sha256))
    )


def _as_text(error: CkptError | None) -> str | None:
    return None if error is None else str(error)


def _raise_failures(directory: str, messages: list[Any]) -> None:
    failures = [(rank, message["error"]) for rank, message in enumerate(messages) if message["error"]]
    if failures:
        rank, text = failures[0]
        more = f" (and {len(failures) - 1} more ranks)" if len(failures) > 1 else ""
        raise RankError(directory, f"was not saved: rank {rank}: {text}{more}", "nothing was committed")


def _claim(
    storage: WritableStorage, root: str, directory: str, request: Request, messages: list[Any], attempts: list[str]
) -> str:
    """Check that a save can begin, and write the in-progress marker; return the identifier of the attempt."""
    _raise_failures(directory, messages)
    for rank, message in enumerate(messages):
        if (message["tag"], message["step"]) != (request.tag, request.step):
            problem = (
                f"rank 0 saves it at step {request.step}, rank {rank} {message['tag']!r} at step {message['step']}"
            )
            raise RankError(directory, problem, "give all ranks the same tag at the same step")
    names = [name for message in messages for name in message["names"]]
    if len(set(names)) != len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise RankError(directory, f"two ranks would write {repeated}", "this is a bug in ckpttool")
    storage.make_directory(root)
    if is_linked(storage, root, directory):
        raise StorageError(directory, "is reached through a link", "choose another tag, or remove the link")
    state = _directory_state(storage, directory, request)
    needed, free = int(SPACE_FACTOR * sum(message["nbytes"] for message in messages)), storage.free_bytes(root)
    if free is not None and free < needed:
        problem = f"needs {needed:,} bytes, but only {free:,} are free"
        raise StorageError(directory, problem, "free some space, keep fewer checkpoints, or choose another root")
    attempt = secrets.token_hex(8)
    mark = json.dumps({"key": f"save {attempt}", "files": [], **identity()}).encode()
    attempts.append(attempt)
    ALIVE.add(attempt)
    if state == "unfinished":
        take_over(storage, directory, mark)
        return attempt
    if state == "replaced":
        _rename_replaced(storage, root, directory)
    try:
        storage.make_directory(directory)
        put_new(storage, posixpath.join(directory, MARK), mark)
    except TakenError:
        raise
    except CkptError:
        if state == "replaced":
            _try_each([partial(_remove_if_there, storage, directory), partial(_restore_replaced, storage, directory)])
        raise
    return attempt


def _check_dead(storage: WritableStorage, directory: str) -> None:
    """Check that the save that wrote a directory's marker does not run any more.

    Raises:
        TakenError: The save still runs.
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
    end = time.monotonic() + WATCH_SECONDS
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


def _directory_state(storage: WritableStorage, directory: str, request: Request) -> str:
    """Return the state of the checkpoint's directory: "" (free), "unfinished" or "replaced"."""
    if not storage.is_dir(directory):
        if storage.exists(directory):
            raise StorageError(directory, "exists and is not a directory", "move it, or choose another tag")
        return ""
    if not storage.listing(directory):
        return ""
    if is_unfinished(storage, directory):
        _check_dead(storage, directory)
        return "unfinished"
    if not request.overwrite:
        what = "is saved already" if is_commit(storage, directory) else "holds other files"
        raise StorageError(directory, what, "choose another tag, or pass overwrite=True")
    if commits(scan(storage, directory)):
        raise StorageError(directory, "holds other checkpoints", "choose another tag")
    return "replaced"


def _rename_replaced(storage: WritableStorage, root: str, directory: str) -> None:
    """Rename the checkpoint to replace, until the new one is committed."""
    aside = f"{directory}{REPLACED}"
    if storage.exists(aside):
        if is_commit(storage, aside) and not is_commit(storage, directory):
            raise StorageError(aside, "may be the only whole checkpoint of this name", "choose another tag, or move it")
        if is_commit(storage, aside) and not is_whole(storage, directory):
            storage.remove_tree(directory)  # the renamed checkpoint is whole, this one is not
            return
        storage.remove_tree(aside)
    try:
        moved = storage.rename(directory, aside)
    except StorageError:
        if not storage.exists(directory):  # the rename succeeded, but its sync failed
            _try_each([partial(_restore_replaced, storage, directory)])
        raise
    if not moved:
        if not any(one.path != directory for one in commits(scan(storage, root))):
            problem = "is the only whole checkpoint, and this storage cannot keep it until the new one is committed"
            raise StorageError(directory, problem, "choose another tag")
        storage.remove_tree(directory)


def _is_ours(storage: WritableStorage, directory: str, attempt: str) -> bool:
    """Return whether the in-progress marker still names this attempt."""
    path = posixpath.join(directory, MARK)
    storage.refresh([])
    return attempt in (find_text(storage, path) or "")


def _check_ours(storage: WritableStorage, directory: str, attempt: str) -> None:
    """Check that no other process has taken over the directory, for example because this save seemed dead.

    Raises:
        TakenError: Another process has.
    """
    if not _is_ours(storage, directory, attempt):
        raise TakenError(directory, "was taken over by another process while it was being saved", TAKEN)


def _wait_for_mark(storage: Storage, directory: str, attempt: str) -> None:
    """Wait until this rank sees the in-progress marker of rank 0.

    Raises:
        StorageError: This rank does not see it in time.
    """
    path = posixpath.join(directory, MARK)
    end = time.monotonic() + SEEN_WITHIN
    while True:
        storage.refresh([path])
        try:
            if attempt in (find_text(storage, path) or ""):
                return
        except StorageError:
            pass  # the marker may still appear
        if time.monotonic() > end:
            problem = "was created by rank 0, but not all ranks see it"
            raise StorageError(directory, problem, "choose a root that all nodes share")
        time.sleep(0.05)


def _finish(
    storage: WritableStorage, root: str, directory: str, request: Request, attempt: str, messages: list[Any]
) -> dict[str, Any]:
    """Commit the save, or remove its files; return the fields of the manifest without the files."""
    latest = posixpath.join(root, LATEST)
    named: str | None = None
    written = False
    try:
        _raise_failures(directory, messages)
        files = {name: _from_message(f) for message in messages for name, f in message["files"].items()}
        unsigned = next((name for name, sums in files.items() if len(sums.sha256) != len(sums.crcs)), None)
        if request.sign_key is not None and unsigned is not None:
            raise RankError(
                directory, f"no rank computed the SHA-256 of {unsigned}", "give all ranks the same sign_key"
            )
        values: dict[str, Any] = {
            "tag": request.tag,
            "step": request.step,
            "created": time.time(),
            "attempt": attempt,
            "world_size": len(messages),
            "stage": request.stage,
            "metrics": dict(request.metrics),
            "versions": dict(request.versions),
            "groups": [list(names) for names in request.groups],
            "optimizer": request.optimizer,
            "batch": dict(request.batch),
            "provenance": dict(request.provenance),
        }
        _write_sidecars(storage, root, request.sidecars)
        _check_ours(storage, directory, attempt)
        named = find_text(storage, latest)
        values |= _parent_fields(storage, root, named, request)
        put_new(storage, posixpath.join(directory, MANIFEST), Manifest(**values, files=files).to_json(request.sign_key))
        # A process that takes over first replaces the marker, then looks for a manifest.
        _check_ours(storage, directory, attempt)
        written = True
        storage.put(latest, request.tag.encode())
    except CkptError:
        if not _is_still_ours(storage, directory, attempt):
            raise  # the files belong to another process
        # All ranks have sent their results: none of them writes any more.
        undo = [partial(storage.remove_tree, directory), partial(_restore_replaced, storage, directory)]
        if written:
            undo.append(
                partial(storage.delete, [latest]) if named is None else partial(storage.put, latest, named.encode())
            )
        _try_each(undo)
        raise
    # The checkpoint is committed even if a step below fails: ``tidy`` repeats these steps.
    _try_each(
        [partial(storage.delete, [posixpath.join(directory, MARK)]), partial(_remove_replaced, storage, directory)]
    )
    return values


def _parent_fields(storage: Storage, root: str, named: str | None, request: Request) -> dict[str, Any]:
    """Return the fields of the manifest that name the previous commit."""
    if request.before is not None:
        return {"parent": request.before[0], "number": request.before[1] + 1}
    before = tag_in(named or "")
    for directory in (posixpath.join(root, before), f"{posixpath.join(root, before)}{REPLACED}") if before else ():
        try:
            if (before != request.tag or directory.endswith(REPLACED)) and is_commit(storage, directory):
                parent = read_manifest(storage, directory)
                return {"parent": parent.attempt, "number": parent.number + 1}
        except CkptError:  # it may be a checkpoint without a valid manifest
            continue
    return {"parent": "", "number": 1}


def _is_still_ours(storage: WritableStorage, directory: str, attempt: str) -> bool:
    try:
        return _is_ours(storage, directory, attempt)
    except CkptError:
        return False  # unknown: the in-progress marker makes readers refuse the files


def _remove_if_there(storage: WritableStorage, directory: str) -> None:
    if storage.exists(directory):
        storage.remove_tree(directory)


def _restore_replaced(storage: WritableStorage, directory: str) -> None:
    if storage.exists(f"{directory}{REPLACED}"):
        storage.rename(f"{directory}{REPLACED}", directory)


def _remove_replaced(storage: WritableStorage, directory: str) -> None:
    if storage.exists(f"{directory}{REPLACED}"):
        storage.remove_tree(f"{directory}{REPLACED}")


def _try_each(steps: Sequence[Callable[[], None]]) -> None:
    for step in steps:
        try:
            step()
        except CkptError as error:
            LOG.warning("could not clear away after a save: %s", error)


def settle(storage: WritableStorage, root: str, tag: str) -> None:
    """Write ``latest`` and delete the in-progress marker of a committed checkpoint; repeats the steps of a killed run.

    Raises:
        StorageError: The storage fails.
    """
    storage.put(posixpath.join(root, LATEST), tag.encode())
    if not is_linked(storage, root, posixpath.join(root, tag)):  # through a link the checkpoint belongs to another root
        storage.delete([posixpath.join(root, tag, MARK)])
