"""Save one checkpoint from many ranks in two phases, so that it is complete or does not exist.

1. Every rank sends the list of its files. Rank 0 checks that the ranks agree and that the storage has enough space, and
   writes the in-progress marker into the directory.
2. Every rank writes its own files to their final paths, durably.
3. Every rank sends its result. If all ranks have succeeded, rank 0 writes the files that describe the others, if there
   are any; the manifest, which is the commit; then ``latest``, and deletes the marker. Otherwise rank 0 removes the
   directory, and all ranks raise the same error.

A killed run leaves a directory with a marker and without a manifest: readers refuse it, and the next save of the same
tag removes it.
"""

from __future__ import annotations

import logging
import posixpath
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ckpttool.commit import is_commit
from ckpttool.commit.manifest import REPLACED, Manifest, checksums_of, entry_of, read_manifest
from ckpttool.concurrency import Lazy, in_threads
from ckpttool.errors import CkptError, StorageError
from ckpttool.formats.scan import commits, scan, tag_in
from ckpttool.formats.unfinished import saved_by_another
from ckpttool.saving import files as rank_files
from ckpttool.saving.claim import Claim
from ckpttool.saving.coordination import RankError
from ckpttool.saving.files import put_new
from ckpttool.storage import LATEST, MANIFEST, MARK, find_text, is_linked
from ckpttool.units import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.saving.claim import Skipped
    from ckpttool.saving.coordination import Ranks
    from ckpttool.saving.files import OutgoingFile
    from ckpttool.storage import Storage, WritableStorage

LOG = logging.getLogger("ckpttool")
SPACE_FACTOR = 1.02
"""Required free space, as a multiple of the files' bytes; directories and metadata take space too."""


class Index(Protocol):
    """The files that describe the files of all ranks; rank 0 writes them after all others."""

    own: Any
    """The description of this rank's files: JSON data."""

    def check(self, own: Sequence[Any]) -> None:
        """Check on rank 0, before the first byte is written, that the files of all ranks fit together.

        Raises:
            CkptError: They do not.
        """

    def agree(self) -> None:
        """Note on every rank that rank 0 has checked the descriptions."""

    def files(self) -> Sequence[OutgoingFile]:
        """Return the files of rank 0."""


class ManifestRecord(Protocol):
    """The fields of an extension in the manifest."""

    def message(self) -> Any:
        """Return the message of this rank to rank 0, as JSON data; called in another thread, and never raises."""

    def fields(self, messages: Sequence[Any]) -> Mapping[str, Mapping[str, Any]]:
        """Return on rank 0, from the messages of all ranks, fields of the manifest by engine; of one alone under ""."""


@dataclass(frozen=True, slots=True)
class Request:
    """A checkpoint to save."""

    tag: str
    """Name of the checkpoint."""
    step: int
    """Steps of the engine."""
    stage: int | None
    """ZeRO stage; None for a run without DeepSpeed."""
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
    engines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """``Manifest.engines``, without the fields of records."""
    latest: bool = True
    """Whether to name the checkpoint in ``latest``."""
    before: tuple[str, int] | None = None
    """Attempt and number of the previous commit if it has another root; None for the commit that ``latest`` names."""
    parent: tuple[str, str] | None = None
    """Attempt of the commit that the run was restored from ("" for another checkpoint), and the tag that ``latest``
    named then; None for the previous commit, as also if another run has saved since."""
    skipped: Skipped | None = None
    """The checkpoint of the same tag that a restore of this run has skipped: it is moved aside."""
    sidecars: Mapping[str, bytes] = field(default_factory=dict)
    """Sidecar files of the root, by name; those that exist are kept."""
    root_files: Mapping[str, bytes] = field(default_factory=dict)
    """Files of the root that this rank writes before the commit, by path relative to the root; existing ones are
    replaced."""


def save(
    storage: WritableStorage,
    root: str,
    ranks: Ranks,
    request: Request,
    files: Sequence[OutgoingFile],
    *,
    failed: CkptError | None = None,
    records: Sequence[ManifestRecord] = (),
    index: Index | None = None,
) -> Manifest:
    """Save one checkpoint; call it on every rank.

    Args:
        storage: Storage of the checkpoint.
        root: The directory of all checkpoints.
        ranks: The ranks of the run.
        request: The checkpoint. Tag and step must be the same on all ranks; ``root_files`` are each rank's own; other
            fields count on rank 0.
        files: The files of this rank.
        failed: Error of this rank that makes the save fail.
        records: What extensions add to the manifest; their messages are made while the files are written.
        index: The files that rank 0 writes after all others; None without.

    Raises:
        RankError: A rank failed or sent no message in time; nothing was committed.
        CkptError: The checkpoint exists, or the storage has too little space.
    """
    claim = Claim(storage, root, request.tag)
    refuse = partial(_not_saved, claim)
    messages = Lazy(lambda: [record.message() for record in records])
    if records:
        threading.Thread(target=messages, name="ckpttool-record", daemon=True).start()
    try:
        attempt = ranks.exchange(
            claim.directory,
            own=partial(_offer, request, files, failed, index),
            decide=partial(_begin, storage, claim, request, index),
            refuse=refuse,
        )
        if index is not None:
            index.agree()
        fields = ranks.exchange(
            claim.directory,
            own=lambda: _write(storage, ranks, claim, request, files, attempt) | {"records": messages()},
            decide=partial(_finish, storage, claim, request, index, records),
            refuse=refuse,
        )
        ranks.finish()
        return Manifest(**fields)
    finally:
        messages()  # which read the captured state: the caller releases it
        claim.release()


def _offer(
    request: Request, files: Sequence[OutgoingFile], failed: CkptError | None, index: Index | None
) -> dict[str, Any]:
    """Step 1, on every rank: return the names and the bytes of its files."""
    if failed is not None:
        raise failed
    names = [file.name for file in files]
    nbytes = sum(file.nbytes for file in files)
    told = None if index is None else index.own
    return {"tag": request.tag, "step": request.step, "nbytes": nbytes, "names": names, "index": told}


def _begin(
    storage: WritableStorage, claim: Claim, request: Request, index: Index | None, offers: Sequence[Mapping[str, Any]]
) -> str:
    """Step 1, on rank 0: check that the save can begin, and claim its directory; return the attempt's identifier.

    Raises:
        RankError: The ranks do not agree.
        StorageError: The directory must not be written, or the storage has too little space.
    """
    for rank, offer in enumerate(offers):
        if (offer["tag"], offer["step"]) != (request.tag, request.step):
            problem = f"rank 0 saves it at step {request.step}, rank {rank} {offer['tag']!r} at step {offer['step']}"
            raise RankError(claim.directory, problem, "give all ranks the same tag at the same step")
    names = [name for offer in offers for name in offer["names"]]
    if len(set(names)) != len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise RankError(claim.directory, f"two ranks would write {repeated}", "this is a bug in ckpttool")
    if index is not None:
        index.check([offer["index"] for offer in offers])
    storage.make_directory(claim.root)
    skipped = request.skipped
    state = claim.state(overwrite=request.overwrite, step=request.step, skipped=skipped)
    needed, free = int(SPACE_FACTOR * sum(offer["nbytes"] for offer in offers)), storage.free_bytes(claim.root)
    if free is not None and free < needed:
        problem = f"needs {format_size(needed)}, but only {format_size(free)} are free"
        raise StorageError(claim.directory, problem, "free some space, keep fewer checkpoints, or choose another root")
    attempt = claim.take(state)
    if claim.moved:
        why = f", because it cannot be restored: {claim.problem}" if claim.problem else ""
        text = "step %d is saved as %s; the checkpoint there is now %s%s"
        LOG.warning(text, request.step, request.tag, claim.moved, why)
    return attempt


def _write(
    storage: WritableStorage, ranks: Ranks, claim: Claim, request: Request, files: Sequence[OutgoingFile], attempt: str
) -> dict[str, Any]:
    """Step 2, on every rank: write its files; return their checksums."""
    if ranks.rank:
        claim.wait(attempt)
    else:
        claim.check()
    sums = rank_files.write_files(storage, claim.directory, files, claim.check, ranks.check_others)
    if request.root_files:
        claim.check()
        _write_root_files(storage, claim.root, request.root_files)
    return {"files": {file.name: entry_of(one) for file, one in zip(files, sums, strict=True)}}


def _finish(
    storage: WritableStorage,
    claim: Claim,
    request: Request,
    index: Index | None,
    records: Sequence[ManifestRecord],
    results: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Step 3, on rank 0: commit the save, or remove its files; return the fields of the manifest without the files.

    Raises:
        CkptError: The commit failed.
    """
    latest = posixpath.join(claim.root, LATEST)
    named: str | None = None
    committed = False
    try:
        files = {name: checksums_of(one) for result in results for name, one in result["files"].items()}
        if index is not None:
            last = index.files()
            sums = rank_files.write_files(storage, claim.directory, last, claim.check)
            files |= {file.name: one for file, one in zip(last, sums, strict=True)}
        _write_sidecars(storage, claim.root, request.sidecars)
        claim.check()
        named = find_text(storage, latest)
        fields = _manifest_fields(request, claim.attempt, len(results)) | _parent_fields(storage, claim, named, request)
        added = [one.fields([result["records"][n] for result in results]) for n, one in enumerate(records)]
        own = {name: {k: v for one in added for k, v in one.get(name, {}).items()} for name in ("", *request.engines)}
        engines = {name: {**facts, **own[name]} for name, facts in request.engines.items()}
        manifest = Manifest(**fields, **own[""], files=files, engines=engines).to_json()
        put_new(storage, posixpath.join(claim.directory, MANIFEST), manifest)
        # A process that takes over first replaces the marker, then looks for a manifest.
        claim.check()
        committed = True
        if request.latest:
            _settle_other(storage, claim.root, tag_in(named or ""))
            storage.put(latest, request.tag.encode())
    except CkptError:
        # All ranks have sent their results, so no rank writes any more.
        if not committed:
            claim.undo()
        elif named is None:
            claim.undo(partial(storage.delete, [latest]))
        else:
            claim.undo(partial(storage.put, latest, named.encode()))
        raise
    claim.commit()  # the checkpoint is committed even if this fails
    return fields


def _manifest_fields(request: Request, attempt: str, ranks: int) -> dict[str, Any]:
    return {
        "tag": request.tag,
        "step": request.step,
        "created": time.time(),
        "attempt": attempt,
        "world_size": ranks,
        "stage": request.stage,
        "metrics": dict(request.metrics),
        "versions": dict(request.versions),
        "groups": [list(names) for names in request.groups],
        "optimizer": request.optimizer,
        "batch": dict(request.batch),
        "provenance": dict(request.provenance),
    }


def _parent_fields(storage: Storage, claim: Claim, named: str | None, request: Request) -> dict[str, Any]:
    """Return the fields of the manifest that name the previous commit."""
    root = claim.root
    moved = _parent_of_moved(storage, claim) if claim.moved and tag_in(named or "") == request.tag else None
    fields = moved or _after_last(storage, root, named, request)
    same = request.parent is not None and request.parent[1] == tag_in(named or "")
    return {**fields, "origin": request.parent[0]} if request.parent is not None and same else fields


def _after_last(storage: Storage, root: str, named: str | None, request: Request) -> dict[str, Any]:
    """Return the fields of a save after the previous commit of the run."""
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


def _parent_of_moved(storage: Storage, claim: Claim) -> dict[str, Any] | None:
    """Return the fields of the manifest of the checkpoint that was moved; if it is damaged, after the last commit."""
    try:
        moved = read_manifest(storage, claim.moved)
    except CkptError:
        manifests = [one.manifest for one in commits(scan(storage, claim.root)) if one.manifest is not None]
        last = max(manifests, key=lambda manifest: manifest.number, default=None)
        return None if last is None else {"parent": last.attempt, "number": last.number + 1}
    return {"parent": moved.parent, "number": moved.number}


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
    tasks = (partial(storage.put, path, data) for path, data in paths.items() if not storage.exists(path))
    for _ in in_threads(tasks, jobs=2 if storage.remote else 1):
        pass


def _not_saved(claim: Claim, failures: Mapping[int, CkptError]) -> RankError:
    """Remove the files of a save that failed on some ranks; return its error, on rank 0."""
    if claim.attempt:
        claim.undo()  # all ranks have sent a result or an error, so no rank writes any more
    rank, first = next(iter(failures.items()))
    text = first.problem if first.path == claim.directory else str(first)
    more = f" (and {len(failures) - 1} more ranks)" if len(failures) > 1 else ""
    return RankError(claim.directory, f"was not saved: rank {rank}: {text}{more}", "nothing was committed")


def _settle_other(storage: WritableStorage, root: str, tag: str) -> None:
    """Delete the marker of a killed save if another program has saved its tag since, while ``latest`` shows it."""
    directory = posixpath.join(root, tag)
    if tag and not is_linked(storage, root, directory) and saved_by_another(storage, directory):
        storage.delete([posixpath.join(directory, MARK)])


def settle(storage: WritableStorage, root: str, tag: str) -> None:
    """Write ``latest`` and delete the in-progress marker of a committed checkpoint; repeats the steps of a killed run.

    Raises:
        StorageError: The storage fails.
    """
    storage.put(posixpath.join(root, LATEST), tag.encode())
    if not is_linked(storage, root, posixpath.join(root, tag)):  # through a link the checkpoint belongs to another root
        storage.delete([posixpath.join(root, tag, MARK)])
