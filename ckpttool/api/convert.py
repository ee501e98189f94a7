"""``convert``: a checkpoint for another number of ranks, another stage or another loader."""

from __future__ import annotations

import fnmatch
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.api._run import Run, Written
from ckpttool.api.options import Options
from ckpttool.arguments import check_at_least, check_choice, checked_path
from ckpttool.blocks import Shown
from ckpttool.dtypes import TRAINING_DTYPES, short_name
from ckpttool.errors import ArgumentError, LayoutError
from ckpttool.formats import Opening, Source, open_checkpoint
from ckpttool.formats.dcp import METADATA
from ckpttool.formats.sidecars import HUGGINGFACE, find_sidecars
from ckpttool.messages import brief
from ckpttool.model import Buffer
from ckpttool.model.items import STEP
from ckpttool.plan.builder import sample_checks
from ckpttool.registry import carry_out, with_options
from ckpttool.targets.sidecars import rank_state_sidecars, sidecars_for, with_sidecars

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from typing_extensions import Unpack

    from ckpttool import _ConvertOptions
    from ckpttool.api._run import Addition
    from ckpttool.blocks import Block
    from ckpttool.execution.checks import Check
    from ckpttool.model import Checkpoint
    from ckpttool.plan import CopyPlan
    from ckpttool.units import Progress


FORMATS_OF = {
    "world_size": ("zero", "ranks"),
    "stage": ("zero",),
    "sub_group_size": ("zero",),
    "round_robin": ("zero",),
    "expert_parallel": ("zero",),
    "dtype": ("zero",),
    "buffers": ("zero", "ranks"),
    "layout": ("dcp", "ranks"),
    "mesh": ("ranks",),
    "device": ("ranks",),
    "torch": ("ranks",),
}
"""Arguments for some formats only."""
DEVICES = ("cpu", "cuda", "hpu", "mps", "npu", "xpu")
"""Types of devices of torch."""
LAYOUTS_OF = {
    "dcp": ("nested", "flat", "app", "accelerate", "torchtitan", "lightning"),
    "ranks": ("verl", "accelerate"),
}
"""Layouts of each format that has several."""


@dataclass(frozen=True, slots=True)
class _Target:
    """The output of ``convert``."""

    to: str
    world_size: int | None
    stage: int | None
    sub_group_size: int | None
    round_robin: bool | None
    expert_parallel: int | None
    dtype: str | None
    buffers: tuple[str, ...] | None = None
    layout: str | None = None
    mesh: Mapping[str, int] | Sequence[int] | None = None
    device: str | None = None
    torch: str | None = None

    def check(self) -> None:
        """Refuse values that no checkpoint allows.

        Raises:
            ArgumentError: There is one.
        """
        check_choice("to", self.to, ("zero", "universal", "dcp", "ranks"))
        for name, formats in FORMATS_OF.items():
            if self.to not in formats and getattr(self, name) is not None:
                problem = f"is for {' and '.join(formats)}, not for {self.to}"
                raise ArgumentError(name, problem, f'leave out {name}, or write to="{formats[0]}"', (name, "to"))
        if self.layout is not None:
            check_choice("layout", self.layout, LAYOUTS_OF[self.to])
        elif self.to == "ranks":
            raise ArgumentError("layout", "is missing", "set it to verl or accelerate")
        if self.torch is not None:
            check_choice("torch", self.torch, ("2.6", "2.13"))
        if self.device is not None:
            check_choice("device", self.device, DEVICES)
        for size in self.mesh.values() if isinstance(self.mesh, Mapping) else self.mesh or ():
            check_at_least("mesh", size, 1)
        for name in ("world_size", "sub_group_size", "expert_parallel"):
            check_at_least(name, getattr(self, name), 1)
        if self.dtype is not None:
            check_choice("dtype", self.dtype, tuple(TRAINING_DTYPES))
        if self.stage not in {None, 1, 2, 3}:
            raise ArgumentError("stage", f"is {self.stage!r}, not 1, 2 or 3", "choose one of them, or None")
        if self.to == "zero" and self.world_size is None:
            problem = "is missing: files for ZeRO depend on the number of ranks"
            raise ArgumentError("world_size", problem, "set world_size to the ranks that will load it", ("world_size",))


WHO_LOADS = {
    "zero": "load_checkpoint",
    "universal": "load_universal",
    "dcp": "torch.distributed.checkpoint",
    "ranks": "the ranks of FSDP2",
}
"""Name of each target's loader."""


@dataclass(frozen=True, slots=True)
class ConvertReport(Shown):
    """Result of ``convert``."""

    written: Written
    """The output."""
    to: str
    """"zero", "universal", "dcp" or "ranks"."""
    tag: str
    """Name of the checkpoint in it."""
    notes: tuple[str, ...]
    """Remarks on the checkpoint, and state that the output does not keep."""

    def blocks(self) -> Iterator[Block]:
        """Yield the written files, or those planned by a dry run."""
        written = self.written
        yield written.line(f"{self.tag} for {WHO_LOADS[self.to]}, {len(written.files)} files")
        yield from written.remarks(self.notes)


@with_options
def convert(  # noqa: PLR0913  public API
    src: Source,
    out: str | os.PathLike[str],
    *,
    to: Literal["zero", "universal", "dcp", "ranks"],
    tag: str | None = None,
    world_size: int | None = None,
    stage: int | None = None,
    sub_group_size: int | None = None,
    round_robin: bool | None = None,
    expert_parallel: int | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    buffers: Sequence[str] | None = None,
    layout: Literal["nested", "flat", "app", "accelerate", "torchtitan", "lightning", "verl"] | None = None,
    mesh: Mapping[str, int] | Sequence[int] | None = None,
    device: str | None = None,
    torch: Literal["2.6", "2.13"] | None = None,
    prove: bool = False,
    check: Check = "read",
    dry_run: bool = False,
    resume: bool = False,
    jobs: int | None = None,
    memory: int | str | None = None,
    progress: Progress | None = None,
    allow_partial: bool = False,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
    **given: Unpack[_ConvertOptions],
) -> ConvertReport:
    """Rewrite a checkpoint for another number of ranks, another ZeRO stage, or another loader.

    fp32 master weights, optimizer states, steps, hyper-parameters of each group, loss scale, scheduler, client state,
    frozen parameters and buffers are copied bit for bit. The output appears whole or not at all.

    Args:
        src: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``; a
            universal checkpoint; a directory of ``torch.distributed.checkpoint``; safetensors, or ``torch.save`` files
            of weights. Several directories if each contains the files of some ranks (node-local storage).
        out: Directory to write: a checkpoint root, with ``latest`` (or ``latest_universal``), or a DCP directory.
        to: "zero" for native files that ``engine.load_checkpoint`` reads on ``world_size`` ranks; "universal" for
            DeepSpeed's ``load_universal``; "dcp" for ``torch.distributed.checkpoint``.
        tag: Tag of the checkpoint in a root; default: the one that ``latest`` names. The output has the same.
        world_size: Data-parallel ranks that will load the output; needed for "zero".
        stage: 1, 2 or 3, for "zero"; default: the source's.
        sub_group_size: Stage 3: as in the configuration of the run that loads it; default: the source's or DeepSpeed's.
        round_robin: Whether that run has ``round_robin_gradients``; default: as in the source's configuration.
        expert_parallel: Ranks that it spreads each layer's experts over; default: the source's.
        dtype: Type that run computes in, for "zero" where the source does not record it: DCP, or only weights.
        buffers: Patterns of the names of buffers, for "zero" where the source does not distinguish buffers and frozen
            parameters: DCP, or only weights; stage 3 needs the distinction. Empty if there are none.
        layout: For "dcp", the names and the nesting that a loader requires: "nested" (default) and "flat" as
            ``get_state_dict`` has them, under ``model`` and ``optim``; "app" for the same under ``app``, with
            numbers and texts of the client state, as torch's tutorial and Ray's FSDP2 template have them;
            "accelerate" for Accelerate's and the Trainer's FSDP2; "torchtitan" for one step of torchtitan, without
            dataloader and scheduler; "lightning" for Lightning's ``ModelParallelStrategy``, from a checkpoint of
            Lightning with one optimizer. For "ranks": "verl" or "accelerate".
        mesh: For "ranks", sizes of the run's device mesh by name, such as ``{"ddp": 2, "fsdp": 4}``, or of one without
            names, such as ``[4]``: the last dimension shards, the others replicate. Default: one dimension, with the
            source's name, otherwise "fsdp" for verl and no name for Accelerate.
        device: For "ranks", the type of the run's devices; default: the source's, otherwise "cuda".
        torch: For "ranks", the run's torch: "2.6" for 2.6 to 2.9, "2.13" for 2.13 and later; default: the source's,
            otherwise "2.13". The files load in no other release.
        prove: Digest the source and the output, and commit only if they are equal.
        check: Recorded CRC-32 to compare: of records read "read" whole, "full" also of partly read ones, "off" none.
        dry_run: Plan, but write nothing; the report has the disk space and memory of a run.
        resume: Reuse files that an interrupted run completed. Not safe after a power failure: files are not synced.
        jobs: Threads. Default: one for each core, at most 4; 16 where a storage is remote.
        memory: Bytes, or "256MB" (the default), that requests in flight to remote storages may take.
        progress: Called with (bytes done, bytes in all).
        allow_partial: Accept a source whose files cannot be proven to be all: safetensors of single ranks.
        trust_names: Accept renamed files (the name recorded inside differs). By default they are refused.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: fsspec's own
            configuration.
        follow_links: Follow symbolic links of a local checkpoint that leave its root, to any file that you may read.

    Raises:
        CkptError: A wrong argument, a source that is not sound or fits no such output, or ``out`` not writable.
    """
    opening = Opening(storage_options, follow_links)
    options = Options(
        tag=tag,
        jobs=jobs,
        memory=memory,
        progress=progress,
        check=check,
        prove=prove,
        dry_run=dry_run,
        resume=resume,
        overwrite=None,
        allow_partial=allow_partial,
        trust_names=trust_names,
        opening=opening,
    )
    target = _Target(
        to,
        world_size,
        stage,
        sub_group_size,
        round_robin,
        expert_parallel,
        short_name(dtype),
        None if buffers is None else tuple(buffers),
        layout,
        mesh,
        device,
        torch,
    )
    return _convert(src, checked_path("out", out), target, options, carry_out("convert", given))


def _convert(src: Source, out: str, target: _Target, options: Options, additions: Sequence[Addition]) -> ConvertReport:
    target.check()
    run = Run(out, options, additions)
    (checkpoint,) = run.open([src])
    if checkpoint.left_out and not options.allow_partial:
        hint = "to write the weights without the optimizer, pass allow_partial=True"
        raise LayoutError(checkpoint.location, checkpoint.left_out, hint, ("allow_partial",))
    if target.to != "dcp" and checkpoint.of_other_shape:
        problem = f"has optimizer states of other shapes than their parameters: {checkpoint.of_other_shape}"
        raise LayoutError(
            checkpoint.location, problem, "of all formats dcp alone holds them; consolidate writes the weights alone"
        )
    tag = checkpoint.tag if checkpoint.latest is not None else f"global_step{checkpoint.step or 0}"
    if target.buffers is not None:
        checkpoint = _with_buffers(checkpoint, target.buffers)
    plan, last, losses = _plan(checkpoint, target, tag)

    def verify(directory: str) -> str:
        from ckpttool.analysis.digest import same_digest

        output = open_checkpoint(directory, opening=options.opening, unfinished=True)
        return same_digest(checkpoint, output, directory, options.jobs)

    written = run.write(plan, checkpoint, last=last, verify=verify if options.prove else None)
    notes = (*map(str, checkpoint.notes), *checkpoint.remarks, *losses)
    return ConvertReport(written=written, to=target.to, tag=tag, notes=notes)


def _with_buffers(checkpoint: Checkpoint, patterns: Sequence[str]) -> Checkpoint:
    """Return a checkpoint that distinguishes its buffers and frozen parameters.

    Raises:
        ArgumentError: The source already distinguishes them, or a pattern matches no frozen tensor.
    """
    if checkpoint.tells_buffers:
        raise ArgumentError("buffers", "is given, but the source records its buffers", "leave it out")
    frozen = [p for p in checkpoint.parameters if p.frozen]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(p.name, pattern) for p in frozen):
            raise ArgumentError("buffers", f"has {brief(pattern)}, which matches no untrained tensor", "see inspect")
    found = [p for p in frozen if any(fnmatch.fnmatchcase(p.name, pattern) for pattern in patterns)]
    names = {p.name for p in found}
    return replace(
        checkpoint,
        parameters=tuple(p for p in checkpoint.parameters if p.name not in names),
        buffers=(*checkpoint.buffers, *(Buffer(p.name, p.module_state) for p in found)),
        tells_buffers=True,
    )


def _plan(checkpoint: Checkpoint, target: _Target, tag: str) -> tuple[CopyPlan, tuple[str, ...], list[str]]:
    """The plan, the names of the files that are committed last, and the state that the output does not keep."""
    if target.to == "zero":
        from ckpttool.storage import LATEST
        from ckpttool.targets.zero.layout import shape_for, zero_losses
        from ckpttool.targets.zero.writer import plan_zero

        shape = shape_for(
            checkpoint,
            ranks=target.world_size,
            stage=target.stage,
            sub_group_size=target.sub_group_size,
            round_robin=target.round_robin,
            expert_parallel=target.expert_parallel,
            dtype=None if target.dtype is None else TRAINING_DTYPES[target.dtype],
        )
        plan, last = plan_zero(checkpoint, shape, tag=tag), LATEST
        losses = list(zero_losses(checkpoint, shape))
    elif target.to == "universal":
        from ckpttool.targets.universal import plan_universal, universal_losses

        plan, last = plan_universal(checkpoint, tag=tag, consistency=sample_checks(checkpoint)), "latest_universal"
        losses = list(universal_losses(checkpoint))
    else:
        losses = [f"{name}: belongs to no parameter, and is left out" for name in checkpoint.nonpartitionable]
        if own := rank_state_sidecars(checkpoint, tag):
            losses.append(f"not copied: the rank states of {len(own)} ranks (rank_state of a save)")
        from ckpttool.targets.dcp import LAYOUTS, client_state_of

        plan = _plan_for_torch(checkpoint, target, losses)
        lost = ["the scheduler"] if checkpoint.scheduler and target.layout != "verl" else []
        lost += ["the loss scale"] if checkpoint.loss_scaler is not None and checkpoint.dtype == "F16" else []
        counted = any(
            STEP in own
            for own in (*(g.scalars for g in checkpoint.groups), *(p.numbers for p in checkpoint.parameters))
        )
        lost += [f"the step ({checkpoint.step})"] if checkpoint.step and not counted else []
        stated = any(p.optimizer_states or checkpoint.numbers(p) for p in checkpoint.parameters)
        frozen = [
            p.name for p in checkpoint.parameters if p.frozen and any(p.name in g.listed for g in checkpoint.groups)
        ]
        lost += [f"which parameters are frozen ({', '.join(frozen[:5])})"] if frozen and not stated else []
        lost += ["the counts of samples and skipped steps"] if checkpoint.native else []
        names = LAYOUTS[target.layout or "nested"] if target.to == "dcp" else None
        written: Mapping[str, Any] = {} if names is None else client_state_of(checkpoint.client_state, names)
        if names is not None and names.state:
            written = checkpoint.client_state
        if left := [str(name) for name in checkpoint.client_state if name not in written]:
            lost.append(f"the client state ({', '.join(left[:5])}{', ...' * (len(left) > 5)})")
        losses += [f"not written: {', '.join(lost)}"] if lost else []
        if target.layout == "verl":
            found = find_sidecars(checkpoint)
            plan = with_sidecars(plan, [replace(s, name=posixpath.join(HUGGINGFACE, s.name)) for s in found], None)
        elif target.layout == "accelerate":
            companions, left_behind = sidecars_for(checkpoint, target.world_size)
            plan = with_sidecars(plan, companions, None)
            losses += left_behind
        metadata = tuple(f.name for f in plan.files if posixpath.basename(f.name) == METADATA)
        return plan, metadata or (plan.files[-1].name,), losses
    companions, left_behind = sidecars_for(checkpoint, target.world_size)
    companions += rank_state_sidecars(checkpoint, tag)
    return with_sidecars(plan, companions, None), (last,), [*losses, *left_behind]


def _plan_for_torch(checkpoint: Checkpoint, target: _Target, notes: list[str]) -> CopyPlan:
    """Plan a checkpoint for FSDP2; add to the notes which runs load it."""
    if target.to == "dcp":
        from ckpttool.targets.dcp import plan_dcp

        return plan_dcp(checkpoint, layout=target.layout or "nested", consistency=sample_checks(checkpoint))
    from ckpttool.targets.rank_files import mesh_for, plan_rank_files

    layout = target.layout or ""
    mesh = mesh_for(
        checkpoint, layout, world_size=target.world_size, mesh=target.mesh, device=target.device, torch=target.torch
    )
    releases = "2.13 and later" if mesh.torch == "2.13" else "2.6 to 2.9"
    names = "" if mesh.names else ", whose dimensions have no names"
    notes.append(f"these files load on a mesh of {mesh}{names}, on {mesh.device}, in torch {releases}")
    return plan_rank_files(checkpoint, layout, mesh, consistency=sample_checks(checkpoint))
