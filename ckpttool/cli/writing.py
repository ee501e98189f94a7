"""The commands that write checkpoints: ``consolidate``, ``convert`` and ``cp``."""

from __future__ import annotations

from typing import Any

import click

from ckpttool.cli import _options as options
from ckpttool.targets.table import LAYOUTS, TARGETS


@click.command(cls=options.Command, short_help="Merge the shards into whole weights.")
@options.source_argument
@options.out_argument
@click.option("--to", type=click.Choice(["safetensors", "torch"]), required=True, help="Output format.")
@options.shared("tag")
@click.option("--dtype", type=options.Dtype(["fp32", "bf16", "fp16"]), help="dtype of the parameters.  [default: fp32]")
@options.shared("max_shard_size")
@click.option(
    "--weights-from",
    type=click.Choice(["masters", "module"]),
    help="The optimizer's fp32 master weights, or the model's 16-bit weights (stages 1 and 2).  [default: masters]",
)
@options.shared("include", "exclude")
@click.option("--exclude-frozen", is_flag=True, help="Leave out frozen parameters.")
@click.option("--adapter-only", is_flag=True, help="Write the trained PEFT adapter, as PEFT does.")
@click.option("--optimizer", is_flag=True, help="Also write the optimizer's states, as safetensors.")
@click.option(
    "--rename",
    multiple=True,
    metavar="RULE",
    help="Rename tensors: 's/PATTERN/REPLACEMENT/', or a ready-made map: module, compile, fsdp, peft "
    "(repeatable, applied in order).",
)
@click.option("--rename-map", metavar="FILE", help="JSON file of new names by old ones, applied before --rename.")
@options.shared("overwrite", "dry_run", "prove", "resume", "allow_partial", "check", "jobs", "memory", "trust_names")
def consolidate(src: Any, out: str, **given: Any) -> None:
    """Merge the shards of SRC into whole weights in the directory OUT.

    Parameters come from the fp32 master weights. OUT gets the names that Hugging Face's libraries look for, and the
    configuration and tokenizer in the checkpoint's root. OUT appears complete or not at all.
    """
    import ckpttool
    from ckpttool.cli._output import progress_bar, show

    with progress_bar("consolidate") as progress:
        report = ckpttool.consolidate(src, out, progress=progress, **options.chosen(given))
    show(report)


class _Target(click.Choice[str]):
    """A target; other packages may have further ones."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return its name; fail as wrong usage."""
        from ckpttool.other_packages import find_target

        return value if value not in self.choices and find_target(value) else super().convert(value, param, ctx)


@click.command(cls=options.Command, short_help="Write a checkpoint for another number of ranks, stage or loader.")
@options.source_argument
@options.out_argument
@click.option(
    "--to",
    type=_Target(tuple(TARGETS)),
    required=True,
    help="Output format: of DeepSpeed, of torch.distributed.checkpoint, or a file for each rank of FSDP2.",
)
@options.shared("tag")
@click.option(
    "--world-size",
    type=click.IntRange(1, 1 << 20),
    help="Data-parallel ranks of the run that will load it (for zero and ranks).",
)
@click.option("--stage", type=click.IntRange(1, 3), help="ZeRO stage of that run.  [default: the source's]")
@click.option(
    "--sub-group-size", type=click.IntRange(1), help="sub_group_size of that run (stage 3).  [default: the source's]"
)
@click.option(
    "--round-robin/--no-round-robin",
    default=None,
    help="Whether that run uses round_robin_gradients.  [default: the source's]",
)
@click.option(
    "--expert-parallel",
    type=click.IntRange(1),
    help="Expert-parallel size of that run (autoep_size, ep_size).  [default: the source's]",
)
@click.option(
    "--dtype",
    type=options.Dtype(["fp32", "bf16", "fp16"]),
    help="Compute dtype of that run, if SRC is weights-only or DCP.  [default: the dtype of the weights]",
)
@click.option(
    "--buffer",
    "buffers",
    multiple=True,
    metavar="GLOB",
    default=None,
    help='Names of buffers, if SRC is weights-only or DCP, for stage 3; "" if there are none. Repeatable.',
)
@click.option(
    "--layout",
    type=click.Choice(LAYOUTS),
    help="Loader's layout: nested (default), flat, app, accelerate, torchtitan for dcp; verl, accelerate for ranks.",
)
@options.shared("dry_run", "prove", "resume", "allow_partial", "check", "jobs", "memory", "trust_names")
def convert(src: Any, out: str, **given: Any) -> None:
    """Rewrite the checkpoint SRC in OUT, with the same values bit for bit.

    For another number of ranks or another stage (zero: plain load_checkpoint reads it), for any topology (universal:
    load_universal reads it), or for FSDP2: torch.distributed.checkpoint (dcp: any number of ranks loads it), or a file
    for each rank (ranks). OUT appears complete or not at all.
    """
    import ckpttool
    from ckpttool.cli._output import progress_bar, show

    given["buffers"] = [pattern for pattern in given["buffers"] if pattern] if given["buffers"] else None
    _check_convert(given)
    with progress_bar("convert") as progress:
        report = ckpttool.convert(src, out, progress=progress, **options.chosen(given))
    show(report)


def _check_convert(given: dict[str, Any]) -> None:
    """Refuse options that exclude each other.

    Raises:
        click.UsageError: Two options exclude each other.
    """
    if given["to"] == "zero" and given["world_size"] is None:
        raise click.UsageError("--to zero needs --world-size, and --stage and --dtype unless SRC is of DeepSpeed")
    if given["prove"] and given["dry_run"]:
        raise click.UsageError("--prove needs the output that --dry-run does not write")


@click.command(cls=options.Command, short_help="Copy a whole checkpoint to another storage.")
@options.source_argument
@options.out_argument
@options.shared("tag")
@click.option("--prove", is_flag=True, help="Digest the checkpoint and the copy, and commit only if they are equal.")
@options.shared("resume", "check", "jobs", "memory", "trust_names")
def cp(src: Any, out: str, **given: Any) -> None:
    """Copy the checkpoint SRC into the root OUT: the directory of its tag, and its sidecar files.

    SRC and OUT may be on different storages. latest is written last, after the copy is read back.
    """
    import ckpttool
    from ckpttool.cli._output import progress_bar, show

    with progress_bar("cp") as progress:
        report = ckpttool.cp(src, out, progress=progress, **options.chosen(given))
    show(report)
