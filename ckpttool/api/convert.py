"""``convert``: a checkpoint for another number of ranks, another stage or another loader."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.api._common import open_for
from ckpttool.api._workers import workers_for
from ckpttool.dtypes import TRAINING_DTYPES
from ckpttool.execution.output.destination import Destination
from ckpttool.execution.read_checks import checks_for
from ckpttool.execution.streaming import memory_bytes
from ckpttool.formats import Source, open_checkpoint
from ckpttool.plan.copy_checks import sample_checks
from ckpttool.targets.sidecars import sidecars_for, with_sidecars

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.execution.read_checks import Check, ReadReport
    from ckpttool.units import Progress


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """A conversion that was made, or would be."""

    out: str
    """The output directory."""
    to: str
    """"zero", "universal" or "dcp"."""
    dry_run: bool
    """True if nothing was written."""
    tag: str
    """Name of the checkpoint in ``out``."""
    files: int
    """Files written."""
    nbytes_read: int
    """Bytes of tensors read."""
    nbytes_written: int
    """Bytes of all files."""
    seconds: float
    """Wall time."""
    notes: tuple[str, ...]
    """What was noticed about the checkpoint, and what will not be as it was."""
    checks: ReadReport | None = None
    """What was compared with recorded checksums; None if nothing was read, or to no check."""


def convert(
    src: Source,
    out: str | os.PathLike[str],
    *,
    to: Literal["zero", "universal", "dcp"],
    tag: str | None = None,
    world_size: int | None = None,
    stage: int | None = None,
    sub_group_size: int | None = None,
    round_robin: bool | None = None,
    expert_parallel: int | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    prove: bool = False,
    check: Check = "read",
    dry_run: bool = False,
    resume: bool = False,
    jobs: int | None = None,
    memory: int | str | None = None,
    ray: bool | str | None = None,
    progress: Progress | None = None,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> ConvertReport:
    """Write a checkpoint anew for another number of ranks, another ZeRO stage, or another loader.

    Masters, every optimizer state, steps, hyper-parameters of each group, loss scale, scheduler, client state, frozen
    parameters and buffers are carried over bit for bit. The output appears whole or not at all.

    Args:
        src: As for ``inspect``.
        out: Directory to write: a checkpoint root, with ``latest`` (or ``latest_universal``), or a DCP directory.
        to: "zero" for native files that plain ``engine.load_checkpoint`` reads on ``world_size`` ranks; "universal" for
            what DeepSpeed's ``load_universal`` reads; "dcp" for ``torch.distributed.checkpoint``.
        tag: As for ``inspect``; the output has the same.
        world_size: Data-parallel ranks that will load it; needed for "zero".
        stage: 1, 2 or 3, for "zero"; default: the source's.
        sub_group_size: As in the DeepSpeed configuration of the run that will load it, for stage 3; default: the
            source's, or DeepSpeed's.
        round_robin: Whether that run has ``round_robin_gradients``; default: as the source's configuration says.
        expert_parallel: Ranks that it spreads each layer's experts over; default: as many as the source did.
        dtype: What that run computes in, where the source does not say: needed for DCP with an optimizer; for weights
            alone the default is what they are in.
        prove: Digest what was read and what was written, and commit only if they are the same.
        check: Which recorded CRC-32 to compare with what is read, in the same pass: "read" for the records that are
            needed whole, "full" for those that are needed in part as well, whose rest is read for that; "off" for none.
        dry_run: Plan, but write nothing.
        resume: Go on from the files that a killed or failed run of the same conversion has completed, and leave what is
            complete if this one fails. Not after a power cut: nothing is synced to disk.
        jobs: As for ``consolidate``.
        memory: Bytes, or a text like "256MB", that what is in flight may take where storages are distant; default: 256
            MB. Between local files a few MB are used.
        ray: Spread the work over a Ray cluster: its address ("host:port", "auto"), or True for the one that Ray finds;
            where there is none, it starts one on this machine. Local paths must be the same files on all of its nodes.
            ``jobs`` and ``memory`` count for each of its tasks, and ``jobs`` is one by default between local files.
        progress: Called with (bytes done, bytes in all).
        trust_names: As for ``inspect``.
        storage_options: What to tell the fsspec class of URLs: keys, an endpoint, ... Default: what it finds itself.

    Raises:
        ChecksumError: What was read is not what was saved.
        CkptError: The checkpoint is not sound, or cannot be written so; or ``out`` cannot be written.
        ValueError: An argument is missing or out of range.
    """
    began = time.perf_counter()
    destination = Destination(os.fspath(out), storage_options)
    out, room = destination.out, memory_bytes(memory)
    if to not in {"zero", "universal", "dcp"}:
        raise ValueError(f"to is {to!r}, not zero, universal or dcp")
    workers = workers_for(ray, destination)
    only_zero: dict[str, object] = {
        "world_size": world_size,
        "stage": stage,
        "sub_group_size": sub_group_size,
        "dtype": dtype,
    }
    only_zero |= {"round_robin": round_robin, "expert_parallel": expert_parallel}
    useless = [k for k, v in only_zero.items() if v is not None and to != "zero"]
    if useless:
        raise ValueError(f"{useless[0]} is for zero, not for {to}")
    checkpoint = open_for(destination, src, tag=tag, overwrite=None, options=storage_options, trust_names=trust_names)
    notes = [*map(str, checkpoint.notes), *checkpoint.remarks]
    name = checkpoint.tag if checkpoint.latest is not None else f"global_step{checkpoint.step or 0}"
    if to == "zero":
        from ckpttool.formats.locate import LATEST
        from ckpttool.targets.zero.shape import shape_for, zero_losses
        from ckpttool.targets.zero.writer import plan_zero

        shape = shape_for(
            checkpoint,
            ranks=world_size,
            stage=stage,
            sub_group_size=sub_group_size,
            round_robin=round_robin,
            expert_parallel=expert_parallel,
            dtype=None if dtype is None else TRAINING_DTYPES[dtype],
        )
        plan, last = plan_zero(checkpoint, shape, tag=name), LATEST
        notes += zero_losses(checkpoint, shape)
    elif to == "universal":
        from ckpttool.targets.universal.losses import universal_losses
        from ckpttool.targets.universal.plan import plan_universal

        plan, last = plan_universal(checkpoint, tag=name, consistency=sample_checks(checkpoint)), "latest_universal"
        notes += universal_losses(checkpoint)
    else:
        from ckpttool.targets.dcp import plan_dcp

        plan, last = plan_dcp(checkpoint, consistency=sample_checks(checkpoint)), ".metadata"
        notes += [f"{what}: belongs to no parameter, and is left out" for what in checkpoint.unsliceable]
    if to != "dcp":
        companions, left_behind = sidecars_for(checkpoint, world_size)
        plan = with_sidecars(plan, companions, None)
        notes += left_behind

    checks = checks_for(plan.sources, checkpoint, check)

    def check_written(directory: str) -> None:
        if prove:
            from ckpttool.api._digests import same_digest

            written = open_checkpoint(directory, options=storage_options, unfinished=True)
            same_digest(checkpoint, written, directory, jobs)

    if not dry_run:
        destination.write(
            plan, last=(last,), jobs=jobs, memory=room,
            progress=progress, check=check_written, resume=resume, workers=workers, checks=checks,
        )  # fmt: skip
    return ConvertReport(
        out=out,
        to=to,
        dry_run=dry_run,
        tag=name,
        files=len(plan.files),
        nbytes_read=destination.nbytes_read(plan, workers),
        nbytes_written=plan.nbytes_written,
        seconds=time.perf_counter() - began,
        notes=tuple(notes),
        checks=None if dry_run or checks is None else checks.report,
    )
