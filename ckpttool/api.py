"""One function for each command.

What only one command or target needs is imported there: half of the time that a small command takes is starting up.
"""

from __future__ import annotations

import math
import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.dtypes import TRAINING_DTYPES
from ckpttool.errors import LayoutError, PlanError, StorageError
from ckpttool.formats import Source, open_checkpoint
from ckpttool.formats import source_paths as _paths
from ckpttool.formats.companions import find_companions
from ckpttool.progress import Meter
from ckpttool.proofs import sample_proofs
from ckpttool.sizes import parse_size
from ckpttool.targets.companions import companions_for, with_companions
from ckpttool.targets.weights import select_weights
from ckpttool.transfer import memory_bytes as _memory
from ckpttool.writing import Destination

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from ckpttool.catalog import Catalog
    from ckpttool.comparison import DiffReport
    from ckpttool.digests import Digest
    from ckpttool.model import Checkpoint
    from ckpttool.plan import CopyPlan, Proofs
    from ckpttool.progress import Progress
    from ckpttool.retention import Decision
    from ckpttool.statistics import TensorStats
    from ckpttool.targets.weights import WeightSelection
    from ckpttool.tasks import Workers
    from ckpttool.verification import VerifyReport

_WEIGHT_FILES = re.compile(r"(model|pytorch_model|adapter_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")


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


@dataclass(frozen=True, slots=True)
class ExtractReport:
    """One tensor that was written."""

    out: str
    """The file."""
    name: str
    """The tensor."""
    state: str
    """Which of its states."""
    dtype: str
    """safetensors' spelling."""
    shape: tuple[int, ...]
    """Of what was written."""
    nbytes: int
    """Bytes of its values."""


def inspect(src: Source, *, tag: str | None = None, storage_options: Mapping[str, Any] | None = None) -> Checkpoint:
    """Read the layout of a checkpoint; no weights are read and nothing in it is run.

    Args:
        src: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``; a
            universal checkpoint; a directory of ``torch.distributed.checkpoint``; safetensors, or ``torch.save`` files
            of weights. Several directories if each holds the files of some ranks (node-local storage).
        tag: Which checkpoint of a root; default: the one that ``latest`` names.
        storage_options: What to tell the fsspec class of URLs: keys, an endpoint, ... Default: what it finds itself.

    Raises:
        CkptError: There is no sound checkpoint; says which file, what is wrong and what to do.
    """
    return open_checkpoint(_paths(src), tag=tag, options=storage_options)


def digest(
    src: Source,
    *,
    tag: str | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Digest:
    """Digest the values of a checkpoint; how they are sharded and stored makes no difference.

    Args:
        src: As for ``inspect``.
        tag: As for ``inspect``.
        jobs: Threads. Default: one for each core, up to four.
        progress: Called with (bytes done, bytes in all).
        storage_options: What to tell the fsspec class of URLs: keys, an endpoint, ... Default: what it finds itself.

    Raises:
        CkptError: The checkpoint is not sound, or cannot be read.
    """
    from ckpttool import digests
    from ckpttool.contents import contents

    checkpoint = open_checkpoint(_paths(src), tag=tag, options=storage_options)
    meter = Meter(sum(c.state.nbytes for c in contents(checkpoint)), progress)
    return digests.digest(checkpoint, jobs=jobs, advance=meter)


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
    dry_run: bool = False,
    overwrite: bool = False,
    jobs: int | None = None,
    memory: int | str | None = None,
    ray: bool | str | None = None,
    progress: Progress | None = None,
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
        dry_run: Plan, but write nothing.
        overwrite: Allow an ``out`` that holds something; weights in it are replaced, other files stay.
        jobs: Threads. Default: one for each core, up to four; a file whose bytes are only copied is written by one of
            them. Where a storage is distant: 16.
        memory: Bytes, or a text like "256MB", that what is in flight may take where storages are distant; default: 256
            MB. Between local files a few MB are used.
        ray: Spread the work over a Ray cluster: its address ("host:port", "auto"), or True for the one that Ray finds;
            where there is none, it starts one on this machine. Local paths must be the same files on all of its nodes.
            ``jobs`` and ``memory`` count for each of its tasks, and ``jobs`` is one by default between local files.
        progress: Called with (bytes done, bytes in all).
        storage_options: What to tell the fsspec class of URLs: keys, an endpoint, ... Default: what it finds itself.

    Raises:
        CkptError: The checkpoint is not sound, ``out`` cannot be written, or nothing matches.
        ValueError: ``max_shard_size`` is no size.
    """
    began = time.perf_counter()
    paths, destination = _paths(src), Destination(os.fspath(out), storage_options)
    out, room = destination.out, _memory(memory)
    if prove and overwrite and destination.distant:
        problem = "what is there could not be put back if the proof failed"
        raise PlanError(out, problem, "choose another OUT, or leave out --overwrite or --prove")
    destination.check_target(overwrite=overwrite)
    workers = _workers(ray, destination)
    checkpoint = open_checkpoint(paths, tag=tag, options=storage_options)
    destination.check_apart(checkpoint)
    if weights not in {"masters", "module"}:
        raise PlanError(out, f"cannot be written from {weights}", "choose masters or module")
    if to not in {"safetensors", "torch"} or dtype not in TRAINING_DTYPES:
        raise PlanError(out, f"cannot be written as {to} in {dtype}", "choose safetensors or torch, fp32, bf16 or fp16")
    target = TRAINING_DTYPES[dtype]
    limit = parse_size(str(max_shard_size))
    proofs = sample_proofs(checkpoint) if weights == "masters" else None
    notes = [*map(str, checkpoint.notes), *checkpoint.remarks]
    if adapter_only:
        from ckpttool.targets import adapter
        from ckpttool.targets.safetensors import plan_safetensors

        if to != "safetensors" or include or exclude or exclude_frozen:
            problem = "an adapter is written whole, and as safetensors"
            raise PlanError(out, problem, "leave out --include, --exclude, --exclude-frozen and --to torch")
        selection = adapter.select_adapter(checkpoint, source=weights, dtype=target)
        plan = plan_safetensors(checkpoint, selection, max_shard_bytes=1 << 62, proofs=proofs, stem=adapter.STEM)
        companions = find_companions(checkpoint.storage, checkpoint.root, (adapter.CONFIG, "README.md"))
        if adapter.CONFIG not in {c.name for c in companions}:
            notes.append(f"there is no {adapter.CONFIG} beside the checkpoint: PEFT needs one in {out}")
        index = ""
    else:
        selection = select_weights(
            checkpoint, source=weights, dtype=target, include=include, exclude=exclude, exclude_frozen=exclude_frozen
        )
        plan, index = _plan_weights(to, checkpoint, selection, limit, proofs)
        companions = find_companions(checkpoint.storage, checkpoint.root)
    plan = with_companions(plan, companions, target)
    digested: str | None = None

    def check(directory: str) -> None:
        nonlocal digested
        if prove:
            written = open_checkpoint(directory, options=storage_options, unfinished=True)
            digested = _proof(checkpoint, selection, written, jobs)

    overflowed = 0
    if not dry_run:
        overflowed = destination.write(
            plan, replaces=_is_weights, last=(index,), jobs=jobs, memory=room, progress=progress, check=check,
            resume=None, workers=workers,
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
    )


def verify(
    src: Source,
    *,
    tag: str | None = None,
    deep: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Check that a checkpoint is whole and sound; lists every finding, raises none.

    Args:
        src: As for ``inspect``.
        tag: As for ``inspect``.
        deep: Read every byte: compare checksums, look for NaN and infinity, compare 16-bit copies with their masters.
        jobs: Threads. Default: one for each core, up to four.
        progress: Called with (bytes done, bytes in all).
        storage_options: What to tell the fsspec class of URLs: keys, an endpoint, ... Default: what it finds itself.
    """
    from ckpttool.verification import verify_checkpoint

    return verify_checkpoint(_paths(src), tag=tag, deep=deep, jobs=jobs, progress=progress, options=storage_options)


def diff(
    a: Source,
    b: Source,
    *,
    tag_a: str | None = None,
    tag_b: str | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    jobs: int | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> DiffReport:
    """Compare two checkpoints of any formats and topologies: names, shapes, weights and optimizer states.

    Both are read once, in small pieces. Weights are the fp32 masters where there are any. Element x of ``a`` equals
    element y of ``b`` if ``|x - y| <= atol + rtol * |y|``, or if both are NaN.

    Args:
        a: As for ``inspect``.
        b: As for ``inspect``.
        tag_a: Which checkpoint of a.
        tag_b: Which checkpoint of b.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        include: Globs: only parameters and buffers whose full name matches one.
        exclude: Globs: no parameter or buffer whose full name matches one.
        jobs: Threads. Default: one for each core, up to four.
        progress: Called with (bytes done, bytes in all).
        storage_options: What to tell the fsspec class of URLs: keys, an endpoint, ... Default: what it finds itself.

    Raises:
        CkptError: One of them is not sound, or cannot be read.
    """
    from ckpttool.comparison import compare
    from ckpttool.contents import contents, matcher

    first, second = (
        open_checkpoint(_paths(a), tag=tag_a, options=storage_options),
        open_checkpoint(_paths(b), tag=tag_b, options=storage_options),
    )
    meter = Meter(sum(c.state.nbytes for c in [*contents(first), *contents(second)]), progress)
    matches = matcher(include, exclude)
    if not any(matches(c.name) for c in [*contents(first), *contents(second)]):
        raise PlanError(first.location, "holds no tensor of that name", "check --include and --exclude")
    if not (0 <= rtol < math.inf and 0 <= atol < math.inf):
        raise ValueError(f"rtol is {rtol} and atol {atol}, but they must be finite and not negative")
    return compare(first, second, rtol=rtol, atol=atol, include=include, exclude=exclude, jobs=jobs, advance=meter)


def stats(
    src: Source,
    *,
    tag: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    optimizer: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> list[TensorStats]:
    """Extremes, mean, norm and counts of NaN, infinity and zero of every tensor, read in small pieces.

    Args:
        src: As for ``inspect``.
        tag: As for ``inspect``.
        include: Globs: only parameters and buffers whose full name matches one.
        exclude: Globs: no parameter or buffer whose full name matches one.
        optimizer: Also the optimizer's states.
        jobs: Threads. Default: one for each core, up to four.
        progress: Called with (bytes done, bytes in all).
        storage_options: What to tell the fsspec class of URLs: keys, an endpoint, ... Default: what it finds itself.

    Raises:
        CkptError: The checkpoint is not sound, or cannot be read.
    """
    from ckpttool.contents import WEIGHTS, contents, matcher
    from ckpttool.statistics import statistics

    checkpoint = open_checkpoint(_paths(src), tag=tag, options=storage_options)
    matches = matcher(include, exclude)
    held = [c for c in contents(checkpoint) if matches(c.name) and (optimizer or c.key == WEIGHTS)]
    if not held:
        raise PlanError(checkpoint.location, "holds no tensor of that name", "check --include and --exclude")
    meter = Meter(sum(c.state.nbytes for c in held), progress)
    return list(statistics(checkpoint, held, jobs=jobs, advance=meter))


def extract(
    src: Source | Checkpoint,
    name: str,
    *,
    tag: str | None = None,
    state: str = "weights",
    part: Any = None,
    framework: Literal["numpy", "torch"] = "numpy",
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """Read one tensor, or a slice of it; only its bytes are read.

    Args:
        src: As for ``inspect``, or what ``inspect`` returned.
        name: Parameter or buffer, by its own or a tied name.
        tag: As for ``inspect``.
        state: "weights" for the fp32 master, or where there is none the model's own copy; or what the checkpoint calls
            a state: "fp32", "module", "exp_avg", ...
        part: What to take of it, as in ``tensor[part]``: integers and slices of step 1, one for each dimension from the
            first on; default: all.
        framework: "numpy" for an array (bf16 as ``ml_dtypes`` has it), "torch" for a tensor.
        storage_options: What to tell the fsspec class of URLs: keys, an endpoint, ... Default: what it finds itself.

    Returns:
        The tensor in its own type and shape, in memory of its own.

    Raises:
        CkptError: The checkpoint is not sound, or holds no such tensor.
        ValueError: ``part`` does not fit the shape.
    """
    from ckpttool.contents import find
    from ckpttool.extraction import read_part
    from ckpttool.model import Checkpoint

    checkpoint = src if isinstance(src, Checkpoint) else open_checkpoint(_paths(src), tag=tag, options=storage_options)
    values = read_part(checkpoint, find(checkpoint, name, state), part)
    if framework == "torch":
        from ckpttool.integrations.torch import as_torch

        return as_torch(values)
    return values


def extract_to_file(
    src: Source,
    name: str,
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    state: str = "weights",
    part: Any = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> ExtractReport:
    """Write one tensor, or a slice of it, to a file; only its bytes are read, and it is held in memory once.

    Args:
        src: As for ``inspect``.
        name: As for ``extract``.
        out: File to write; its ending tells the kind: ``.safetensors``, ``.npy`` or ``.pt``.
        tag: As for ``inspect``.
        state: As for ``extract``.
        part: As for ``extract``.
        overwrite: Replace the file if it is there.
        storage_options: What to tell the fsspec class of URLs: keys, an endpoint, ... Default: what it finds itself.

    Raises:
        CkptError: The checkpoint is not sound, holds no such tensor, or the file cannot be written.
    """
    from ckpttool.contents import find
    from ckpttool.extraction import encode, read_part
    from ckpttool.writing import write_file

    checkpoint = open_checkpoint(_paths(src), tag=tag, options=storage_options)
    found = find(checkpoint, name, state)
    try:
        values = read_part(checkpoint, found, part)
    except ValueError as error:
        raise PlanError(
            checkpoint.location, f"{name}: {error}", "see ckpttool inspect --params for the shape"
        ) from error
    parts = encode(values, name, os.fspath(out))
    written = write_file(os.fspath(out), parts, overwrite=overwrite, options=storage_options)
    return ExtractReport(written, name, state, found.dtype, values.shape, values.nbytes)


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
    dry_run: bool = False,
    resume: bool = False,
    jobs: int | None = None,
    memory: int | str | None = None,
    ray: bool | str | None = None,
    progress: Progress | None = None,
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
        storage_options: What to tell the fsspec class of URLs: keys, an endpoint, ... Default: what it finds itself.

    Raises:
        CkptError: The checkpoint is not sound, or cannot be written so; or ``out`` cannot be written.
        ValueError: An argument is missing or out of range.
    """
    began = time.perf_counter()
    paths, destination = _paths(src), Destination(os.fspath(out), storage_options)
    out, room = destination.out, _memory(memory)
    if to not in {"zero", "universal", "dcp"}:
        raise ValueError(f"to is {to!r}, not zero, universal or dcp")
    destination.check_target(overwrite=None)
    workers = _workers(ray, destination)
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
    checkpoint = open_checkpoint(paths, tag=tag, options=storage_options)
    destination.check_apart(checkpoint)
    notes = [*map(str, checkpoint.notes), *checkpoint.remarks]
    name = checkpoint.tag if checkpoint.format in {"zero", "universal"} else f"global_step{checkpoint.step or 0}"
    if to == "zero":
        from ckpttool.targets.zero.plan import LATEST, plan_zero, shape_for, zero_losses

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
        from ckpttool.targets.universal import plan_universal, universal_losses

        plan, last = plan_universal(checkpoint, tag=name, proofs=sample_proofs(checkpoint)), "latest_universal"
        notes += universal_losses(checkpoint)
    else:
        from ckpttool.targets.dcp import plan_dcp

        plan, last = plan_dcp(checkpoint, proofs=sample_proofs(checkpoint)), ".metadata"
    if to != "dcp":
        companions, left_behind = companions_for(checkpoint, world_size)
        plan = with_companions(plan, companions, None)
        notes += left_behind

    def check(directory: str) -> None:
        if prove:
            _same_digest(
                checkpoint, open_checkpoint(directory, options=storage_options, unfinished=True), directory, jobs
            )

    if not dry_run:
        destination.write(
            plan, replaces=_is_weights, last=(last,), jobs=jobs, memory=room,
            progress=progress, check=check, resume=resume, workers=workers,
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
    )


@dataclass(frozen=True, slots=True)
class TransferReport:
    """A checkpoint that was copied."""

    src: str
    """Its directory."""
    out: str
    """Directory of the copy."""
    tag: str
    """Its name."""
    files: int
    """Files copied."""
    nbytes: int
    """Their size in bytes."""
    seconds: float
    """Wall time."""
    latest: bool
    """Whether the root's ``latest`` names the copy now."""
    digest: str | None
    """Digest of the weights, if it was asked for: the same of the checkpoint and of the copy."""
    notes: tuple[str, ...]
    """What was noticed about the checkpoint, and what was left out."""


def cp(
    src: Source,
    dst: str | os.PathLike[str],
    *,
    tag: str | None = None,
    prove: bool = False,
    resume: bool = False,
    jobs: int | None = None,
    memory: int | str | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> TransferReport:
    """Copy a whole checkpoint from one storage to another; ``latest`` is written when all of it is there.

    Args:
        src: As for ``inspect``. Several directories become one.
        dst: The root that gets a directory of the same tag, and the small files beside it; for a format without tags,
            the directory itself.
        tag: As for ``inspect``.
        prove: Digest the checkpoint and the copy, and commit only if they are the same.
        resume: As for ``convert``.
        jobs: As for ``consolidate``.
        memory: As for ``convert``.
        progress: Called with (bytes done, bytes in all).
        storage_options: What to tell the fsspec class of URLs: keys, an endpoint, ... Default: what it finds itself.

    Raises:
        CkptError: The checkpoint is not whole, or the copy cannot be written or differs.
    """
    from ckpttool import copying

    began = time.perf_counter()
    checkpoint = open_checkpoint(_paths(src), tag=tag, options=storage_options)
    root = Destination(os.fspath(dst), storage_options)
    target = root.within(checkpoint.tag) if copying.is_tagged(checkpoint) else root
    target.check_apart(checkpoint)
    plan = copying.plan_copy(checkpoint)
    # A run that was killed after all of it was committed has left but latest to be written.
    there = copying.is_there(target.storage, target.out, plan) and _are_same(
        checkpoint, open_checkpoint(target.out, options=storage_options), jobs
    )
    if not there:
        target.check_target(overwrite=None)
    around = copying.beside(checkpoint, root.storage, root.out)
    digested: str | None = None

    def check(directory: str) -> None:
        nonlocal digested
        copy = open_checkpoint(directory, options=storage_options, unfinished=True)
        if sorted((f.name, f.nbytes) for f in copy.files) != sorted((f.name, f.nbytes) for f in checkpoint.files):
            raise LayoutError(directory, f"does not hold the files of {checkpoint.location}", "try again")
        if prove:
            digested = _same_digest(checkpoint, copy, directory, jobs)

    if there:
        check(target.out)
    else:
        target.write(
            plan, replaces=_is_weights, last=copying.INDICES, jobs=jobs, memory=_memory(memory), progress=progress,
            check=check, resume=resume,
        )  # fmt: skip
    for name, data in around.carried.items():
        root.put(name, data)
    notes = [*map(str, checkpoint.notes), *around.notes]
    if there:
        notes.append(f"{target.out} was there already, with the same values")
    newest, name = False, copying.latest_name(checkpoint)
    if copying.is_tagged(checkpoint):
        newest = copying.is_newest(checkpoint, root.storage, root.out, storage_options)
        if newest:
            root.put(name, checkpoint.tag.encode())
        else:
            notes.append(f"{name} names a newer one there: left as it is")
    return TransferReport(
        src=checkpoint.location,
        out=target.out,
        tag=checkpoint.tag,
        files=len(plan.files) + len(around.carried) + newest,
        nbytes=plan.nbytes_written,
        seconds=time.perf_counter() - began,
        latest=newest,
        digest=digested,
        notes=tuple(notes),
    )


def ls(root: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Catalog:
    """The checkpoints in a directory, older before newer ones, and which of them are whole.

    Args:
        root: A checkpoint root, or a directory of a trainer's ``checkpoint-N``.
        storage_options: What to tell the fsspec class of URLs: keys, an endpoint, ... Default: what it finds itself.

    Raises:
        CkptError: The directory cannot be read, or holds no checkpoint.
    """
    from ckpttool.catalog import catalog

    return catalog(os.fspath(root), options=storage_options)


def prune(
    root: str | os.PathLike[str],
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: str | None = None,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> list[Decision]:
    """Remove the checkpoints of a root that no rule keeps.

    Only whole native ZeRO checkpoints are removed, never the newest of them, nor the one that ``latest`` names, nor
    those that Ray Train's snapshot of a run lists.

    Args:
        root: A checkpoint root, or a directory of a trainer's ``checkpoint-N``.
        keep_last: Keep so many of the newest.
        keep_every: Keep those whose step is a multiple of this.
        keep_best: Keep the one with the smallest value of this number in its client state ("loss", "eval.loss"); with
            ":max" behind it, the largest.
        dry_run: Decide, but remove nothing.
        storage_options: What to tell the fsspec class of URLs: keys, an endpoint, ... Default: what it finds itself.

    Returns:
        What became of each checkpoint and why, older before newer ones.

    Raises:
        CkptError: The directory cannot be read, no checkpoint has the number, or one cannot be removed.
        ValueError: No rule is given, or one makes no sense.
    """
    from ckpttool.catalog import catalog
    from ckpttool.retention import Rules, decide
    from ckpttool.storage import remove_directory

    rules = Rules(keep_last, keep_every, keep_best)
    found = catalog(os.fspath(root), options=storage_options)
    if found.problems:
        raise LayoutError(found.root, found.problems[0], "mend or remove that file first: what it means must not go")
    decisions = decide(found.entries, rules, root=found.root)
    gone: list[str] = []
    for decision in decisions if not dry_run else ():
        if not decision.keep:
            try:
                remove_directory(decision.entry.path, storage_options)
            except StorageError as error:
                before = f" (removed before it: {', '.join(gone)})" if gone else ""
                problem = f"cannot be removed whole: {error.problem}{before}"
                raise StorageError(decision.entry.path, problem, "mend that, then run it again") from error
            gone.append(decision.entry.name)
    return decisions


def _are_same(a: Checkpoint, b: Checkpoint, jobs: int | None) -> bool:
    """Whether two checkpoints hold the same values."""
    from ckpttool.digests import digest as digest_values

    first, second = (digest_values(c, jobs=jobs, advance=lambda _: None) for c in (a, b))
    return first == second


def _same_digest(source: Checkpoint, written: Checkpoint, directory: str, jobs: int | None) -> str:
    """Make sure that two checkpoints say the same; returns the digest of their weights.

    Raises:
        LayoutError: They do not.
    """
    from ckpttool.digests import digest as digest_values

    meant, found = (digest_values(c, jobs=jobs, advance=lambda _: None) for c in (source, written))
    if meant != found:
        problem = f"what was written says {found.weights}, {found.optimizer}, but what was read {meant.weights}, "
        raise LayoutError(directory, f"{problem}{meant.optimizer}", "try again, and report it if it stays")
    return found.weights


def _plan_weights(
    to: str, checkpoint: Checkpoint, selection: WeightSelection, limit: int, proofs: Proofs | None
) -> tuple[CopyPlan, str]:
    """The plan, and the name of the file that makes the rest look whole."""
    if to == "safetensors":
        from ckpttool.targets import safetensors

        return safetensors.plan_safetensors(
            checkpoint, selection, max_shard_bytes=limit, proofs=proofs
        ), safetensors.INDEX
    from ckpttool.targets import torch

    return torch.plan_torch(checkpoint, selection, max_shard_bytes=limit, proofs=proofs), torch.INDEX


def _proof(checkpoint: Checkpoint, selection: WeightSelection, written: Checkpoint, jobs: int | None) -> str:
    """Digest what was to be written, and what was written.

    Raises:
        LayoutError: They differ.
    """
    from ckpttool.contents import WEIGHTS, Content, contents
    from ckpttool.digests import digest_of

    held = [Content(w.name, WEIGHTS, w.state) for w in selection.weights]
    meant = digest_of(checkpoint, held, dtypes={w.name: w.dtype for w in selection.weights}, jobs=jobs)
    found = digest_of(written, contents(written), jobs=jobs)
    if meant != found:
        problem = f"what was written says {found}, but what was read {meant}"
        hint = "a disk or memory may be failing: try again, and report it if it stays"
        raise LayoutError(written.location, problem, hint)
    return meant


def _workers(ray: bool | str | None, destination: Destination) -> AbstractContextManager[Workers] | None:
    """Who does the work; None for this process.

    Raises:
        CkptError: Ray is not installed, the address is none, or several processes cannot write to the destination.
    """
    if ray is None or ray is False:
        return None
    from ckpttool.integrations.ray_tasks import RayCluster

    destination.check_shareable()
    return RayCluster("" if ray is True else ray)


def _is_weights(name: str) -> bool:
    return _WEIGHT_FILES.fullmatch(name) is not None
