"""One function for each command.

What only one command or target needs is imported there: half of the time that a small command takes is starting up.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ckpttool.dtypes import TRAINING_DTYPES
from ckpttool.errors import PlanError
from ckpttool.execute import run
from ckpttool.formats import open_checkpoint
from ckpttool.formats.companions import find_companions
from ckpttool.progress import Meter
from ckpttool.proofs import sample_proofs
from ckpttool.sizes import parse_size
from ckpttool.staging import check_apart, check_space, check_target, staged
from ckpttool.storage import open_storage
from ckpttool.targets.companions import with_companions
from ckpttool.targets.weights import select_weights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.model import Checkpoint
    from ckpttool.plan import CopyPlan
    from ckpttool.progress import Progress
    from ckpttool.verification import VerifyReport

_WEIGHT_FILES = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")


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


def inspect(src: str | os.PathLike[str], *, tag: str | None = None) -> Checkpoint:
    """Read the layout of a checkpoint; no weights are read and nothing in it is run.

    Args:
        src: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``.
        tag: Which checkpoint of a root; default: the one that ``latest`` names.

    Raises:
        CkptError: There is no sound checkpoint; says which file, what is wrong and what to do.
    """
    return open_checkpoint(os.fspath(src), tag=tag)


def consolidate(
    src: str | os.PathLike[str],
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
    dry_run: bool = False,
    overwrite: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
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
        dry_run: Plan, but write nothing.
        overwrite: Allow an ``out`` that holds something; weights in it are replaced, other files stay.
        jobs: Threads. Default: one where bytes are only copied, which is as fast as ``cp``, and one for each core, up
            to four, where they are cast. More pay where the checkpoint lies on a slow or distant disk.
        progress: Called with (bytes done, bytes in all).

    Raises:
        CkptError: The checkpoint is not sound, ``out`` cannot be written, or nothing matches.
        ValueError: ``max_shard_size`` is no size.
    """
    began = time.perf_counter()
    src, out = os.fspath(src), os.fspath(out)
    if not dry_run:
        check_target(out, overwrite=overwrite)
    checkpoint = open_checkpoint(src, tag=tag)
    if not dry_run:
        check_apart(out, checkpoint.location)
    if weights not in {"masters", "module"}:
        raise PlanError(out, f"cannot be written from {weights}", "choose masters or module")
    if to not in {"safetensors", "torch"} or dtype not in TRAINING_DTYPES:
        raise PlanError(out, f"cannot be written as {to} in {dtype}", "choose safetensors or torch, fp32, bf16 or fp16")
    target = TRAINING_DTYPES[dtype]
    selection = select_weights(
        checkpoint, source=weights, dtype=target, include=include, exclude=exclude, exclude_frozen=exclude_frozen
    )
    limit = parse_size(str(max_shard_size))
    if to == "safetensors":
        from ckpttool.targets.safetensors import INDEX
        from ckpttool.targets.safetensors import plan_safetensors as make_plan
    else:
        from ckpttool.targets.torch import INDEX
        from ckpttool.targets.torch import plan_torch as make_plan
    proofs = sample_proofs(checkpoint) if weights == "masters" else None
    companions = find_companions(open_storage(src), checkpoint.root)
    plan = with_companions(make_plan(checkpoint, selection, max_shard_bytes=limit, proofs=proofs), companions, target)
    overflowed = 0 if dry_run else _write(plan, out, INDEX, jobs, progress)
    return CopyReport(
        out=out,
        dry_run=dry_run,
        files=tuple(WrittenFile(f.name, f.nbytes) for f in plan.files),
        tensors=len(selection.weights),
        elements=sum(w.state.numel for w in selection.weights),
        dtype=dtype,
        nbytes_read=plan.nbytes_read,
        nbytes_written=plan.nbytes_written,
        seconds=time.perf_counter() - began,
        tied=dict(selection.aliases),
        companions=tuple(c.name for c in companions),
        overflowed=overflowed,
        notes=(*map(str, checkpoint.notes), *checkpoint.remarks),
    )


def verify(
    src: str | os.PathLike[str],
    *,
    tag: str | None = None,
    deep: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check that a checkpoint is whole and sound; lists every finding, raises none.

    Args:
        src: As for ``inspect``.
        tag: As for ``inspect``.
        deep: Read every byte: compare checksums, look for NaN and infinity, compare 16-bit copies with their masters.
        jobs: Threads. Default: one for each core, up to four.
        progress: Called with (bytes done, bytes in all).
    """
    from ckpttool.verification import verify_checkpoint

    return verify_checkpoint(os.fspath(src), tag=tag, deep=deep, jobs=jobs, progress=progress)


def _write(plan: CopyPlan, out: str, index: str, jobs: int | None, progress: Progress | None) -> int:
    check_space(out, plan.nbytes_written)

    def is_weights(name: str) -> bool:
        return _WEIGHT_FILES.fullmatch(name) is not None

    with staged(out, replaces=is_weights, last=(index,)) as directory:
        return run(plan, directory, jobs=jobs, advance=Meter(plan.nbytes_written, progress)).overflowed
