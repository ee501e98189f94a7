"""Plan the work of ``cp``: copy the files of a checkpoint unchanged, with its sidecar files."""

from __future__ import annotations

import fnmatch
import os
import posixpath
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.checksums import chunk_records, crc32
from ckpttool.commit import has_manifest
from ckpttool.commit.manifest import commit_directory, find_manifest, read_manifest
from ckpttool.errors import ChecksumError, CkptError, ContainerError, LayoutError, StorageError
from ckpttool.execution.checks import archive_records
from ckpttool.execution.permissions import mode_of_file
from ckpttool.formats import FORMATS, Opening, open_checkpoint
from ckpttool.formats.layouts import VERL
from ckpttool.formats.scan import has_files_of_tag, natural_order
from ckpttool.formats.sidecars import MAX_BYTES, OWN, POSITION, RANDOM, RESUME_FILES
from ckpttool.plan import COPY, CopyPlan, SourceFile, TargetFile
from ckpttool.storage import BESIDE, LATEST, LATEST_UNIVERSAL, MANIFEST, connect, walk
from ckpttool.storage.base import NO_NAMES
from ckpttool.storage.fsspec import RemoteStorage

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ckpttool.checksums import Record
    from ckpttool.model import Checkpoint
    from ckpttool.storage import Storage

INDICES = (*(name for known in FORMATS for name in known.last), MANIFEST)
"""Readers take these files as the sign of a complete checkpoint; they are copied last."""
COPIED_SIDECARS = (*RESUME_FILES, *RANDOM, *POSITION)
"""Sidecar files that frameworks need to resume from a checkpoint."""
MAX_NAMED = 10
"""Maximum number of names in a note about omitted files."""


@dataclass(frozen=True, slots=True)
class RootSidecars:
    """The sidecar files in a checkpoint's root."""

    sidecars: Mapping[str, bytes]
    """Sidecar files to copy, by name: configuration, and the state of a trainer."""
    notes: tuple[str, ...]
    """Notes on files that are not copied."""
    modes: Mapping[str, int] = field(default_factory=dict)
    """Permissions of the sidecar files, by name."""


def is_tagged(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is the directory of a tag in a root with ``latest``."""
    return checkpoint.latest is not None


def latest_name(checkpoint: Checkpoint) -> str:
    """Return the name of the file that names the newest checkpoint of the same kind."""
    return checkpoint.latest or LATEST


def check_outside(checkpoint: Checkpoint, storage: Storage, dst: str) -> None:
    """Refuse to write a copy into a checkpoint: copying or removing that one later would include both.

    Args:
        checkpoint: The source.
        storage: The storage of the copy.
        dst: The root of the copy, or its directory for a format without tags.

    Raises:
        StorageError: DST is in the source, or is the directory of another tag.
    """
    hint = "pass another root"
    source = connect(checkpoint.storage)
    for directory in _directories(checkpoint):
        above, below = os.path.realpath(directory), os.path.realpath(dst)
        if isinstance(storage, RemoteStorage):
            above, below = storage.key(directory), storage.key(dst)
            if not storage.is_same(source):
                continue
        elif source.remote:
            continue
        if f"{below.rstrip('/')}/".startswith(f"{above.rstrip('/')}/"):
            raise StorageError(dst, f"is inside the checkpoint {directory}", hint)
    if is_tagged(checkpoint) and storage.is_dir(dst) and has_files_of_tag(storage.listing(dst)):
        raise StorageError(dst, "is the directory of a tag, not a root", hint)


def _directories(checkpoint: Checkpoint) -> list[str]:
    return list(dict.fromkeys([checkpoint.location, *(f.directory for f in checkpoint.files if f.directory)]))


def plan_copy(checkpoint: Checkpoint) -> CopyPlan:
    """Plan a copy of every file in the checkpoint's directories, also of files in unknown formats.

    A file ``latest`` in the directory of a tag belongs to a root, and is not copied.

    Raises:
        LayoutError: Two directories contain different files of the same name.
        StorageError: The key of an object is not a valid path of a file.
    """
    records = {checkpoint.path(n): file.records for n, file in enumerate(checkpoint.files)}
    storage = connect(checkpoint.storage)
    manifest = find_manifest(storage, checkpoint.location)
    for name, sums in manifest.files.items() if manifest is not None else ():
        records[posixpath.join(checkpoint.location, name)] = chunk_records(sums)
    sources: dict[str, SourceFile] = {}
    storage.refresh([])  # cached listings of single directories omit keys with ".."
    for directory in _directories(checkpoint):
        entries = dict(walk(storage, directory))
        _check_keys(directory, entries)
        for name, entry in entries.items():
            path = posixpath.join(directory, name)
            file_records = records[path] if path in records else _records(storage, path)
            source = SourceFile(path, entry.nbytes, entry.version, checkpoint.storage, file_records)
            if sources.setdefault(name, source).nbytes != entry.nbytes:
                problem = f"is {entry.nbytes:,} bytes long, but {sources[name].path} {sources[name].nbytes:,}"
                raise LayoutError(path, problem, "the directories belong to two saves: pass only one save's")
    beside = BESIDE | {LATEST, LATEST_UNIVERSAL} if is_tagged(checkpoint) else BESIDE
    names = sorted((n for n in sources if n not in beside), key=lambda n: (n in INDICES, n))
    files = []
    for number, name in enumerate(names):
        copy = np.zeros(1 if sources[name].nbytes else 0, dtype=COPY)
        if sources[name].nbytes:
            copy[0] = (number, 0, sources[name].nbytes, 0, 0)
        files.append(TargetFile(name, sources[name].nbytes, (), copy))
    if manifest is not None and not has_manifest(storage, checkpoint.location):
        data = replace(manifest, tag=checkpoint.tag).to_json()  # its part of the manifest of several engines
        files.append(TargetFile(MANIFEST, len(data), ((0, data),), np.zeros(0, dtype=COPY)))
    return CopyPlan(tuple(sources[name] for name in names), (("U8", "U8"),), tuple(files))


def _check_keys(directory: str, names: Collection[str]) -> None:
    """Refuse keys of objects that are not valid paths of files.

    Raises:
        StorageError: A key is not valid.
    """
    hint = "give the object another key, or remove it"
    for name in names:
        parts = name.split("/")
        if not NO_NAMES.isdisjoint(parts):
            problem = 'cannot be copied as a file: a component of its key is empty, "." or ".."'
            raise StorageError(f"{directory}/{name}", problem, hint)
        for count in range(1, len(parts)):
            if (above := "/".join(parts[:count])) in names:
                problem = f"cannot be copied as a file: {above} is a file too, not a directory"
                raise StorageError(f"{directory}/{name}", problem, hint)


def _records(storage: Storage, path: str) -> Sequence[Record]:
    """Return the records of an archive that the checkpoint does not use, such as a replica or a leftover."""
    try:
        return archive_records(storage, path)
    except ContainerError:
        return ()  # a damaged file is copied without a check


def root_sidecars(checkpoint: Checkpoint, storage: Storage, root: str) -> RootSidecars:
    """Read the sidecar files of a checkpoint's root for a copy to another root.

    Only files with known names of frameworks: the root may be a home directory with unrelated files.

    Raises:
        LayoutError: The other root has a different sidecar file of the same name.
    """
    sidecars: dict[str, bytes] = {}
    modes: dict[str, int] = {}
    not_copied = []
    source = connect(checkpoint.storage)
    for entry in source.listing(checkpoint.root):
        if entry.is_dir or _matches(entry.name, OWN):
            continue
        if not _matches(entry.name, COPIED_SIDECARS) or entry.nbytes > MAX_BYTES:
            not_copied.append(entry.name)
            continue
        data = _content(source, posixpath.join(checkpoint.root, entry.name))
        path = posixpath.join(root, entry.name)
        if not storage.exists(path):
            sidecars[entry.name] = data
            modes[entry.name] = mode_of_file(source, posixpath.join(checkpoint.root, entry.name))
        elif _content(storage, path) != data:
            hint = "choose another root: each trainer run needs its own"
            raise LayoutError(path, f"differs from the file of that name in {checkpoint.root}", hint)
    what = f"{', '.join(not_copied[:MAX_NAMED])}{' ...' if len(not_copied) > MAX_NAMED else ''}"
    notes = [f"not copied: other files in the checkpoint's root ({what})"] if not_copied else []
    if (above := commit_directory(source, checkpoint.location)[0]) != checkpoint.location:
        manifest = read_manifest(source, above)
        notes.append(
            f"one of the engines {', '.join(manifest.engines)}, which were saved together: the others are not copied"
        )
    return RootSidecars(sidecars, tuple(notes), modes)


def below_run(checkpoint: Checkpoint, src: str) -> str:
    """Return the path of a checkpoint without ``latest`` below the root of its run; "" if that was not passed."""
    above = f"{src.rstrip('/')}/"
    within = not is_tagged(checkpoint) and checkpoint.location.startswith(above)
    return checkpoint.location.removeprefix(above) if within else ""


def step_sidecars(checkpoint: Checkpoint, below: str) -> RootSidecars:
    """Read the files of a step of verl beside the directories of its models.

    Args:
        checkpoint: The checkpoint.
        below: As by ``below_run``.
    """
    step, _, model = below.rpartition("/")
    if not step or model not in VERL.models:
        return RootSidecars({}, ())
    source, above = connect(checkpoint.storage), posixpath.dirname(checkpoint.location)
    entries = [entry for entry in source.listing(above) if entry.name != model]
    small = [entry.name for entry in entries if not entry.is_dir and entry.nbytes <= MAX_BYTES]
    found = {f"{step}/{name}": _content(source, posixpath.join(above, name)) for name in small}
    other = [entry.name for entry in entries if entry.name not in small]
    notes = (f"not copied: other parts of the step ({', '.join(other[:MAX_NAMED])})",) if other else ()
    number = posixpath.basename(step).removeprefix(VERL.prefix)
    return RootSidecars({**found, VERL.pointer: number.encode()}, notes)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _content(storage: Storage, path: str) -> bytes:
    records = archive_records(storage, path)
    with storage.open(path) as reader:
        data = reader.read(0, reader.nbytes)
    for record in records:
        if record.crc_recorded and crc32(data[record.where.start : record.where.end]) != record.crc32:
            problem = f"record {record.name} does not match its checksum"
            raise ChecksumError(path, problem, "restore it from a copy, or remove it")
    return data


def is_newest(checkpoint: Checkpoint, storage: Storage, root: str, opening: Opening) -> bool:
    """Return whether ``latest`` of a root should name a copy: without a valid ``latest``, or if it names no later step.

    Raises:
        StorageError: The file cannot be read.
    """
    path = posixpath.join(root, latest_name(checkpoint))
    if not storage.exists(path):
        return True
    try:
        named = open_checkpoint(root, tag=storage.read_text(path).strip(), opening=opening)
    except CkptError:
        return True  # latest names a checkpoint that cannot be opened
    ours = (checkpoint.step or 0, natural_order(checkpoint.tag))
    return ours >= (named.step or 0, natural_order(named.tag))
