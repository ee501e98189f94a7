"""Replace a checkpoint by its weights, in its own directory: no rename is needed, so that buckets work as disks do.

1. A marker (``THINNING``) claims the directory; it names the files to write and those to remove.
2. The files of the thin checkpoint are written beside the old ones, durably. Readers ignore them: the manifest, or
   only DeepSpeed's files, still describe the whole checkpoint.
3. They are read back, and the digest of the weights is compared with the digest of the source cast to their type.
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
from typing import TYPE_CHECKING, Any

from ckpttool.analysis.digest import same_weights
from ckpttool.catalog.retention import GRACE
from ckpttool.checksums import chunk_bytes, crc32, cuts, of_pieces
from ckpttool.commit import is_commit
from ckpttool.commit.manifest import Manifest, read_manifest
from ckpttool.commit.marks import ALIVE, TAKEN, TakenError, find_pin, identity, is_alive, is_old, own_files
from ckpttool.concurrency import default_jobs
from ckpttool.errors import ChecksumError, CkptError, LayoutError, PlanError, StorageError
from ckpttool.execution.checks import checks_for
from ckpttool.execution.permissions import mode_of, mode_of_file
from ckpttool.execution.run import MEMORY, Output, Work, run
from ckpttool.extensions.thinning.plan import plan_thin
from ckpttool.formats import open_checkpoint
from ckpttool.formats.chunk_index import CHUNK_INDEX
from ckpttool.formats.dcp import METADATA, SHARD, THIN_METADATA
from ckpttool.formats.fields import raise_at_once
from ckpttool.formats.location import Location
from ckpttool.formats.sidecars import is_rank_state
from ckpttool.formats.thin import SUFFIX
from ckpttool.formats.torch_run import read_run
from ckpttool.formats.weights import read_safetensors
from ckpttool.formats.zero.files import RUN_STATE, parse_name
from ckpttool.saving.files import ALREADY
from ckpttool.saving.two_phase import SPACE_FACTOR
from ckpttool.storage import BESIDE, MANIFEST, THINNING, ExistsError, Writer, connect, is_linked, read_json, walk
from ckpttool.storage.base import PinnedError
from ckpttool.storage.safe_files import is_temporary
from ckpttool.units import format_size

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ckpttool.checksums import Checksums
    from ckpttool.extensions.thinning.plan import ThinPlan
    from ckpttool.model import Checkpoint
    from ckpttool.plan import TargetFile
    from ckpttool.storage import Entry, Storage, WritableStorage
    from ckpttool.units import Advance

MAX_MARK_BYTES = 1 << 26
"""Most bytes of a marker; one of a hundred thousand files is smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinOptions:
    """Options of thinning."""

    dtype: str
    """Type of the weights: "bf16" or "fp32"."""
    jobs: int | None = None
    """Threads; None for the default of the storage."""
    memory: int = field(default=MEMORY)
    """Bytes of parts in flight."""
    grace: float = GRACE
    """Seconds after which another machine's marker counts as left by a killed process."""


@dataclass(frozen=True, slots=True)
class Thinning:
    """A checkpoint that can be thinned, and the files to write."""

    checkpoint: Checkpoint
    """The checkpoint."""
    plan: ThinPlan
    """The files to write."""
    options: ThinOptions
    """The options."""

    @property
    def nbytes(self) -> int:
        """Bytes of the files to write."""
        return self.plan.nbytes

    @property
    def freed(self) -> int:
        """Bytes that the directory loses; the manifest does not count."""
        storage = connect(self.checkpoint.storage)
        old = _names(storage, self.checkpoint.location)
        return sum(old[name].nbytes for name in old_files(self.checkpoint, old)) - self.plan.nbytes

    def check_names(self, storage: Storage) -> None:
        """Check that no file of a user has the name of one to write; leftovers of a killed replacement are allowed.

        Raises:
            CkptError: A file has.
        """
        directory = self.checkpoint.location
        leftovers = _read_mark(storage, directory).get("files", ())
        names = {name for name, _ in walk(storage, directory)}.difference(leftovers)
        if taken := sorted({file.name for file in self.plan.files} & names):
            problem = f"holds {taken[0]}, which is in the way of the thin checkpoint's file"
            raise StorageError(directory, problem, "move it, or pin the checkpoint")

    def carry_out(self, storage: WritableStorage, advance: Advance = lambda _: None) -> str:
        """Replace the checkpoint by its weights; return the digest of the weights, equal for source and result.

        Args:
            storage: Its storage.
            advance: Called with the number of bytes written since the last call.

        Raises:
            TakenError: Another process thins it or saves there.
            CkptError: It cannot be read, or the thin files cannot be written or differ. The checkpoint is as it was,
                unless only the removal of old files failed: the next ``recover`` continues it.
        """
        return _Work(storage, self, advance).thin()


def plan_thinning(storage: Storage, path: str, options: ThinOptions) -> Thinning:
    """Open a checkpoint, and plan its thin files; nothing is written.

    Args:
        storage: Its storage, for reading.
        path: Its directory, or a trainer's ``checkpoint-N`` with it.
        options: Type of the weights, and how it works.

    Raises:
        CkptError: The checkpoint is damaged or of another format.
    """
    checkpoint = open_checkpoint(path, storage=storage)
    if is_linked(storage, path, checkpoint.location):
        raise PlanError(checkpoint.location, "is reached through a link", "thin the target of the link")
    if checkpoint.stage is None and checkpoint.format != "dcp":
        problem = "is neither a native ZeRO checkpoint nor a distributed checkpoint of torch"
        raise PlanError(checkpoint.location, problem, "only those are thinned")
    return Thinning(checkpoint, plan_thin(checkpoint, options.dtype), options)


def _names(storage: Storage, directory: str) -> dict[str, Entry]:
    """Return the files in a directory and below it, by relative name. No link to a directory is followed."""
    return {
        posixpath.join(where.removeprefix(directory).strip("/"), entry.name): entry
        for where, entry in own_files(storage, directory)
    }


def old_files(checkpoint: Checkpoint, names: Mapping[str, Any]) -> list[str]:
    """Return the files of a whole checkpoint among the names in its directory.

    Files of users are not included, nor the files of other checkpoints below it.
    """
    own = {file.name for file in checkpoint.files if file.directory is None and file.name != RUN_STATE}
    directories = {posixpath.dirname(name) for name in own}
    beside = [name for name in names if posixpath.dirname(name) in directories]
    more = [n for n in beside if posixpath.basename(n) == CHUNK_INDEX or parse_name(posixpath.basename(n))]
    return [n for n in beside if n in {*own, *more} or is_rank_state(n)]


@dataclass(frozen=True, slots=True)
class _Work:
    """One replacement."""

    storage: WritableStorage
    thinning: Thinning
    advance: Advance
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def options(self) -> ThinOptions:
        return self.thinning.options

    @property
    def checkpoint(self) -> Checkpoint:
        return self.thinning.checkpoint

    @property
    def directory(self) -> str:
        return self.checkpoint.location

    def thin(self) -> str:
        storage, directory = self.storage, self.directory
        recover(storage, directory, grace=self.options.grace)
        storage.refresh([])
        names = _names(storage, directory)
        self.thinning.check_names(storage)
        manifest = self._old_manifest(names)
        self._check_space()
        ALIVE.add(self.token)
        try:
            old = old_files(self.checkpoint, names)
            self._claim(old)
            try:
                sums = self._write()
                self._read_back(sums)
                selected = self.thinning.plan.selection.states
                digest = same_weights(self.checkpoint, selected, self._written(sums), self.options.jobs)
                files = {name: own for name, own in manifest.files.items() if name not in old} | sums
                self._commit(replace(manifest, files=files, thin=self.options.dtype, digests=None), names)
            except BaseException:
                # The answer to the commit may be lost: the manifest decides which files to remove.
                with contextlib.suppress(CkptError):
                    self._check_ours()
                    _finish(storage, directory, _read_mark(storage, directory))
                raise
            _finish(storage, directory, _read_mark(storage, directory))
        finally:
            ALIVE.discard(self.token)
        return digest

    def _old_manifest(self, names: Mapping[str, Any]) -> Manifest:
        """Return the manifest to replace, or one for a checkpoint that has none."""
        if MANIFEST in names:
            return read_manifest(self.storage, self.directory)
        c = self.checkpoint
        newest = max((entry.modified or 0.0 for entry in names.values()), default=0.0)
        return Manifest(
            tag=c.tag,
            step=c.step or 0,
            created=newest,
            attempt="",
            world_size=c.topology.world_size,
            stage=c.stage,
        )

    def _check_space(self) -> None:
        needed, free = int(SPACE_FACTOR * self.thinning.plan.nbytes), self.storage.free_bytes(self.directory)
        if free is not None and free < needed:
            room = f"but only {format_size(free)} are free"
            problem = f"needs {format_size(needed)} for its weights before it frees any, {room}"
            raise StorageError(self.directory, problem, "free some space, or remove a checkpoint first")

    def _claim(self, old: list[str]) -> None:
        mark = {"key": self.token, "files": [file.name for file in self.thinning.plan.files], "old": old, **identity()}
        if not self.storage.put_new(posixpath.join(self.directory, THINNING), json.dumps(mark).encode()):
            raise TakenError(self.directory, "is being thinned by another process", "wait for it")

    def _check_ours(self) -> None:
        """Check that the marker is still ours: not if a save has replaced the checkpoint meanwhile.

        Raises:
            TakenError: Another process has taken it.
        """
        self.storage.refresh([])
        if _read_mark(self.storage, self.directory).get("key") != self.token:
            raise TakenError(self.directory, "was taken over by another process while it was being thinned", TAKEN)

    def _write(self) -> dict[str, Checksums]:
        options, checkpoint = self.options, self.checkpoint
        output = _Beside(self.storage, self.directory, mode_of(checkpoint))
        jobs = options.jobs or default_jobs(remote=checkpoint.storage.remote)
        written = {}
        try:
            for plan in self.thinning.plan.plans:
                work = Work(plan, output, self.advance, checks_for(plan.sources, checkpoint, "read"))
                run(work, jobs=jobs, memory=options.memory)
            while output.files:
                self._check_ours()
                output.files[0].writer.commit()
                file = output.files.pop(0)
                written[file.name] = file.checksums
            self.storage.sync(self.directory)
        except ExistsError as error:
            raise TakenError(error.path, ALREADY, TAKEN) from error
        finally:
            for file in output.files:
                with contextlib.suppress(CkptError):
                    file.writer.discard()
        return written

    def _written(self, names: Collection[str]) -> Checkpoint:
        """Open the written checkpoint, before its commit."""
        location = Location(self.checkpoint.root, self.directory, self.checkpoint.tag)
        weights = sorted(name for name in names if name.endswith(SUFFIX))
        if weights:
            return read_safetensors(self.storage, location, weights)
        found = read_run(self.storage, location, raise_at_once, THIN_METADATA)
        if found is None:
            raise LayoutError(self.directory, "has lost its thin metadata", "was it removed meanwhile? try again")
        return found

    def _read_back(self, written: Mapping[str, Checksums]) -> None:
        """Compare the written files with their checksums; the values of weights are compared by their digest.

        Raises:
            CkptError: A file differs.
        """
        self.storage.refresh([])
        for name, sums in written.items():
            if name.endswith((SUFFIX, SHARD)):
                continue
            path = posixpath.join(self.directory, name)
            with self.storage.open(path) as reader:
                for (start, end), crc in zip(cuts(0, sums.nbytes, sums.chunk_bytes), sums.crcs, strict=True):
                    if crc32(reader.read(start, end)) != crc:
                        problem = "does not hold the bytes that were written"
                        raise ChecksumError(path, problem, "a disk may be failing: try again")

    def _commit(self, manifest: Manifest, names: Mapping[str, Any]) -> None:
        self._check_ours()
        if find_pin(self.storage, self.directory) is not None:
            raise PinnedError(self.directory)
        old = names.get(MANIFEST)
        data = manifest.to_json()
        path = posixpath.join(self.directory, MANIFEST)
        over = None if old is None else old.version
        if not self.storage.put_new(path, data, over=over, mode=mode_of(self.checkpoint)):
            raise TakenError(path, "was changed by another process while the checkpoint was being thinned", TAKEN)


class _Beside(Output):
    """An ``Output`` of durable files in the directory of a checkpoint."""

    def __init__(self, storage: WritableStorage, directory: str, mode: int) -> None:
        self._storage = storage
        self._directory = directory
        self._mode = mode
        self.files: list[_HashedFile] = []
        """The files that are not committed."""

    def begin(self, file: TargetFile) -> Writer:
        path = posixpath.join(self._directory, file.name)
        writer = self._storage.writer(path, file.nbytes, new=True, mode=self._mode)
        self.files.append(_HashedFile(file, writer))
        return self.files[-1]


class _HashedFile(Writer):
    """A file that computes the checksums of written bytes."""

    def __init__(self, file: TargetFile, writer: Writer) -> None:
        self.name = file.name
        self.path = writer.path
        self.part_bytes = writer.part_bytes
        self.writer = writer
        self._nbytes = file.nbytes
        self._hashed: list[tuple[int, int, int]] = []

    @property
    def checksums(self) -> Checksums:
        return of_pieces(self._nbytes, sorted(self._hashed))

    def write(self, start: int, data: bytes | memoryview) -> None:
        pieces = cuts(start, start + len(data), chunk_bytes(self._nbytes))
        self._hashed.extend([(a, b - a, crc32(data[a - start : b - start])) for a, b in pieces])
        self.writer.write(start, data)

    def fail(self, error: BaseException) -> None:
        self.writer.fail(error)


# ------------------------------------------------------------------------------------------------- after a crash


def recover(storage: WritableStorage, directory: str, *, grace: float) -> bool:
    """Delete the leftovers of an interrupted replacement: its new files, or after its commit the old ones.

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
        names = (e.name for e in entries if is_temporary(e.name) and is_old(e.modified or 0.0, grace))
        begun = [posixpath.join(directory, n) for n in names if n.startswith(f"{THINNING}.")]
        storage.delete(begun)  # killed while it wrote the marker
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
    for name in manifest.files if manifest is not None and is_thin else ():
        if posixpath.basename(name) == THIN_METADATA:  # other loaders read METADATA
            final = posixpath.join(posixpath.dirname(name), METADATA)
            _copy_small(storage, posixpath.join(directory, name), posixpath.join(directory, final))
            goes.discard(final)
    present = _names(storage, directory)
    begun = [*mark.get("files", ()), *mark.get("old", ())]
    temporary = [n for n in present if is_temporary(posixpath.basename(n)) and _begins_with(n, begun)]
    storage.abandon(directory)
    removed = [name for name in present if name in goes]
    storage.delete([posixpath.join(directory, name) for name in (*removed, *temporary)])
    for above in {name.split("/")[0] for name in removed if "/" in name}:
        path = posixpath.join(directory, above)
        if not storage.remote and not any(walk(storage, path)):
            storage.remove_tree(path)
    storage.delete([posixpath.join(directory, THINNING)])
    storage.refresh([])


def _copy_small(storage: WritableStorage, source: str, target: str) -> None:
    with storage.open(source) as reader:
        data = reader.read(0, reader.nbytes)
    storage.put(target, data, mode=mode_of_file(storage, source))


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
    found = read_json(storage, path, "a marker of ckpttool", hint, MAX_MARK_BYTES)
    try:
        return {**found, **{key: [str(name) for name in found[key]] for key in ("files", "old")}}
    except (KeyError, TypeError) as error:
        raise LayoutError(path, "is not a marker of ckpttool", hint) from error
