"""``consolidate``: whole weights that load anywhere."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.api._common import open_for
from ckpttool.api._workers import workers_for
from ckpttool.dtypes import TRAINING_DTYPES
from ckpttool.errors import PlanError
from ckpttool.execution.output.destination import Destination
from ckpttool.execution.read_checks import checks_for
from ckpttool.execution.streaming import memory_bytes
from ckpttool.formats import Source, open_checkpoint
from ckpttool.formats.sidecars import find_sidecars
from ckpttool.plan.copy_checks import sample_checks
from ckpttool.targets.sidecars import with_sidecars
from ckpttool.targets.weights import select_weights
from ckpttool.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.execution.read_checks import Check, ReadReport
    from ckpttool.model import Checkpoint
    from ckpttool.plan import ConsistencyChecks, CopyPlan
    from ckpttool.targets.weights import WeightSelection
    from ckpttool.units import Progress


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """One file of the output."""

    name: str
    """File name."""
    nbytes: int
    """Size in bytes."""


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What was written, or would be."""

    out: str
    """The output directory."""
    dry_run: bool
    """True if nothing was written."""
    files: tuple[WrittenFile, ...]
    """Files of the output."""
    tensors: int
    """Tensors in them, each tied one counted once."""
    elements: int
    """Elements in them."""
    dtype: str
    """What the parameters are in: "fp32", "bf16" or "fp16"."""
    nbytes_read: int
    """Bytes of tensors read."""
    nbytes_written: int
    """Bytes of all files."""
    seconds: float
    """Wall time."""
    tied: Mapping[str, str]
    """Tied names: alias to the name the tensor is stored under."""
    companions: tuple[str, ...]
    """Files carried along: configuration, tokenizer."""
    overflowed: int
    """Finite values that became infinite in ``dtype``."""
    notes: tuple[str, ...]
    """What was noticed about the checkpoint."""
    digest: str | None = None
    """Digest of the weights, if it was asked for: the same of what was read and of what was written."""
    checks: ReadReport | None = None
    """What was compared with recorded checksums; None if nothing was read, or to no check."""


def consolidate(
    src: Source,
    out: str | os.PathLike[str],
    *,
    to: Literal["safetensors", "torch"],
    tag: str | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    weights: Literal["masters", "module"] = "masters",
    max_shard_size: int | str = "5GB",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    exclude_frozen: bool = False,
    adapter_only: bool = False,
    prove: bool = False,
    check: Check = "read",
    dry_run: bool = False,
    overwrite: bool = False,
    jobs: int | None = None,
    memory: int | str | None = None,
    ray: bool | str | None = None,
    progress: Progress | None = None,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> CopyReport:
    """Merge the shards of a checkpoint into whole weights that load anywhere.

    Trainable parameters come from the fp32 masters, frozen ones from the model's own copy; buffers keep their type.
    The output appears whole or not at all.

    Args:
        src: As for ``inspect``.
        out: Directory to write: ``model.safetensors`` or ``pytorch_model.bin``, or shards of them with an index.
        to: Kind of file.
        tag: As for ``inspect``.
        dtype: Type of the parameters, cast bit for bit as torch does.
        weights: Which weights of trainable parameters: the optimizer's masters, or the copies that the model computed
            with, which stages 1 and 2 save too and which may have been changed after the last step.
        max_shard_size: Bytes, or a text like "5GB"; a larger model is split into several files.
        include: Globs: only parameters and buffers whose full name matches one.
        exclude: Globs: no parameter or buffer whose full name matches one.
        exclude_frozen: Leave out frozen parameters.
        adapter_only: Write the PEFT adapter that was trained, as PEFT does: ``adapter_model.safetensors`` and the
            ``adapter_config.json`` that lies beside the checkpoint.
        prove: Digest what was read and what was written, and commit only if they are the same.
        check: Which recorded CRC-32 to compare with what is read, in the same pass: "read" for the records that are
            needed whole, "full" for those that are needed in part as well, whose rest is read for that; "off" for none.
        dry_run: Plan, but write nothing.
        overwrite: Allow an ``out`` that holds something; weights in it are replaced, other files stay.
        jobs: Threads. Default: one for each core, up to four; on ext4 and xfs four, and six for several files
            that are only copied, each by one of them. Where a storage is distant: 16.
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
        CkptError: The checkpoint is not sound, ``out`` cannot be written, or nothing matches.
        ValueError: ``max_shard_size`` is no size, or ``check`` unknown.
    """
    began = time.perf_counter()
    destination = Destination(os.fspath(out), storage_options)
    out, room = destination.out, memory_bytes(memory)
    if prove and overwrite and destination.distant:
        problem = "what is there could not be put back if the proof failed"
        raise PlanError(out, problem, "choose another OUT, or leave out --overwrite or --prove")
    workers = workers_for(ray, destination)
    checkpoint = open_for(
        destination, src, tag=tag, overwrite=overwrite, options=storage_options, trust_names=trust_names
    )
    if weights not in {"masters", "module"}:
        raise PlanError(out, f"cannot be written from {weights}", "choose masters or module")
    if to not in {"safetensors", "torch"} or dtype not in TRAINING_DTYPES:
        raise PlanError(out, f"cannot be written as {to} in {dtype}", "choose safetensors or torch, fp32, bf16 or fp16")
    target = TRAINING_DTYPES[dtype]
    limit = parse_size(str(max_shard_size))
    consistency = sample_checks(checkpoint) if weights == "masters" else None
    notes = [*map(str, checkpoint.notes), *checkpoint.remarks]
    if adapter_only:
        from ckpttool.targets import adapter
        from ckpttool.targets.safetensors import plan_safetensors

        if to != "safetensors" or include or exclude or exclude_frozen:
            problem = "an adapter is written whole, and as safetensors"
            raise PlanError(out, problem, "leave out --include, --exclude, --exclude-frozen and --to torch")
        selection = adapter.select_adapter(checkpoint, source=weights, dtype=target)
        plan = plan_safetensors(
            checkpoint, selection, max_shard_bytes=1 << 62, consistency=consistency, stem=adapter.STEM
        )
        companions = find_sidecars(checkpoint.storage, checkpoint.root, (adapter.CONFIG, "README.md"))
        if adapter.CONFIG not in {c.name for c in companions}:
            notes.append(f"there is no {adapter.CONFIG} beside the checkpoint: PEFT needs one in {out}")
        index = ""
    else:
        selection = select_weights(
            checkpoint, source=weights, dtype=target, include=include, exclude=exclude, exclude_frozen=exclude_frozen
        )
        plan, index = _plan_weights(to, checkpoint, selection, limit, consistency)
        companions = find_sidecars(checkpoint.storage, checkpoint.root)
    plan = with_sidecars(plan, companions, target)
    checks = checks_for(plan.sources, checkpoint, check)
    digested: str | None = None

    def check_written(directory: str) -> None:
        nonlocal digested
        if prove:
            from ckpttool.api._digests import same_weights

            written = open_checkpoint(directory, options=storage_options, unfinished=True)
            digested = same_weights(checkpoint, selection, written, jobs)

    overflowed = 0
    if not dry_run:
        overflowed = destination.write(
            plan, last=(index,), jobs=jobs, memory=room, progress=progress, check=check_written,
            resume=None, workers=workers, checks=checks,
        )  # fmt: skip
    return CopyReport(
        out=out,
        dry_run=dry_run,
        files=tuple(WrittenFile(f.name, f.nbytes) for f in plan.files),
        tensors=len(selection.weights),
        elements=sum(w.state.numel for w in selection.weights),
        dtype=dtype,
        nbytes_read=destination.nbytes_read(plan, workers),
        nbytes_written=plan.nbytes_written,
        seconds=time.perf_counter() - began,
        tied=dict(selection.aliases),
        companions=tuple(c.name for c in companions),
        overflowed=overflowed,
        notes=tuple(notes),
        digest=digested,
        checks=None if dry_run or checks is None else checks.report,
    )


def _plan_weights(
    to: str, checkpoint: Checkpoint, selection: WeightSelection, limit: int, consistency: ConsistencyChecks | None
) -> tuple[CopyPlan, str]:
    """The plan, and the name of the file that makes the rest look whole."""
    if to == "safetensors":
        from ckpttool.targets import safetensors

        return safetensors.plan_safetensors(
            checkpoint, selection, max_shard_bytes=limit, consistency=consistency
        ), safetensors.INDEX
    from ckpttool.targets import torch

    return torch.plan_torch(checkpoint, selection, max_shard_bytes=limit, consistency=consistency), torch.INDEX
