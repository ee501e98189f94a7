"""Read and write the manifest of a save, which lists all files; a directory with a manifest is a commit."""

from __future__ import annotations

import base64
import json
import posixpath
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpttool.budget import MEMORY, note_file, opening, spend
from ckpttool.checksums import MAX_CHUNKS, MIN_CHUNK_BYTES, Checksums, crc32
from ckpttool.commit import DIRTY, RESTORED_FROM, REVISION, has_manifest, split_directory
from ckpttool.dtypes import TRAINING_DTYPES
from ckpttool.errors import CkptError, ContainerError, LayoutError, PlanError
from ckpttool.storage import MANIFEST, walk

if TYPE_CHECKING:
    from ckpttool.storage import Storage

FORMAT = 2
"""Version of the file format; readers refuse later versions. Version 1 has no runs without DeepSpeed."""
MAX_BYTES = 1 << 28
"""Most bytes of a manifest; one of ten thousand ranks is smaller."""

CHECKSUM = "manifest_crc32"
"""Field with the CRC-32 of all other fields."""
SINCE_CHECKSUM = "parent"
"""Field as old as ``CHECKSUM``: a manifest with this field and without the checksum is damaged."""

MAX_SMALL_BYTES = 1 << 22
"""Most bytes of a manifest that is read without a comparison with the size of the checkpoint."""
MEMORY_OF_JSON = 24
"""Most bytes of memory per byte of JSON."""
OF_ENGINE = ("step", "stage", "groups", "optimizer", "batch", "digests")
"""Fields that each of several engines has."""
REPLACED = ".replaced"
"""Suffix of the previous checkpoint while a new one of the same tag is saved."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a manifest."""

    tag: str
    """Name of the checkpoint."""
    step: int
    """Steps of the engine."""
    created: float
    """Time of the commit in seconds since 1970."""
    attempt: str
    """Identifier of the save; unique, also among saves of the same tag."""
    world_size: int
    """Number of ranks that saved it."""
    stage: int | None
    """ZeRO stage; None for a run without DeepSpeed."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics from the train loop."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the packages that wrote it."""
    files: Mapping[str, Checksums] = field(default_factory=dict)
    """Checksums of every file, by path relative to the directory."""
    groups: tuple[tuple[str, ...], ...] = ()
    """Without ZeRO, the parameter names of each optimizer group in order; the files have only their numbers."""
    optimizer: str = ""
    """Class of the optimizer and its switches, to recognise an engine that is built alike; "" if unknown."""
    parent: str = ""
    """``attempt`` of the previous commit, which ``latest`` named; "" without one."""
    origin: str | None = None
    """``attempt`` of the commit that the run was restored from before this save, "" for another checkpoint; None if it
    went on from ``parent``, as in manifests of old releases."""
    number: int = 0
    """``number`` of the parent plus one: clocks do not order commits. 0 in manifests of old releases."""
    batch: Mapping[str, int] = field(default_factory=dict)
    """Batch sizes of the run by their names in DeepSpeed's configuration; empty in manifests of old releases."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """The fields REVISION, DIRTY and RESTORED_FROM, as far as the save knew them."""
    thin: str = ""
    """Type of the weights ("bf16", "fp32") if ``prune`` has removed the optimizer states; "" for a whole checkpoint."""

    digests: Mapping[str, Any] | None = None
    """Digests of the live state at the save (``StateDigest.to_json``); None if the save took none."""
    engines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of several engines saved together, by name: the fields ``OF_ENGINE`` of each. The files of each are in a
    subdirectory of its name. Empty for an engine that was saved alone."""

    def of_engine(self, name: str) -> Manifest:
        """Return the manifest of one of several engines, with file names relative to its subdirectory."""
        own = {key: value for key, value in self.engines[name].items() if key in OF_ENGINE}
        files = {path.removeprefix(f"{name}/"): f for path, f in self.files.items() if path.startswith(f"{name}/")}
        return replace(self, **own, files=files, engines={})

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files.values())

    def to_json(self) -> bytes:
        """Return the content of the manifest's file."""
        files = {name: entry_of(file) for name, file in sorted(self.files.items())}
        without = {"files"} | ({"origin"} if self.origin is None else set())
        values = {k: v for k, v in _shallow(self).items() if k not in without}
        found = json.loads(json.dumps({"format": 1 if self.stage is not None else FORMAT, **values, "files": files}))
        return json.dumps({**found, CHECKSUM: checksum(found)}, indent=1).encode()


def checksum(found: Mapping[str, Any]) -> int:
    """Return the CRC-32 of a manifest's fields, independent of white space and order."""
    values = {k: v for k, v in found.items() if k != CHECKSUM}
    return crc32(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


def entry_of(file: Checksums) -> dict[str, Any]:
    """Return the checksums of a file as JSON data."""
    entry: dict[str, Any] = {"nbytes": file.nbytes, "chunk_bytes": file.chunk_bytes, "crc32": _packed(file.crcs)}
    if file.directory is not None:
        entry["directory"] = list(file.directory)
    return entry


def _shallow(manifest: Manifest) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in Manifest.__dataclass_fields__}


def read_manifest(storage: Storage, directory: str) -> Manifest:
    """Read the manifest of a checkpoint.

    Args:
        storage: Storage of the checkpoint.
        directory: Directory of the checkpoint.

    Raises:
        PlanError: The manifest is of a later release.
        StorageError: The manifest is missing or cannot be read.
        LayoutError: The manifest is damaged.
    """
    path = posixpath.join(directory, MANIFEST)
    with storage.open(path) as reader:
        if reader.nbytes > MAX_BYTES:
            raise LayoutError(path, f"is {reader.nbytes:,} bytes long, too large for a manifest", "is it damaged?")
        if reader.nbytes > MAX_SMALL_BYTES:
            _check_size(storage, directory, path, reader.nbytes)
        data = reader.read(0, reader.nbytes)
    try:
        return parse_manifest(data)
    except _LaterError:
        problem = "was written by a later release of ckpttool"
        raise PlanError(path, problem, "upgrade ckpttool, or use plain DeepSpeed") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, struct.error) as error:
        raise LayoutError(path, "is not a manifest of ckpttool", "is it damaged? use another tag") from error


def find_manifest(storage: Storage, directory: str) -> Manifest | None:
    """Read the manifest of a checkpoint; of an engine that was saved with others, its part of the one above.

    Returns:
        None without a manifest.

    Raises:
        CkptError: As for ``read_manifest``.
    """
    above, name = commit_directory(storage, directory)
    if not has_manifest(storage, above):
        return None
    manifest = read_manifest(storage, above)
    return manifest.of_engine(name) if name else manifest


def commit_directory(storage: Storage, directory: str) -> tuple[str, str]:
    """Return the directory of the commit that contains a checkpoint, and the name of its engine; "" for one alone."""
    above, name = split_directory(directory)
    if has_manifest(storage, directory) or not has_manifest(storage, above):
        return directory, ""
    return (above, name) if name in read_manifest(storage, above).engines else (directory, "")


def _check_size(storage: Storage, directory: str, path: str, nbytes: int) -> None:
    """Refuse a manifest that is too large for its checkpoint: to parse it takes many times its size in memory.

    Raises:
        ContainerError: The manifest is too large.
    """
    with opening():
        for name, entry in walk(storage, directory):
            if name != MANIFEST:
                note_file(name, entry.nbytes)
        spend(MEMORY, MEMORY_OF_JSON * nbytes, path)


class _LaterError(Exception):
    pass


def parse_manifest(data: bytes) -> Manifest:
    """Parse the content of a manifest's file.

    Raises:
        ValueError: The content is not a manifest; malformed content may also raise KeyError, TypeError and the like.
    """
    found = json.loads(data)
    if int(found["format"]) > FORMAT:
        raise _LaterError
    if (CHECKSUM in found or SINCE_CHECKSUM in found) and found.get(CHECKSUM) != checksum(found):
        raise ValueError("the checksum does not match the fields")
    files = {str(name): checksums_of(values) for name, values in found["files"].items()}
    if any(part in {"", ".", ".."} for name in files for part in name.split("/")):
        raise ValueError("a name leads out of the directory")
    return Manifest(
        tag=str(found["tag"]),
        step=int(found["step"]),
        created=float(found["created"]),
        attempt=str(found["attempt"]),
        world_size=int(found["world_size"]),
        stage=None if found["stage"] is None else int(found["stage"]),
        metrics={str(k): float(v) for k, v in found["metrics"].items()},
        versions={str(k): str(v) for k, v in found["versions"].items()},
        files=files,
        groups=tuple(tuple(map(str, names)) for names in found.get("groups", ())),
        optimizer=str(found.get("optimizer", "")),
        parent=str(found.get("parent", "")),
        origin=None if found.get("origin") is None else str(found["origin"]),
        number=int(found.get("number", 0)),
        batch={str(name): int(size) for name, size in found.get("batch", {}).items()},
        provenance=_provenance(found.get("provenance", {})),
        thin=_thin(found.get("thin", "")),
        digests=_digests(found.get("digests")),
        engines={_name(name): _engine(values) for name, values in found.get("engines", {}).items()},
    )


def _name(name: str) -> str:
    if "/" in name or name in {"", ".", ".."}:
        raise ValueError("not the name of an engine")
    return name


def _engine(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of one of several engines, checked."""
    return {
        "step": int(found["step"]),
        "stage": int(found["stage"]),
        "groups": tuple(tuple(map(str, names)) for names in found["groups"]),
        "optimizer": str(found["optimizer"]),
        "batch": {str(name): int(size) for name, size in found["batch"].items()},
        "digests": _digests(found.get("digests")),
    }


def _provenance(found: Any) -> dict[str, Any]:
    """Return the known fields of a manifest's provenance, checked.

    Raises:
        ValueError: A field has another type.
    """
    if not isinstance(found, Mapping):
        raise ValueError("not a mapping")  # noqa: TRY004  the caller reports files that are not manifests
    result: dict[str, Any] = {}
    if REVISION in found:
        result[REVISION] = str(found[REVISION])
    if isinstance(found.get(DIRTY), bool):
        result[DIRTY] = found[DIRTY]
    if RESTORED_FROM in found:
        parent = dict(found[RESTORED_FROM])
        step = parent.get("step")
        result[RESTORED_FROM] = {
            "path": str(parent.get("path", "")),
            "tag": str(parent.get("tag", "")),
            "step": None if step is None else int(step),
            "attempt": str(parent.get("attempt", "")),
        }
    return result


def _thin(dtype: object) -> str:
    if dtype not in {"", *TRAINING_DTYPES}:
        raise ValueError("not a type of weights")
    return str(dtype)


def _digests(found: Any) -> dict[str, Any] | None:
    """Return the digests of a state as they were saved; they are parsed where they are compared.

    Raises:
        ValueError: They are not a mapping.
    """
    if found is not None and not isinstance(found, Mapping):
        raise ValueError("not a mapping")
    return None if found is None else dict(found)


def checksums_of(values: Mapping[str, Any]) -> Checksums:
    """Return the checksums in an entry of ``entry_of``.

    Raises:
        ValueError: They do not fit the size; other malformed entries may also raise KeyError, TypeError and the like.
    """
    nbytes, size = int(values["nbytes"]), int(values["chunk_bytes"])
    raw = base64.b64decode(values["crc32"], validate=True)
    count = -(-nbytes // size) if size >= MIN_CHUNK_BYTES else -1
    if nbytes < 0 or not 0 <= count <= MAX_CHUNKS or len(raw) != 4 * count:
        raise ValueError("checksums do not fit the size")
    directory = values.get("directory")
    if directory is not None:
        start, crc = map(int, directory)
        if not (0 <= start <= nbytes and 0 <= crc < 1 << 32):
            raise ValueError("the directory is outside its file")
        directory = start, crc
    return Checksums(nbytes, size, struct.unpack(f"<{count}I", raw), directory)


def _packed(crcs: tuple[int, ...]) -> str:
    return base64.b64encode(struct.pack(f"<{len(crcs)}I", *crcs)).decode()


def size_problems(storage: Storage, directory: str, manifest: Manifest, optional: str = "") -> list[CkptError]:
    """Return an error for every file of a manifest that is missing or has another size.

    Args:
        storage: Storage of the commit.
        directory: Its directory.
        manifest: Its manifest.
        optional: End of the names of files that may be missing.
    """
    sizes = {name: entry.nbytes for name, entry in walk(storage, directory)}
    hint = "restore it from a copy, or use another tag"
    problems: list[CkptError] = []
    for name, file in manifest.files.items():
        path = posixpath.join(directory, name)
        if name not in sizes:
            if not (optional and name.endswith(optional)):
                problems.append(LayoutError(path, "is missing, but the manifest lists it", hint))
        elif sizes[name] != file.nbytes:
            problem = f"is {sizes[name]:,} bytes long, but {file.nbytes:,} in the manifest"
            problems.append(ContainerError(path, problem, hint))
    return problems
