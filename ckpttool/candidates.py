"""Which checkpoint of a root to go on from: the newest whole one."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttool.errors import CkptError, LayoutError
from ckpttool.formats import open_checkpoint
from ckpttool.formats.locate import LATEST, natural_order
from ckpttool.formats.zero.names import parse_name
from ckpttool.guarded import guard
from ckpttool.manifest import is_commit, read_manifest
from ckpttool.storage import MANIFEST, MARK, is_half_removed

if TYPE_CHECKING:
    from ckpttool.model import Checkpoint
    from ckpttool.storage import Entry, Storage


@dataclass(frozen=True, slots=True)
class Candidate:
    """A directory that may be a checkpoint."""

    tag: str
    """Its name, relative to the root."""
    path: str
    """Its directory."""
    committed: bool
    """Whether ckpttool saved it to its end."""


def candidates(storage: Storage, root: str) -> list[Candidate]:
    """What there is to go on from, best first.

    First what ``latest`` names, unless a commit is newer than that file: a run may have been killed between the two.
    Then commits and plain DeepSpeed saves, by step, later steps first. What is marked as unfinished is left out.

    Raises:
        StorageError: The root cannot be read.
    """
    if not storage.is_dir(root):
        return []
    entries = storage.listing(root)
    found: list[tuple[tuple[bool, int], Candidate]] = []
    latest = next((e for e in entries if e.name == LATEST and not e.is_dir), None)
    named = _named(storage, root) if latest is not None else ""
    names = [e.name for e in entries if e.is_dir and not e.name.startswith(".")]
    if "/" in named and storage.is_dir(posixpath.join(root, named)):
        names.append(named)
    for name in names:
        path = posixpath.join(root, name)
        committed, inside = is_commit(storage, path), storage.listing(path)
        if not committed and (_is_marked(inside) or not any(parse_name(e.name) for e in inside if not e.is_dir)):
            continue
        step, after = step_of(storage, path, name), False
        if committed and latest is not None:
            after = _modified(next(e for e in inside if e.name == MANIFEST)) > _modified(latest)
        found.append(((after, step), Candidate(name, path, committed)))
    newest_first = sorted(found, key=lambda pair: (pair[0][1], natural_order(pair[1].tag)), reverse=True)
    in_order = [c for (after, _), c in newest_first if after and named]
    in_order += [c for _, c in newest_first if c.tag == named]
    return list(dict.fromkeys([*in_order, *(c for _, c in newest_first)]))


def _named(storage: Storage, root: str) -> str:
    try:
        return storage.read_text(posixpath.join(root, LATEST)).strip()
    except CkptError:
        return ""  # it says nothing then; what else there is counts


def _is_marked(inside: list[Entry]) -> bool:
    return any(e.name == MARK for e in inside)


def _modified(entry: Entry) -> float:
    return entry.modified or 0.0


def step_of(storage: Storage, path: str, name: str) -> int:
    """Steps of the engine, by the manifest, or else the last number in the name; -1 if there is none."""
    try:
        return read_manifest(storage, path).step
    except CkptError:
        numbers = [int(value) for kind, value in natural_order(name) if kind == 0]
        return numbers[-1] if numbers else -1


def open_whole(storage: Storage, path: str) -> Checkpoint:
    """The layout of a checkpoint, every file of which is there; what is read of it later is compared with its manifest.

    Args:
        storage: Where it lies.
        path: The directory of its tag.

    Raises:
        CkptError: It is torn or damaged, as far as can be seen without reading all of it.
    """
    if is_half_removed(storage, path):
        raise LayoutError(path, "is being removed", "use another tag")
    return open_checkpoint(path, storage=guard(storage, path))
