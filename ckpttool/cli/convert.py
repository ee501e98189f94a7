"""``ckpttool convert``."""

from __future__ import annotations

from typing import Any

import click

from ckpttool.cli import _options as options

FOR_ZERO = ("world_size", "stage", "sub_group_size", "round_robin", "expert_parallel", "dtype", "buffers")
"""Options of ``--to zero``."""


@click.command(short_help="Write a checkpoint for another number of ranks, stage or loader.")
@options.sources_argument
@options.out_argument
@click.option("--to", type=click.Choice(["zero", "universal", "dcp"]), required=True, help="The loader of the output.")
@options.tag_option
@click.option(
    "--world-size", type=click.IntRange(1, 1 << 20), help="Data-parallel ranks of the run that will load it (for zero)."
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
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="Compute dtype of that run, if SRC is weights-only or DCP.  [default: the dtype of the weights]",
)
@click.option(
    "--buffers",
    multiple=True,
    metavar="GLOB",
    default=None,
    help='Names of buffers, if SRC is weights-only or DCP, for stage 3; "" if there are none. Repeatable.',
)
@click.option("--prove", is_flag=True, help="Digest the source and the output, and commit only if they are equal.")
@options.check_options
@options.dry_run_option
@options.resume_option
@options.jobs_option
@options.memory_option
@options.ray_option
@options.json_option
@options.trust_option
@options.storage_option
@options.debug_option
def convert(src: tuple[str, ...], out: str, as_json: bool, **given: Any) -> None:
    """Rewrite the checkpoint SRC in OUT, with the same values bit for bit.

    For another number of ranks or another stage (zero: plain load_checkpoint reads it), for any topology (universal:
    load_universal reads it), or for torch.distributed.checkpoint (dcp). OUT appears complete or not at all.
    """
    import ckpttool
    from ckpttool.cli._output import print_json, progress_bar
    from ckpttool.cli._reports import print_convert_report

    given["buffers"] = [pattern for pattern in given["buffers"] if pattern] if given["buffers"] else None
    _check_usage(given)
    with progress_bar("convert") as progress:
        report = ckpttool.convert(src, out, progress=progress, **options.chosen(given))
    if as_json:
        print_json(report)
    else:
        print_convert_report(report)


def _check_usage(given: dict[str, Any]) -> None:
    """Refuse options that exclude each other.

    Raises:
        click.UsageError: Two options exclude each other.
    """
    if given["to"] == "zero" and given["world_size"] is None:
        raise click.UsageError("--to zero needs --world-size")
    for name in FOR_ZERO:
        if given["to"] != "zero" and given[name] is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} is only for --to zero")
    if given["prove"] and given["dry_run"]:
        raise click.UsageError("--prove needs the output that --dry-run does not write")
