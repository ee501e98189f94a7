"""Replace a checkpoint by its weights, in its own directory: no rename is needed, so that buckets work as disks do.

1. A marker (``THINNING``) claims the directory; it names the files to write and those to remove.
2. The files of the thin checkpoint are written beside the old ones, durably. Readers ignore them: the manifest, or
   DeepSpeed's files alone, still describe the whole checkpoint.
3. They are read back, and the digest of the weights is compared with that of the source cast to their type.
4. The manifest is replaced in one operation. **That is the commit**: before it the checkpoint is whole, from then on it
   is thin. The old manifest must not have changed meanwhile.
5. The old files are removed, then the marker.

Killed before the commit, the next run removes the new files; killed after it, the old ones.
"""

from __future__ import annotations

import contextlib
import json
import posixpath
import secrets
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.analysis.same_digests import same_weights
from ckpttool.catalog.retention import GRACE
from ckpttool.checksums import of_bytes
from ckpttool.commit import is_commit
from ckpttool.commit.manifest import Manifest, read_manifest
from ckpttool.commit.marks import ALIVE, PARTIAL, TAKEN, TakenError, identity, is_alive, is_old
from ckpttool.concurrency import default_jobs
from ckpttool.errors import ChecksumError, CkptError, LayoutError, PlanError, StorageError
from ckpttool.execution.check_copies import failed_checks
from ckpttool.execution.permissions import mode_of
from ckpttool.execution.read_checks import checks_for
from ckpttool.execution.sources import Sources
from ckpttool.execution.streaming import memory_bytes
from ckpttool.formats import open_checkpoint
from ckpttool.formats.locate import Location
from ckpttool.formats.rank_states import is_rank_state
from ckpttool.formats.thin import SUFFIX
from ckpttool.formats.weights import read_safetensors
from ckpttool.formats.whole import open_whole
from ckpttool.formats.zero.names import parse_name
from ckpttool.saving.files import write_files
from ckpttool.saving.payloads import HashedFile
from ckpttool.saving.planned import PlannedFile
from ckpttool.saving.two_phase import SPACE_FACTOR
from ckpttool.storage import BESIDE, MANIFEST, THINNING, connect, is_linked, walk
from ckpttool.targets.thin import plan_thin

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.checksums import Checksums
    from ckpttool.model import Checkpoint
    from ckpttool.saving.payloads import OutgoingFile
    from ckpttool.storage import Storage, WritableStorage
    from ckpttool.targets.thin import ThinPlan
    from ckpttool.units import Advance

MAX_MARK_BYTES = 1 << 26
"""Most bytes of a marker; one of a hundred thousand files is smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinOptions:
    """How to thin checkpoints."""

    dtype: str
    """Type of the weights: "bf16" or "fp32"."""
    jobs: int | None = None
    """Threads; None for the default of the storage."""
    memory: int = field(default_factory=lambda: memory_bytes(None))
    """Bytes of parts in flight."""
    key: bytes | None = field(default=None, repr=False)
    """Key of signed manifests: the old one must have been signed with it, and the new one is."""
    grace: float = GRACE
    """Seconds after which another machine's marker counts as left by a killed process."""


@dataclass(frozen=True, slots=True)
class Thinning:
    """A checkpoint that can be thinned, and what that would write."""

    checkpoint: Checkpoint
    """The checkpoint."""
    plan: ThinPlan
    """The files to write."""

    @property
    def freed(self) -> int:
        """Bytes that the directory loses; the manifest does not count."""
        storage = connect(self.checkpoint.storage)
        old = {name: entry.nbytes for name, entry in walk(storage, self.checkpoint.location)}
        return sum(old[name] for name in old_files(self.checkpoint, old)) - self.plan.nbytes

    def check_names(self, storage: Storage) -> None:
        """Check that no file of a user has the name of one to write; leftovers of a killed replacement may.

        Raises:
            CkptError: One has.
        """
        directory = self.checkpoint.location
        leftovers = _read_mark(storage, directory).get("files", ())
        names = {name for name, _ in walk(storage, directory)}.difference(leftovers)
        if taken := sorted({file.name for file in self.plan.files} & names):
            problem = f"holds {taken[0]}, which is in the way of the thin checkpoint's file"
            raise StorageError(directory, problem, "move it, or pin the checkpoint")


def plan_thinning(storage: Storage, path: str, options: ThinOptions) -> Thinning:
    """Open a checkpoint, and plan its thin files; nothing is written.

    Args:
        storage: Its storage, for reading.
        path: Its directory, or a trainer's ``checkpoint-N`` with it.
        options: Type of the weights, and the key.

    Raises:
        CkptError: The checkpoint is damaged, is no native ZeRO checkpoint, or is signed with another key or without the
            key.
    """
    checkpoint = open_checkpoint(path, storage=storage)
    if is_commit(storage, checkpoint.location):
        signed = read_manifest(storage, checkpoint.location).signed
        if signed and options.key is None:
            problem = "is signed: thinned without the key, it would lose its signature"
            raise PlanError(checkpoint.location, problem, "pass sign_key, or pin it", ("sign_key",))
        if signed:
            checkpoint = open_whole(storage, checkpoint.location, key=options.key)
    if is_linked(storage, path, checkpoint.location):
        raise PlanError(checkpoint.location, "is reached through a link", "thin the checkpoint that it leads to")
    if checkpoint.stage is None:
        raise PlanError(checkpoint.location, "is not a native ZeRO checkpoint", "only those are thinned")
    return Thinning(checkpoint, plan_thin(checkpoint, options.dtype))


def old_files(checkpoint: Checkpoint, names: Mapping[str, Any]) -> list[str]:
    """Return the files of a whole checkpoint among the names in its directory; files of users are none of them."""
    own = {file.name for file in checkpoint.files if file.directory is None}
    return [n for n in names if n in own or parse_name(posixpath.basename(n)) or is_rank_state(n)]


def thin(
    storage: WritableStorage, thinning: Thinning, options: ThinOptions, *, advance: Advance = lambda _: None
) -> str:  # fmt: skip
    """Replace a checkpoint by its weights; return the digest of the weights, equal for source and result.

    Args:
        storage: Its storage.
        thinning: The checkpoint and the plan.
        options: Type of the weights, threads, memory and key.
        advance: Called with the number of bytes written since the last call.

    Raises:
        TakenError: Another process thins it or saves there.
        CkptError: It cannot be read, or the thin files cannot be written or differ. The checkpoint is as it was, unless
            only the removal of old files failed: the next ``recover`` goes on with that.
    """
    return _Work(storage, thinning, options, advance).run()


class _Work:
    """One replacement."""

    def __init__(self, storage: WritableStorage, thinning: Thinning, options: ThinOptions, advance: Advance) -> None:
        self._storage = storage
        self._thinning = thinning
        self._checkpoint = thinning.checkpoint
        self._plan = thinning.plan
        self._options = options
        self._advance = advance
        self._directory = thinning.checkpoint.location
        self._token = secrets.token_hex(8)

    def run(self) -> str:
        storage, directory = self._storage, self._directory
        recover(storage, directory, grace=self._options.grace)
        storage.refresh([])
        names = dict(walk(storage, directory))
        self._thinning.check_names(storage)
        manifest = self._old_manifest(names)
        self._check_space()
        ALIVE.add(self._token)
        try:
            self._claim(old_files(self._checkpoint, names))
            try:
                sums = self._write()
                digest = self._compare(sums)
                self._commit(replace(manifest, files=sums, thin=self._options.dtype), names)
            except BaseException:
                # The answer to the commit may be lost: the manifest decides which files go.
                with contextlib.suppress(CkptError):
                    self._check_ours()
                    _finish(storage, directory, _read_mark(storage, directory))
                raise
            _finish(storage, directory, _read_mark(storage, directory))
        finally:
            ALIVE.discard(self._token)
        return digest

    def _old_manifest(self, names: Mapping[str, Any]) -> Manifest:
        """Return the manifest to replace, or one for a checkpoint that has none."""
        if MANIFEST in names:
            return read_manifest(self._storage, self._directory)  # ``plan_thinning`` has compared its signature
        c = self._checkpoint
        newest = max((entry.modified or 0.0 for entry in names.values()), default=0.0)
        return Manifest(
            tag=c.tag, step=c.step or 0, created=newest, attempt="", world_size=c.topology.world_size,
            stage=c.stage or 0,
        )  # fmt: skip

    def _check_space(self) -> None:
        needed, free = int(SPACE_FACTOR * self._plan.nbytes), self._storage.free_bytes(self._directory)
        if free is not None and free < needed:
            problem = f"needs {needed:,} bytes for its weights before the old files go, but only {free:,} are free"
            raise StorageError(self._directory, problem, "free some space, or remove a checkpoint first")

    def _claim(self, old: list[str]) -> None:
        mark = {"key": self._token, "files": [file.name for file in self._plan.files], "old": old, **identity()}
        if not self._storage.put_new(posixpath.join(self._directory, THINNING), json.dumps(mark).encode()):
            raise TakenError(self._directory, "is being thinned by another process", "wait for it")

    def _check_ours(self) -> None:
        """Check that the marker is still ours: not if a save has replaced the checkpoint meanwhile.

        Raises:
            TakenError: It is not.
        """
        self._storage.refresh([])
        if _read_mark(self._storage, self._directory).get("key") != self._token:
            raise TakenError(self._directory, "was taken over by another process while it was being thinned", TAKEN)

    def _write(self) -> dict[str, Checksums]:
        options = self._options
        found: dict[str, Checksums] = {}
        jobs = options.jobs or default_jobs(remote=self._checkpoint.storage.remote)
        for plan in self._plan.plans:
            checks = checks_for(plan.sources, self._checkpoint, "read")
            with Sources(plan.sources, checks) as sources:
                for problem in () if plan.consistency is None else failed_checks(
                    plan.consistency, advance=lambda _: None, sources=sources
                ):  # fmt: skip
                    raise problem
                make = partial(PlannedFile, plan, sources=sources, jobs=jobs, memory=options.memory)
                files: list[OutgoingFile] = [make(file, advance=self._advance) for file in plan.files]
                if options.key is not None:
                    files = [HashedFile(file) for file in files]
                sums = write_files(self._storage, self._directory, files, self._check_ours, mode_of(self._checkpoint))
                sources.finish_checks(jobs=jobs)
                sources.check_unchanged()
            found |= {file.name: checksums for file, checksums in zip(files, sums, strict=True)}
        return found

    def _compare(self, sums: Mapping[str, Checksums]) -> str:
        """Read the written files back, and compare them; return the digest of the weights.

        Raises:
            CkptError: They differ from the source.
        """
        storage, directory = self._storage, self._directory
        storage.refresh([])
        for name, expected in sums.items():
            if name.endswith(SUFFIX):
                continue
            with storage.open(posixpath.join(directory, name)) as reader:
                data = reader.read(0, reader.nbytes)
            if of_bytes(data) != expected._replace(sha256=(), directory=None):
                problem = "does not hold the bytes that were written"
                raise ChecksumError(posixpath.join(directory, name), problem, "a disk may be failing: try again")
        location = Location(self._checkpoint.root, directory, self._checkpoint.tag)
        written = read_safetensors(storage, location, sorted(n for n in sums if n.endswith(SUFFIX)))
        return same_weights(self._checkpoint, self._plan.selection.states, written, self._options.jobs)

    def _commit(self, manifest: Manifest, names: Mapping[str, Any]) -> None:
        self._check_ours()
        old = names.get(MANIFEST)
        data = manifest.to_json(self._options.key)
        path = posixpath.join(self._directory, MANIFEST)
        over = None if old is None else old.version
        if not self._storage.put_new(path, data, over=over, mode=mode_of(self._checkpoint)):
            raise TakenError(path, "was changed by another process while the checkpoint was being thinned", TAKEN)


# ------------------------------------------------------------------------------------------------- after a crash


def recover(storage: WritableStorage, directory: str, *, grace: float) -> bool:
    """Remove what a killed replacement has left: its new files, or after its commit the old ones.

    Args:
        storage: Storage of the checkpoint.
        directory: Its directory.
        grace: Seconds after which another machine's marker counts as left by a killed process.

    Returns:
        Whether there was something to remove.

    Raises:
        TakenError: The replacement may still run.
        StorageError: A file cannot be removed.
    """
    storage.refresh([])
    entries = storage.listing(directory)
    found = next((entry for entry in entries if entry.name == THINNING), None)
    if found is None:
        begun = [e for e in entries if e.name.startswith(f"{THINNING}.") and is_old(e.modified or 0.0, grace)]
        storage.delete([posixpath.join(directory, entry.name) for entry in begun])  # killed while it wrote the marker
        return bool(begun)
    mark = _read_mark(storage, directory)
    alive = is_alive(mark)
    if alive or (alive is None and not is_old(found.modified or 0.0, grace)):
        who = f"process {mark.get('process')} of {mark.get('host')}"
        raise TakenError(directory, f"is being thinned by {who}", "wait for it")
    _finish(storage, directory, mark)
    return True


def _finish(storage: WritableStorage, directory: str, mark: Mapping[str, Any]) -> None:
    """Remove the files that the manifest makes superfluous, then the marker."""
    storage.refresh([])
    committed = is_commit(storage, directory)
    manifest = read_manifest(storage, directory) if committed else None
    is_thin = manifest is not None and bool(manifest.thin)
    kept = BESIDE | {MANIFEST} | (set() if manifest is None else manifest.files.keys())
    goes = set(mark.get("old" if is_thin else "files", ())) - kept
    present = [name for name, _ in walk(storage, directory)]
    temporary = [n for n in present if n.endswith(PARTIAL) and _begins_with(n, mark.get("files", ()))]
    storage.abandon(directory)
    removed = [name for name in present if name in goes]
    storage.delete([posixpath.join(directory, name) for name in (*removed, *temporary)])
    for above in {name.split("/")[0] for name in removed if "/" in name}:
        path = posixpath.join(directory, above)
        if not storage.remote and not any(walk(storage, path)):
            storage.remove_tree(path)
    storage.delete([posixpath.join(directory, THINNING)])
    storage.refresh([])


def _begins_with(name: str, files: Sequence[str]) -> bool:
    return any(name.startswith(f"{file}.") for file in (*files, MANIFEST, THINNING))


def _read_mark(storage: Storage, directory: str) -> dict[str, Any]:
    """Return the fields of the marker; empty without one.

    Raises:
        StorageError: It cannot be read.
        LayoutError: It is damaged.
    """
    path = posixpath.join(directory, THINNING)
    if not storage.exists(path):
        return {}
    hint = "remove it if no prune runs"
    with storage.open(path) as reader:
        if reader.nbytes > MAX_MARK_BYTES:
            raise LayoutError(path, "is too large for a marker", hint)
        data = reader.read(0, reader.nbytes)
    try:
        found = json.loads(data)
        return {**found, **{key: [str(name) for name in found[key]] for key in ("files", "old")}}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LayoutError(path, "is not a marker of ckpttool", hint) from error
