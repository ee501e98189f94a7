"""``consolidate``: whole weights in one file or a few, for any loader."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.api._run import Run, RunSource, Written
from ckpttool.api.options import Options
from ckpttool.arguments import checked_path
from ckpttool.blocks import Shown
from ckpttool.dtypes import short_name
from ckpttool.formats import Opening, Source
from ckpttool.registry import carry_out, with_options
from ckpttool.targets.rename_map import read_rename_map
from ckpttool.targets.weight_files import WeightChoice, plan_weight_files

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from ckpttool.api._run import Addition
    from ckpttool.blocks import Block
    from ckpttool.execution.checks import Check
    from ckpttool.targets.weights import WeightSelection
    from ckpttool.units import Progress


@dataclass(frozen=True, slots=True)
class ConsolidateReport(Shown):
    """Result of ``consolidate``."""

    written: Written
    """The output."""
    tensors: int
    """Tensors in it; tied tensors count once."""
    elements: int
    """Elements in it."""
    dtype: str
    """Type of the parameters: "fp32", "bf16" or "fp16"."""
    tied: Mapping[str, str]
    """Tied names: alias to the name the tensor is stored under."""
    sidecars: tuple[str, ...]
    """Sidecar files that were copied: configuration, tokenizer."""
    notes: tuple[str, ...]
    """Remarks on the checkpoint."""

    def blocks(self) -> Iterator[Block]:
        """Yield the written files, or those planned by a dry run."""
        contents = f"{self.tensors} tensors, {self.elements:,} elements, parameters in {self.dtype}"
        yield self.written.line(contents)
        yield from self.written.weights(self.tied, self.notes, self.dtype)


@with_options
def consolidate(  # noqa: PLR0913  public API
    src: Source,
    out: str | os.PathLike[str],
    *,
    to: Literal["safetensors", "torch"],
    tag: str | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    weights_from: Literal["masters", "module"] = "masters",
    max_shard_size: int | str = "5GB",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    exclude_frozen: bool = False,
    adapter_only: bool = False,
    optimizer: bool = False,
    rename: Sequence[str] = (),
    rename_map: Mapping[str, str] | str | os.PathLike[str] | None = None,
    prove: bool = False,
    check: Check = "read",
    dry_run: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    jobs: int | None = None,
    memory: int | str | None = None,
    progress: Progress | None = None,
    allow_partial: bool = False,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    follow_links: bool = False,
    **given: Any,
) -> ConsolidateReport:
    """Merge the shards of a checkpoint into whole weights; the output appears whole or not at all.

    Trainable parameters come from the fp32 master weights, frozen ones from the model's copy; buffers keep their type.

    Args:
        out: Directory to write: ``model.safetensors`` or ``pytorch_model.bin``, or shards of them with an index.
        to: Kind of file.
        dtype: Type of the parameters, cast bit for bit as torch does.
        weights_from: The optimizer's fp32 master weights, or the model's own 16-bit copies (saved at stages 1 and 2).
        exclude_frozen: Leave out frozen parameters.
        adapter_only: Write the trained PEFT adapter: ``adapter_model.safetensors`` and ``adapter_config.json``.
        optimizer: Also write the optimizer's states, for "safetensors": ``optimizer.safetensors``, from which
            ``convert`` makes a checkpoint to resume from. Weights in fp32 are the master weights; beside others it
            contains these as well.
        rename: Rules for the names in the output, applied in order: "s/PATTERN/REPLACEMENT/" with Python's regular
            expressions (flags g, i), or the name of a ready-made map, such as "module" or "peft".
        rename_map: New names by old ones, or the path or URL of a JSON file of them; applied before ``rename``.

    Raises:
        CkptError: A wrong argument, no sound checkpoint, ``out`` not writable, no match, or a checksum that differs.
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
        overwrite=overwrite,
        allow_partial=allow_partial,
        trust_names=trust_names,
        module_only=weights_from == "module",
        opening=opening,
    )
    chosen = WeightChoice(
        to,
        short_name(dtype),
        weights_from,
        max_shard_size,
        include,
        exclude,
        exclude_frozen,
        adapter_only,
        rename,
        optimizer=optimizer,
    )
    additions = carry_out("consolidate", given)
    return _consolidate(src, checked_path("out", out), chosen, additions, rename_map, options)


def _consolidate(
    src: Source,
    out: str,
    chosen: WeightChoice,
    additions: Sequence[Addition],
    rename_map: Mapping[str, str] | str | os.PathLike[str] | None,
    options: Options,
) -> ConsolidateReport:
    chosen.check()
    for addition in additions:
        addition.check(chosen)
    run = Run(out, options, additions)
    chosen = replace(chosen, rename_map=read_rename_map(rename_map, options.opening.storage_options))
    chosen.check()  # again, with the table of new names
    (opened,) = run.open([src])
    source = RunSource(opened)
    for addition in additions:
        source = addition.source(run, source)
    checkpoint = source.checkpoint
    made = plan_weight_files(checkpoint, chosen, run.destination.out, source.companions)
    selection = made.selection
    selected = None if chosen.optimizer else selection.states
    written = run.write(made.plan, checkpoint, last=(made.index,), selected=selected)
    return ConsolidateReport(
        written=written,
        tensors=len(selection.weights),
        elements=sum(w.state.numel for w in selection.weights),
        dtype=chosen.dtype,
        tied=dict(selection.aliases),
        sidecars=made.companions,
        notes=(*made.notes, *source.notes, *_rounded(selection)),
    )


def _rounded(selection: WeightSelection) -> list[str]:
    """Return a note on parameters in fp64: no type that can be chosen has their precision."""
    names = [weight.name for weight in selection.weights if weight.state.dtype == "F64" != weight.dtype]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"rounded from fp64: {', '.join(names[:3])}{more}"] if names else []
