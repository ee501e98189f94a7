"""Collective steps: agreement of all ranks, opening on the first rank, and errors of one rank raised on all."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.commit.checksummed import ChecksummedStorage
from ckpttool.errors import CkptError, LayoutError, PlanError
from ckpttool.execution.checks import FRAGMENT
from ckpttool.execution.sources import Sources
from ckpttool.plan.builder import source_files
from ckpttool.saving.coordination import Alone, RankError, Ranks, error_from_data, error_to_data
from ckpttool.storage import LOCAL_SPEC, connect

if TYPE_CHECKING:
    from ckpttool.execution.checks import ReadChecks
    from ckpttool.model import Checkpoint
    from ckpttool.storage import Storage


def ranks_of_process_group(purpose: str) -> Ranks:
    """Return the ranks of the training's process group, for one purpose common to all ranks.

    They agree through the store of the process group, under separate keys: the training's communicators are not used,
    so that its collectives cannot be mixed up. The n-th call for a purpose on one rank agrees with the n-th call on the
    others. The store counts the calls, so that a new process group starts at zero.

    Args:
        purpose: The same on all ranks.

    Raises:
        PlanError: A process group of several ranks has no store.
    """
    import torch.distributed as dist  # slow to import, and not needed before a save or a load

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Alone()
    store = dist.distributed_c10d._get_default_store()
    if store is None:
        problem = "has a process group without a store: its ranks cannot agree"
        raise PlanError("torch.distributed", problem, "start it with the nccl or gloo backend")
    keys = dist.PrefixStore("ckpttool", store)
    number = keys.add(f"{purpose}/calls/{dist.get_rank()}", 1)
    return Ranks(dist.get_rank(), dist.get_world_size(), keys, f"{purpose} {number}")


def own_group() -> Any:
    """Return a gloo process group for small host tensors, for any backend of the training; None for one rank."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo")


def any_of(group: Any, value: bool) -> bool:
    """Return whether a value is true on any rank of a group."""
    if group is None:
        return value
    import torch
    import torch.distributed as dist

    counted = torch.tensor([int(value)])
    dist.all_reduce(counted, op=dist.ReduceOp.MAX, group=group)
    return bool(counted.item())


LOG = logging.getLogger(__name__)
Agree = Callable[[BaseException | None], None]
"""Called on every rank with the error of the first half of a load, or None; raises on all ranks if any has one."""


def open_together(
    path: str, storage: Storage, open_source: Callable[[], Checkpoint], ranks: Ranks, *, timeout: float
) -> Checkpoint:
    """Open a checkpoint on the first rank and broadcast its layout, so that each file is opened once.

    If it was opened with the key of its signature, all reads are compared with the checksums that were signed.

    Args:
        path: The checkpoint's name in errors.
        storage: This rank's own storage object, with its own connections.
        open_source: Opens the checkpoint; called only on the first rank.
        ranks: The ranks that take part.
        timeout: Seconds that a rank may lag.

    Raises:
        RankError: A rank sent no message in time.
        CkptError: The checkpoint is missing or damaged; the same on every rank.
    """
    import torch.distributed as dist

    shared: list[Any] = [None]

    def open_and_share(_: list[Any]) -> None:
        try:
            checkpoint = open_source()
        except CkptError:
            raise
        except Exception as error:
            LOG.exception("a checkpoint could not be opened")
            raise _unexpected(path, error, "see the log of rank 0") from error
        # Without the options of rank 0: every rank uses its own storage.
        checksums = getattr(connect(checkpoint.storage), "checksums", None)
        shared[0] = replace(checkpoint, storage=LOCAL_SPEC), checksums

    ranks.agree(path, None, open_and_share, timeout=timeout)
    if ranks.size > 1:
        dist.broadcast_object_list(shared)  # all ranks are ready
    checkpoint: Checkpoint
    checkpoint, checksums = shared[0]
    own = storage if checksums is None else ChecksummedStorage(storage, checksums)
    return replace(checkpoint, storage=own.spec)


def check_on_all_ranks(checks: ReadChecks, checkpoint: Checkpoint, agree: Agree) -> None:
    """Compare the bytes that all ranks have read with the recorded checksums; each rank compares a share of the files.

    Args:
        checks: Checksums of the bytes that this rank has read.
        checkpoint: The source.
        agree: Raises an error of any rank on all ranks.

    Raises:
        ChecksumError: Bytes differ from those saved; on every rank.
        StorageError: The rest of a record cannot be read; on every rank.
    """
    import torch.distributed as dist

    size, own = dist.get_world_size(), dist.get_rank()
    fragments: list[Any] = [None] * size
    dist.all_gather_object(fragments, checks.take_fragments().tobytes())  # all ranks are ready: they have just agreed
    error: BaseException | None = None
    try:
        for data in fragments:
            rows = np.frombuffer(data, dtype=FRAGMENT)
            checks.add(rows[rows["file"] % np.uint64(size) == own])
        with Sources(source_files(checkpoint), checks) as sources:
            sources.finish_checks()
    except CkptError as problem:
        error = problem
    agree(error)
    if error is not None:
        raise error


def agree_on_all_ranks(ranks: Ranks, path: str, error: BaseException | None, *, timeout: float) -> None:
    """Raise an error of any rank on all ranks, so that all of them handle it in the same way.

    Raises:
        RankError: A rank sent no message in time.
        CkptError: The error of the first rank that failed, with its number.
    """

    def raise_first(errors: list[Any]) -> None:
        for rank, one in enumerate(errors):
            if one is not None:
                failed = error_from_data(one)
                where = f"rank {rank}: " if len(errors) > 1 else ""
                raise type(failed)(failed.path, where + failed.problem, failed.hint, failed.options)

    try:
        ranks.agree(path, None if error is None else _to_message(error), raise_first, timeout=timeout)
    except CkptError as raised:
        raise raised from error


def _to_message(error: BaseException) -> list[Any]:
    if isinstance(error, CkptError):
        return error_to_data(error)
    return error_to_data(_unexpected("loading", error, "see the output of that rank"))


def _unexpected(what: str, error: BaseException, hint: str) -> CkptError:
    """Return the error for all ranks; too little memory on a rank is not damage, after which a restore falls back."""
    kind = RankError if isinstance(error, (MemoryError, OSError)) else LayoutError
    return kind(what, f"{type(error).__name__}: {error}", hint)
