"""``convert``: a checkpoint for another number of ranks, another stage or another loader."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.api._run import Run, Written
from ckpttool.api.options import Options
from ckpttool.arguments import checked_path
from ckpttool.blocks import Shown
from ckpttool.dtypes import short_name
from ckpttool.errors import ArgumentError, LayoutError
from ckpttool.formats import Opening, Source
from ckpttool.messages import brief
from ckpttool.model import Buffer
from ckpttool.registry import carry_out, parameters_of, with_options
from ckpttool.targets.table import check, plan, target_of

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from ckpttool.api._run import Addition
    from ckpttool.blocks import Block
    from ckpttool.execution.checks import Check
    from ckpttool.model import Checkpoint
    from ckpttool.units import Progress


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
        yield written.line(f"{self.tag} for {target_of(self.to).loader}, {len(written.files)} files")
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
    **given: Any,
) -> ConvertReport:
    """Rewrite a checkpoint for another number of ranks, another ZeRO stage, or another loader.

    fp32 master weights, optimizer states, steps, hyper-parameters of each group, loss scale, scheduler, client state,
    frozen parameters and buffers are copied bit for bit. The output appears whole or not at all.

    Args:
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
    asked: dict[str, Any] = {
        "world_size": world_size,
        "stage": stage,
        "sub_group_size": sub_group_size,
        "round_robin": round_robin,
    }
    asked |= {"expert_parallel": expert_parallel, "dtype": short_name(dtype), "layout": layout}
    asked |= {"buffers": None if buffers is None else tuple(buffers)}
    asked |= {one.name: given.get(one.name, one.default) for one in parameters_of("convert") if not one.code}
    return _convert(src, checked_path("out", out), to, asked, options, carry_out("convert", given))


def _convert(
    src: Source, out: str, to: str, asked: Mapping[str, Any], options: Options, additions: Sequence[Addition]
) -> ConvertReport:
    check(to, asked)
    run = Run(out, options, additions)
    (checkpoint,) = run.open([src])
    if checkpoint.left_out and not options.allow_partial:
        hint = "to write the weights without the optimizer, pass allow_partial=True"
        raise LayoutError(checkpoint.location, checkpoint.left_out, hint, ("allow_partial",))
    if checkpoint.of_other_shape and not target_of(to).holds_any_shape:
        problem = f"has optimizer states of other shapes than their parameters: {checkpoint.of_other_shape}"
        raise LayoutError(
            checkpoint.location, problem, "of all formats dcp alone holds them; consolidate writes the weights alone"
        )
    tag = checkpoint.tag if checkpoint.latest is not None else f"global_step{checkpoint.step or 0}"
    if asked["buffers"] is not None:
        checkpoint = _with_buffers(checkpoint, asked["buffers"])
    planned = plan(to, checkpoint, asked, tag)
    written = run.write(planned.plan, checkpoint, last=planned.last)
    notes = (*map(str, checkpoint.notes), *checkpoint.remarks, *planned.losses)
    return ConvertReport(written=written, to=to, tag=tag, notes=notes)


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
