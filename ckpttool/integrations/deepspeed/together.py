"""What ranks do as one: the first looks and tells the others, and an error on one is raised on all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ckpttool.errors import CkptError, LayoutError
from ckpttool.guarded import GuardedStorage, guard
from ckpttool.storage import LOCAL

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpttool.model import Checkpoint
    from ckpttool.storage import Storage

T = TypeVar("T")


def told_by_the_first(path: str, function: Callable[[], T]) -> T:
    """What a function returns on the first rank; what it raises there is raised on all.

    Raises:
        CkptError: What the function raised.
    """
    import torch.distributed as dist

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


def open_together(path: str, storage: Storage, look: Callable[[], Checkpoint]) -> Checkpoint:
    """The layout of a checkpoint, read by the first rank: N ranks do not ask for M files each.

    Where it has a manifest, what is read of it is compared with that.

    Args:
        path: What errors call it.
        storage: This rank's own way to it.
        look: Opens it; called on the first rank.

    Raises:
        CkptError: There is no sound checkpoint; the same on every rank.
    """

    def opened() -> tuple[Checkpoint, Any]:
        checkpoint = look()
        guarded = guard(checkpoint.storage, checkpoint.location)
        # A storage holds connections: every rank has its own.
        return replace(checkpoint, storage=LOCAL), getattr(guarded, "checksums", None)

    checkpoint, checksums = told_by_the_first(path, opened)
    return replace(checkpoint, storage=storage if checksums is None else GuardedStorage(storage, checksums))


def agree_on_all_ranks(error: BaseException | None) -> None:
    """Raise on every rank what was raised on any; the same on all, so that all do the same about it.

    Raises:
        CkptError: What the first of those that failed raised, and which it was.
    """
    import torch.distributed as dist

    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, None if error is None else _told(error))
    for rank, (kind, path, problem, hint) in ((r, t) for r, t in enumerate(told) if t is not None):
        raise kind(path, problem if len(told) == 1 else f"rank {rank}: {problem}", hint) from error


def _told(error: BaseException) -> tuple[type[CkptError], str, str, str]:
    if isinstance(error, CkptError):
        return type(error), error.path, error.problem, error.hint
    return LayoutError, "loading", f"{type(error).__name__}: {error}", "see the output of that rank"
