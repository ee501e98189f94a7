"""Collective steps: agreement of all ranks, opening on the first rank, and errors of one rank raised on all."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ckpttool.arguments import check_installed
from ckpttool.errors import CkptError, LayoutError, PlanError
from ckpttool.execution.checks import FRAGMENT
from ckpttool.execution.sources import Sources
from ckpttool.plan.builder import source_files
from ckpttool.saving.coordination import TIMEOUT, Alone, Attempt, Ranks, attempt
from ckpttool.saving.pulse import BEAT, Pulse
from ckpttool.storage import LOCAL_SPEC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckpttool.execution.checks import ReadChecks
    from ckpttool.model import Checkpoint
    from ckpttool.storage import Storage


BROADCAST_BYTES = 1 << 26
"""Most bytes of one broadcast."""


def ranks_of_process_group(purpose: str, timeout: float = TIMEOUT, *, beat: float = BEAT) -> Ranks:
    """Return the ranks of the training's process group, for one purpose common to all ranks.

    They agree through the store of the process group, under separate keys: the training's communicators are not used,
    so that its collectives cannot be mixed up. The n-th call for a purpose on one rank agrees with the n-th call on the
    others. The store counts the calls, so that a new process group starts at zero.

    Args:
        purpose: The same on all ranks.
        timeout: Seconds that a rank may lag.
        beat: Seconds between two beats of this rank's pulse, which begins with the first call.

    Raises:
        ModuleNotFoundError: torch is not installed.
        PlanError: A process group of several ranks has no store.
    """
    check_installed("a save, a load or a proof of a live run")
    import torch.distributed as dist  # slow to import, and not needed before a save or a load

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Alone()
    store = dist.distributed_c10d._get_default_store()
    if store is None:
        problem = "has a process group without a store: its ranks cannot agree"
        raise PlanError("torch.distributed", problem, "start it with the nccl or gloo backend")
    keys = dist.PrefixStore("ckpttool", store)
    number = keys.add(f"{purpose}/calls/{dist.get_rank()}", 1)
    pulse = _pulse_in(store, beat)
    return Ranks(dist.get_rank(), dist.get_world_size(), keys, f"{purpose} {number}", timeout=timeout, pulse=pulse)


_pulses: dict[weakref.ref[Any], Pulse] = {}
"""The pulse of this rank in the store of the process group; the store must end with the group."""


def _pulse_in(store: Any, beat: float) -> Pulse | None:
    """Return the pulse of this rank in a store; None where torch cannot make a second connection to it."""
    import torch.distributed as dist

    key = weakref.ref(store)

    def current() -> bool:
        return dist.is_initialized() and dist.distributed_c10d._get_default_store() is key()

    if key not in _pulses and hasattr(store, "clone"):
        _pulses.clear()
        own = dist.PrefixStore("ckpttool", store.clone())
        _pulses[key] = Pulse(own, dist.get_rank(), beat=beat, current=current)
        _pulses[key].start()
    return _pulses.get(key)


def own_group() -> Any:
    """Return a gloo process group for small host tensors, for any backend of the training; None for one rank."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo")


def broadcast_parts(memory: Any, ends: Sequence[int]) -> None:
    """Give all ranks the bytes that each of them has read; call it on every rank, once all have read theirs.

    Args:
        memory: A tensor of bytes on the host.
        ends: For each rank, where its bytes end; they begin where the bytes of the rank before end.
    """
    import torch.distributed as dist

    group = own_group()
    for rank, (start, end) in enumerate(zip((0, *ends[:-1]), ends, strict=True)):
        for at in range(start, end, BROADCAST_BYTES):
            dist.broadcast(memory[at : min(end, at + BROADCAST_BYTES)], rank, group=group)
    dist.destroy_process_group(group)


def any_of(group: Any, value: bool) -> bool:
    """Return whether a value is true on any rank of a group."""
    if group is None:
        return value
    import torch
    import torch.distributed as dist

    counted = torch.tensor([int(value)], device="cpu")
    dist.all_reduce(counted, op=dist.ReduceOp.MAX, group=group)
    return bool(counted.item())


@contextlib.contextmanager
def unexpected_is_damage(what: str) -> Iterator[None]:
    """Context manager: raise an unexpected error of a reader as a ``LayoutError``, after which a restore falls back.

    Too little memory on a rank and errors of its system are not damage.
    """
    try:
        yield
    except (CkptError, MemoryError, OSError):
        raise
    except Exception as error:
        raise LayoutError(what, f"{type(error).__name__}: {error}", "see its log") from error


def open_together(path: str, storage: Storage, open_source: Callable[[], Checkpoint], ranks: Ranks) -> Checkpoint:
    """Open a checkpoint on the first rank and broadcast its layout, so that each file is opened once.

    Args:
        path: The checkpoint's name in errors.
        storage: This rank's own storage object, with its own connections.
        open_source: Opens the checkpoint; called only on the first rank.
        ranks: The ranks that take part.

    Raises:
        RankError: A rank made no call in time.
        CkptError: The checkpoint is missing or damaged; the same on every rank.
    """
    import torch.distributed as dist

    opened: Attempt[Checkpoint] = Attempt()
    if ranks.rank == 0:
        opened = attempt(unexpected_is_damage(path)(open_source))
    ranks.on_first(path, opened.check)
    # Without the options of this rank's storage.
    shared = [None if opened.value is None else replace(opened.value, storage=LOCAL_SPEC)]
    if ranks.size > 1:
        dist.broadcast_object_list(shared)  # all ranks are ready
    return replace(cast("Checkpoint", shared[0]), storage=storage.spec)


def check_on_all_ranks(checks: ReadChecks, checkpoint: Checkpoint, ranks: Ranks) -> None:
    """Compare the bytes that all ranks have read with the recorded checksums; each rank compares a share of the files.

    Args:
        checks: Checksums of the bytes that this rank has read.
        checkpoint: The source.
        ranks: The ranks that take part; they have just agreed, so that none is missing.

    Raises:
        ChecksumError: Bytes differ from those saved; on every rank.
        StorageError: The rest of a record cannot be read; on every rank.
    """
    import torch.distributed as dist

    fragments: list[Any] = [checks.take_fragments().tobytes()] * ranks.size
    if ranks.size > 1:
        dist.all_gather_object(fragments, fragments[ranks.rank])
    ranks.together(checkpoint.location, partial(_check_share, checks, checkpoint, fragments, ranks.rank))


def _check_share(checks: ReadChecks, checkpoint: Checkpoint, fragments: Sequence[bytes], rank: int) -> None:
    for data in fragments:
        rows = np.frombuffer(data, dtype=FRAGMENT)
        checks.add(rows[rows["file"] % np.uint64(len(fragments)) == rank])
    with Sources(source_files(checkpoint), checks) as sources:
        sources.finish_checks()
