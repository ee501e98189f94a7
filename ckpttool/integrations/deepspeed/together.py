"""What ranks do as one: the first looks and tells the others, and an error on one is raised on all."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.errors import CkptError, LayoutError
from ckpttool.guarded import GuardedStorage, guard
from ckpttool.saving.ranks import kinds_of_errors
from ckpttool.storage import LOCAL

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpttool.model import Checkpoint
    from ckpttool.saving.ranks import Ranks
    from ckpttool.storage import Storage

LOG = logging.getLogger("ckpttool")
_numbers = itertools.count()


def own_ranks(what: str) -> Ranks:
    """The ranks of the process group, for one thing that all of them are about to do."""
    from ckpttool.integrations.process_group import ranks_of_process_group

    return ranks_of_process_group(f"{what} {next(_numbers)}")


def open_together(
    path: str, storage: Storage, look: Callable[[], Checkpoint], ranks: Ranks, *, timeout: float
) -> Checkpoint:
    """The layout of a checkpoint, read by the first rank: N ranks do not ask for M files each.

    Where it has a manifest, what is read of it is compared with that.

    Args:
        path: What errors call it.
        storage: This rank's own way to it.
        look: Opens it; called on the first rank.
        ranks: Who takes part.
        timeout: Seconds that a rank may be behind the first.

    Raises:
        RankError: A rank was not heard of in time.
        CkptError: There is no sound checkpoint; the same on every rank.
    """
    import torch.distributed as dist

    told: list[Any] = [None]

    def opened(_: list[Any]) -> None:
        try:
            checkpoint = look()
            guarded = guard(checkpoint.storage, checkpoint.location)
        except CkptError:
            raise
        except Exception as error:
            LOG.exception("a checkpoint could not be opened")
            raise LayoutError(path, f"{type(error).__name__}: {error}", "see the log of rank 0") from error
        # A storage holds connections: every rank has its own.
        told[0] = replace(checkpoint, storage=LOCAL), getattr(guarded, "checksums", None)

    ranks.agree(path, None, opened, timeout=timeout)
    if ranks.size > 1:
        dist.broadcast_object_list(told)  # all are there
    checkpoint: Checkpoint = told[0][0]
    checksums = told[0][1]
    return replace(checkpoint, storage=storage if checksums is None else GuardedStorage(storage, checksums))


def agree_on_all_ranks(ranks: Ranks, path: str, error: BaseException | None, *, timeout: float) -> None:
    """Raise on every rank what was raised on any; the same on all, so that all do the same about it.

    Raises:
        RankError: A rank was not heard of in time.
        CkptError: What the first of those that failed raised, and which it was.
    """

    def look(told: list[Any]) -> None:
        for rank, one in enumerate(told):
            if one is not None:
                kind, where, problem, hint = one
                raise kinds_of_errors()[kind](where, problem if len(told) == 1 else f"rank {rank}: {problem}", hint)

    try:
        ranks.agree(path, None if error is None else _told(error), look, timeout=timeout)
    except CkptError as raised:
        raise raised from error


def _told(error: BaseException) -> tuple[str, str, str, str]:
    if isinstance(error, CkptError):
        return type(error).__name__, error.path, error.problem, error.hint
    return "LayoutError", "loading", f"{type(error).__name__}: {error}", "see the output of that rank"
