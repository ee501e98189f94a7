"""Which checkpoint of a root the ranks go on from, looked for by the first and told to the others."""

from __future__ import annotations

import posixpath
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from ckpttool.candidates import Candidate, candidates, open_whole
from ckpttool.errors import CkptError, LayoutError
from ckpttool.guarded import GuardedStorage
from ckpttool.manifest import is_commit
from ckpttool.storage import LOCAL

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpttool.model import Checkpoint
    from ckpttool.storage import Storage

T = TypeVar("T")


def find_together(storage: Storage, root: str, tag: str | None) -> list[Candidate]:
    """The checkpoints to try, best first; the same on every rank.

    Raises:
        CkptError: The root cannot be read, or there is none of that tag.
    """
    return _told(root, lambda: _find(storage, root, tag))


def _find(storage: Storage, root: str, tag: str | None) -> list[Candidate]:
    storage.refresh([])
    if tag is None:
        return candidates(storage, root)
    path = posixpath.join(root, tag)
    if not storage.is_dir(path):
        there = ", ".join(c.tag for c in candidates(storage, root)) or "none"
        raise LayoutError(root, f"holds no checkpoint of tag {tag!r}", f"these are there: {there}")
    return [Candidate(tag, path, is_commit(storage, path))]


def open_together(storage: Storage, path: str) -> Checkpoint:
    """The layout of a checkpoint; what is read of it is compared with its manifest.

    Raises:
        CkptError: It is torn or damaged, as far as can be seen without reading all of it; the same on every rank.
    """

    def look() -> tuple[Checkpoint, Any]:
        checkpoint = open_whole(storage, path)
        guard = checkpoint.storage
        # A storage holds connections: every rank has its own.
        return replace(checkpoint, storage=LOCAL), guard.checksums if isinstance(guard, GuardedStorage) else None

    checkpoint, checksums = _told(path, look)
    return replace(checkpoint, storage=storage if checksums is None else GuardedStorage(storage, checksums))


def _told(path: str, function: Callable[[], T]) -> T:
    """What a function returns on the first rank; what it raises there is raised on all."""
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            told = [function()]
        except Exception as error:  # told to all below
            told = [error if isinstance(error, CkptError) else LayoutError(path, repr(error), "see the log of rank 0")]
    dist.broadcast_object_list(told)
    found = told[0]
    if isinstance(found, CkptError):
        raise found
    result: T = found
    return result
