"""The manifest of a save: what was written, and that all of it was. A directory that has one is a commit."""

from __future__ import annotations

import base64
import json
import posixpath
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpttool.budget import MEMORY, opening, saw, take
from ckpttool.checksums import MAX_CHUNKS, MIN_CHUNK_BYTES, Checksums, crc32
from ckpttool.commit.signing import is_signed, signature
from ckpttool.errors import LayoutError, PlanError, StorageError
from ckpttool.messages import brief
from ckpttool.storage import MANIFEST, is_half_removed, walk
from ckpttool.storage.confined import leads_out

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from ckpttool.storage import Storage

FORMAT = 1
"""The form of the file; readers refuse later ones."""
MAX_BYTES = 1 << 28
"""A manifest of ten thousand ranks is smaller."""

CHECKSUM = "manifest_crc32"
"""The field that holds the CRC-32 of all other fields."""
SIGNATURE = "hmac_sha256"
"""The field that holds the signature of all other fields but that checksum."""
SINCE_CHECKSUM = "parent"
"""A field that came with that checksum: a manifest that has it and lacks the checksum is damaged."""

MAX_SMALL_BYTES = 1 << 22
"""Manifests up to this size are read whatever lies beside them."""
MEMORY_OF_JSON = 24
"""Bytes of memory that a byte of JSON may take."""
REPLACED = ".replaced"
"""Behind the name of a checkpoint that is being saved anew, until that is done."""
MAX_PARTS = 4
"""Directories that a tag may name, one within another."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a save wrote."""

    tag: str
    """The checkpoint's name."""
    step: int
    """Steps of the engine."""
    created: float
    """When it was committed, in seconds since 1970."""
    attempt: str
    """Differs for every save, of the same tag too."""
    world_size: int
    """Ranks that saved it."""
    stage: int
    """ZeRO stage."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the train loop said of the model."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the packages that wrote it."""
    files: Mapping[str, Checksums] = field(default_factory=dict)
    """Every file, by its name in the directory."""
    groups: tuple[tuple[str, ...], ...] = ()
    """Without ZeRO, where files only number them: the parameters of each group of the optimizer, in its order."""
    parent: str = ""
    """The attempt of the commit that ``latest`` named before; "" if there was none."""
    number: int = 0
    """One more than its parent's: clocks say nothing of what came first. 0 if no release has counted."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files.values())

    def to_json(self, key: bytes | None = None) -> bytes:
        """The manifest's file.

        Args:
            key: Signs it.
        """
        files = {name: _entry(file) for name, file in sorted(self.files.items())}
        values = {k: v for k, v in _shallow(self).items() if k != "files"}
        found = json.loads(json.dumps({"format": FORMAT, **values, "files": files}))
        if key is not None:
            found[SIGNATURE] = signature(_said(found), key)
        return json.dumps({**found, CHECKSUM: checksum(found)}, indent=1).encode()


def checksum(found: Mapping[str, Any]) -> int:
    """CRC-32 of what a manifest says, its signature included."""
    return crc32(_said(found, {CHECKSUM}))


def _said(found: Mapping[str, Any], without: Collection[str] = (CHECKSUM, SIGNATURE)) -> bytes:
    """What a manifest says, whatever the white space and the order of its fields."""
    values = {k: v for k, v in found.items() if k not in without}
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def _entry(file: Checksums) -> dict[str, Any]:
    entry: dict[str, Any] = {"nbytes": file.nbytes, "chunk_bytes": file.chunk_bytes, "crc32": _packed(file.crcs)}
    if file.directory is not None:
        entry["directory"] = list(file.directory)
    if file.sha256:
        entry["sha256"] = base64.b64encode(b"".join(file.sha256)).decode()
    return entry


def _shallow(manifest: Manifest) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in Manifest.__dataclass_fields__}


def is_commit(storage: Storage, directory: str) -> bool:
    """Whether a directory is a checkpoint that was saved to its end, and is not being removed."""
    return storage.exists(posixpath.join(directory, MANIFEST)) and not is_half_removed(storage, directory)


def commits(storage: Storage, root: str) -> list[str]:
    """The directories below a root that are commits; of a tag like "a/b" the last one."""
    return [directory for directory in directories(storage, root) if is_commit(storage, directory)]


def directories(storage: Storage, root: str, depth: int = MAX_PARTS) -> Iterator[str]:
    """The directories below a root that may be tags, and those below directories that hold no files."""
    for entry in storage.listing(root) if depth and storage.is_dir(root) else []:
        if not entry.is_dir or entry.name.startswith("."):
            continue
        directory = posixpath.join(root, entry.name)
        if leads_out(storage, directory):
            continue
        inside = storage.listing(directory)
        yield directory
        if inside and all(e.is_dir for e in inside):
            yield from directories(storage, directory, depth - 1)


def read_manifest(storage: Storage, directory: str, key: bytes | None = None) -> Manifest:
    """The manifest of a checkpoint.

    Args:
        storage: Where it lies.
        directory: The checkpoint.
        key: Who saved it must have signed it with this key.

    Raises:
        PlanError: It is not signed with that key.
        StorageError: There is none, or it cannot be read.
        LayoutError: It is damaged, or of a later release.
    """
    path = posixpath.join(directory, MANIFEST)
    with storage.open(path) as reader:
        if reader.nbytes > MAX_BYTES:
            raise LayoutError(path, f"is {reader.nbytes:,} bytes long, too large for a manifest", "is it damaged?")
        if reader.nbytes > MAX_SMALL_BYTES:
            _check_size(storage, directory, path, reader.nbytes)
        data = reader.read(0, reader.nbytes)
    try:
        manifest = parse_manifest(data)
        found = {} if key is None else json.loads(data)
    except _LaterError:
        problem = "was written by a later release of ckpttool"
        raise LayoutError(path, problem, "upgrade ckpttool, or use plain DeepSpeed") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, struct.error) as error:
        raise LayoutError(path, "is no manifest of ckpttool's", "is it damaged? use another tag") from error
    if key is not None:
        _check_signature(path, found, manifest, key)
        if not f"/{directory.rstrip('/').removesuffix(REPLACED)}".endswith(f"/{manifest.tag}"):
            problem = f"was signed for the tag {brief(manifest.tag)}, and lies under another name"
            raise PlanError(path, problem, "somebody renamed it: do not load it")
    return manifest


def _check_signature(path: str, found: Mapping[str, Any], manifest: Manifest, key: bytes) -> None:
    signed = found.get(SIGNATURE)
    if not isinstance(signed, str):
        raise PlanError(path, "is not signed", "was it saved with CheckpointManager(sign_key=...)? do not load it")
    if not is_signed(_said(found), signed, key):
        problem = "is not signed with this key"
        raise PlanError(path, problem, "somebody else wrote or changed it, or the key is another: do not load it")
    bare = next((n for n, f in manifest.files.items() if len(f.sha256) != len(f.crcs)), None)
    if bare is not None:
        raise PlanError(path, f"is signed, but has no SHA-256 of {bare}", "save it anew with sign_key")


def _check_size(storage: Storage, directory: str, path: str, nbytes: int) -> None:
    """Refuse a manifest that is large beside what it lists: reading it takes many times its size in memory.

    Raises:
        ContainerError: It is.
    """
    with opening():
        for name, entry in walk(storage, directory):
            if name != MANIFEST:
                saw(name, entry.nbytes)
        take(MEMORY, MEMORY_OF_JSON * nbytes, path)


class _LaterError(Exception):
    pass


def parse_manifest(data: bytes) -> Manifest:
    """Read a manifest's file.

    Raises:
        ValueError: It is none; so do the errors that reading data of another form raises.
    """
    found = json.loads(data)
    if int(found["format"]) > FORMAT:
        raise _LaterError
    if (CHECKSUM in found or SINCE_CHECKSUM in found) and found.get(CHECKSUM) != checksum(found):
        raise ValueError("its checksum is not that of what it says")
    files = {str(name): _checksums(values) for name, values in found["files"].items()}
    if any(part in {"", ".", ".."} for name in files for part in name.split("/")):
        raise ValueError("a name leads out of the directory")
    return Manifest(
        tag=str(found["tag"]),
        step=int(found["step"]),
        created=float(found["created"]),
        attempt=str(found["attempt"]),
        world_size=int(found["world_size"]),
        stage=int(found["stage"]),
        metrics={str(k): float(v) for k, v in found["metrics"].items()},
        versions={str(k): str(v) for k, v in found["versions"].items()},
        files=files,
        groups=tuple(tuple(map(str, names)) for names in found.get("groups", ())),
        parent=str(found.get("parent", "")),
        number=int(found.get("number", 0)),
    )


def _checksums(values: Mapping[str, Any]) -> Checksums:
    nbytes, size = int(values["nbytes"]), int(values["chunk_bytes"])
    raw = base64.b64decode(values["crc32"], validate=True)
    count = -(-nbytes // size) if size >= MIN_CHUNK_BYTES else -1
    if nbytes < 0 or not 0 <= count <= MAX_CHUNKS or len(raw) != 4 * count:
        raise ValueError("checksums do not fit the size")
    directory = values.get("directory")
    if directory is not None:
        start, crc = map(int, directory)
        if not (0 <= start <= nbytes and 0 <= crc < 1 << 32):
            raise ValueError("the directory lies outside its file")
        directory = start, crc
    digests = base64.b64decode(values.get("sha256", ""), validate=True)
    if digests and len(digests) != 32 * count:
        raise ValueError("as many SHA-256 as chunks")
    sha256 = tuple(digests[n : n + 32] for n in range(0, len(digests), 32))
    return Checksums(nbytes, size, struct.unpack(f"<{count}I", raw), directory, sha256)


def _packed(crcs: tuple[int, ...]) -> str:
    return base64.b64encode(struct.pack(f"<{len(crcs)}I", *crcs)).decode()


def size_problems(storage: Storage, directory: str, manifest: Manifest) -> list[StorageError]:
    """Every file of a manifest that is not there in full."""
    there = {name: entry.nbytes for name, entry in walk(storage, directory)}
    hint = "restore it from a copy, or use another tag"
    problems = []
    for name, file in manifest.files.items():
        path = posixpath.join(directory, name)
        if name not in there:
            problems.append(StorageError(path, "is missing, and the manifest has it", hint))
        elif there[name] != file.nbytes:
            problem = f"is {there[name]:,} bytes long, {file.nbytes:,} by the manifest"
            problems.append(StorageError(path, problem, hint))
    return problems
