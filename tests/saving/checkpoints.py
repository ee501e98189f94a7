"""Small real checkpoints to save, and the checkpoint that a restore would choose."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import posixpath
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpttool.catalog.restore_order import candidates
from ckpttool.checksums import of_bytes
from ckpttool.commit import is_commit
from ckpttool.commit.manifest import CHECKSUM, checksum, parse_manifest, read_manifest
from ckpttool.containers import torch_zip
from ckpttool.errors import ChecksumError, CkptError
from ckpttool.formats import open_whole
from ckpttool.saving import files as rank_files
from ckpttool.saving.files import HostPayload, PlainFile, write_files
from ckpttool.saving.two_phase import Request, save
from ckpttool.storage import LOCAL, MANIFEST, MARK, walk
from tests.truth import HERE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpttool.checksums import Checksums
    from ckpttool.commit.manifest import Manifest
    from ckpttool.saving.coordination import Ranks
    from ckpttool.saving.files import OutgoingFile
    from ckpttool.storage import Storage, WritableStorage

SIDECARS = {"zero_to_fp32.py": b"# a script\n"}
OF_SIGNATURE = ("hmac_sha256", "sha256")
"""Fields of the manifest of a save that release 0.1.0 signed."""
Version = dict[str, bytes]
"""The files of a checkpoint."""


@functools.cache
def version(number: int, fixture: str = "zero2-dp2-bf16-sgd") -> Version:
    """A real checkpoint; each number has other bytes in each file, and the same names and sizes."""
    directory = next((HERE / "checkpoints" / fixture).glob("global_step*"))
    found = {}
    for path in sorted(directory.iterdir()):
        data = bytearray(path.read_bytes())
        if number:
            with LOCAL.open(str(path)) as reader:
                records = torch_zip.parse(reader)
            largest = max((r for r in records if "/data/" in r.name), key=lambda r: r.where.nbytes)
            data[largest.where.start] ^= number  # an element of a tensor: what describes it stays as it is
        found[path.name] = bytes(data)
    return found


def part(files: Version, rank: int, size: int) -> list[OutgoingFile]:
    """What one of several ranks writes."""
    return [
        PlainFile(name, HostPayload(data)) for i, (name, data) in enumerate(sorted(files.items())) if i % size == rank
    ]


def save_version(
    place: WritableStorage, root: str, ranks: Ranks, tag: str, number: int, *, overwrite: bool = False,
    metrics: dict[str, float] | None = None,
) -> Manifest:  # fmt: skip
    """Save one as all ranks together."""
    request = Request(tag, number, 2, metrics=metrics or {}, overwrite=overwrite, sidecars=SIDECARS)
    files = version(number)
    # The last file is one that describes the others: the first rank writes it when they have written theirs.
    last = max(files) if number % 2 else None
    own = part({name: data for name, data in files.items() if name != last}, ranks.rank, ranks.size)
    return save(place, root, ranks, request, own, index=None if last is None else Described(last, files[last]))


class Described:
    """The index of a save.

    Args:
        name: Its file.
        data: The content.
    """

    def __init__(self, name: str, data: bytes) -> None:
        self.own: Any = {"bytes": len(data)}
        self._file = PlainFile(name, HostPayload(data))

    def check(self, own: Sequence[Any]) -> None:
        """Compare what all ranks send."""
        assert own == [self.own] * len(own)

    def agree(self) -> None:
        """Expect nothing: each save sends the same."""

    def files(self) -> Sequence[OutgoingFile]:
        """Return the file."""
        return [self._file]


def sign(directory: Path) -> None:
    """Give a manifest the fields of a signed save; their values do not matter, because nothing compares them."""
    found = json.loads((directory / MANIFEST).read_text())
    found["hmac_sha256"] = 64 * "0"
    for file in found["files"].values():
        file["sha256"] = 43 * "A" + "="
    found[CHECKSUM] = checksum(found)
    (directory / MANIFEST).write_text(json.dumps(found, indent=1))


class Intercepted:
    """A storage whose files a save writes by way of a test.

    Args:
        storage: Where they go.
        write: Called instead of ``write_files``, with what that takes.
    """

    def __init__(self, storage: WritableStorage, write: Callable[..., list[Checksums]]) -> None:
        self.write = write
        self.real = storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def _write_files(storage: Any, *given: Any) -> list[Checksums]:
    if isinstance(storage, Intercepted):
        return storage.write(storage.real, *given)
    return write_files(storage, *given)


rank_files.write_files = _write_files  # type: ignore[assignment]  # a test that makes no Intercepted notices nothing


def content(storage: Storage, path: str) -> Version:
    """The files of a whole checkpoint, compared with the checksums of its manifest.

    Raises:
        CkptError: It is not whole.
    """
    names = [name for name, _ in walk(storage, path) if name not in {MANIFEST, MARK}]
    saved = read_manifest(storage, path).files if is_commit(storage, path) else {}
    found = {}
    for name in saved or names:
        with storage.open(posixpath.join(path, name)) as reader:
            found[name] = bytes(reader.read(0, reader.nbytes))
        if name in saved and of_bytes(found[name], saved[name].chunk_bytes)[:3] != saved[name][:3]:
            raise ChecksumError(posixpath.join(path, name), "differs from its manifest", "")
    return found


def chosen(root: str, storage: Storage = LOCAL) -> tuple[str, Version] | None:
    """Name and files of what is to be gone on from: the first that can be opened, which must then be whole."""
    storage.refresh([])
    for candidate in candidates(storage, root):
        opened, found = _read(storage, candidate.path)
        if not isinstance(opened, CkptError):
            if isinstance(found, CkptError):
                raise found
            return candidate.tag, found
    return None


def whole(root: str, storage: Storage = LOCAL) -> dict[str, Version]:
    """All whole checkpoints of a root, by name."""
    read = {c.tag: _read(storage, c.path)[1] for c in candidates(storage, root)}
    return {tag: files for tag, files in read.items() if not isinstance(files, CkptError)}


Read = tuple["CkptError | None", "Version | CkptError"]
_read_before: dict[bytes, Read] = {}
"""What was found in directories that held these very bytes: histories look at each checkpoint after every step."""
_MOST_READ = 512


def _read(storage: Storage, path: str) -> Read:
    """Why a checkpoint cannot be opened, if so; and its files, or why they are not whole."""
    if storage is not LOCAL:
        return _really_read(storage, path)
    held = hashlib.blake2b()
    for name, _ in sorted(walk(storage, path), key=lambda found: found[0]):
        data = Path(path, name).read_bytes()
        data = _without_chance(data) if name == MANIFEST else data
        held.update(f"{len(name)} {name} {len(data)} ".encode())
        held.update(data)
    key = held.digest()
    if key not in _read_before:
        if len(_read_before) >= _MOST_READ:
            _read_before.clear()
        _read_before[key] = _really_read(storage, path)
    return _read_before[key]


def _without_chance(manifest: bytes) -> bytes:
    """What of a manifest its checkpoint is opened by: not what differs in every save."""
    try:
        parse_manifest(manifest)
    except Exception:  # whatever is wrong with it is part of what is read
        return manifest
    values = json.loads(manifest)
    return json.dumps(
        {k: v for k, v in values.items() if k not in {"attempt", "created", "parent", "number", CHECKSUM}}
    ).encode()


def _really_read(storage: Storage, path: str) -> Read:
    try:
        open_whole(storage, path)
    except CkptError as error:
        return error, error
    try:
        return None, content(storage, path)
    except CkptError as error:
        return None, error


def number_of(files: Version, numbers: Sequence[int]) -> int:
    """Which version it is; an assertion if it is none of them, byte for byte."""
    found = [n for n in numbers if version(n) == files]
    assert found, f"not one of the versions {list(numbers)}"
    return found[0]


def debris(root: str) -> list[str]:
    """What no run that has ended well leaves behind."""
    found = []
    for above, directories, names in os.walk(root):
        inside = os.path.relpath(above, root)
        found += [os.path.join(inside, n) for n in names if n == MARK or n.endswith(".partial")]
        found += [os.path.join(inside, d) for d in directories if d.startswith(".") or d.endswith(".replaced")]
    return found


def state(root: str) -> frozenset[tuple[object, ...]]:
    """What decides which checkpoint is found: two roots with equal states are as good as the same."""
    found: set[tuple[object, ...]] = set()
    latest = os.path.join(root, "latest")
    named = os.stat(latest).st_mtime_ns if os.path.exists(latest) else 0
    for above, directories, names in os.walk(root):
        inside = os.path.relpath(above, root)
        found |= {(inside, d) for d in directories}
        for name in names:
            path = os.path.join(above, name)
            info = os.stat(path)
            if name.startswith((MANIFEST, MARK)):  # they differ by time and chance
                found.add((inside, name, info.st_size, info.st_mtime_ns > named))
                continue
            with open(path, "rb") as file:
                found.add((inside, name, zlib.crc32(file.read())))
    return frozenset(found)
