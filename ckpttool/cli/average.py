"""``ckpttool average``."""

from __future__ import annotations

from typing import Any

import click

from ckpttool.cli import _options as options


def _numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[float, ...] | None:
    """Parse numbers between commas."""
    if value is None:
        return None
    try:
        return tuple(float(number) for number in value.split(","))
    except ValueError:
        raise click.BadParameter("write numbers between commas, such as 1,2,4") from None


@click.command(short_help="Average several checkpoints of one model.")
@options.sources_argument
@options.out_argument
@click.option(
    "--to", type=click.Choice(["safetensors", "zero"]), required=True,
    help="Weights alone, or a checkpoint with the optimizer of the newest SRC.",
)  # fmt: skip
@click.option(
    "--weights", metavar="NUMBERS", callback=_numbers, help="One weight for each SRC, such as 1,2,4.  [default: equal]"
)
@click.option(
    "--ema",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    metavar="DECAY",
    help="Weights of an exponential moving average, the oldest SRC first.",
)
@click.option(
    "--schedule",
    type=click.Choice(["constant", "linear", "cosine", "1-sqrt"]),
    help="Weights that stand for this decay of the learning rate (WSM), the oldest SRC first.",
)
@click.option("--accumulate", type=click.Choice(["fp32", "fp64"]), help="Type to compute in.  [default: fp32]")
@options.tag_option
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="Type of the parameters; for zero the type to train in, if no SRC records it.  [default: fp32]",
)
@click.option("--max-shard-size", type=options.Size(), help="Split into files of at most this size.  [default: 5GB]")
@options.include_option
@options.exclude_option
@click.option(
    "--world-size", type=click.IntRange(1, 1 << 20), help="Data-parallel ranks for zero.  [default: the newest SRC's]"
)
@click.option("--stage", type=click.IntRange(1, 3), help="ZeRO stage for zero.  [default: the newest SRC's]")
@click.option("--prove", is_flag=True, help="Compute the mean again, and commit only if the output is equal.")
@options.check_options
@options.dry_run_option
@click.option("--overwrite", is_flag=True, help="Replace weights that OUT already holds.")
@options.jobs_option
@options.memory_option
@options.ray_option
@options.json_option
@options.trust_option
@options.storage_option
@options.debug_option
def average(src: tuple[str, ...], out: str, as_json: bool, **given: Any) -> None:
    """Average the checkpoints SRC, each of the same model, into OUT.

    The fp32 master weights are averaged, in the order of SRC. Sources may have different formats, stages and numbers of
    ranks. OUT appears complete or not at all.
    """
    import ckpttool
    from ckpttool.cli._output import print_json, progress_bar
    from ckpttool.cli._reports import print_average_report

    _check_usage(src, given)
    with progress_bar("average") as progress:
        report = ckpttool.average(src, out, progress=progress, **options.chosen(given))
    if as_json:
        print_json(report)
    else:
        print_average_report(report)


def _check_usage(src: tuple[str, ...], given: dict[str, Any]) -> None:
    """Refuse options that exclude each other.

    Raises:
        click.UsageError: Two options exclude each other.
    """
    if len(src) < 2:
        raise click.UsageError("name two checkpoints or more, and then OUT")
    chosen = [f"--{name}" for name in ("weights", "ema", "schedule") if given[name] is not None]
    if len(chosen) > 1:
        raise click.UsageError(f"{chosen[0]} and {chosen[1]} exclude each other")
    for name in ("world_size", "stage"):
        if given["to"] != "zero" and given[name] is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} is only for --to zero")
    if given["to"] == "zero" and given["overwrite"]:
        raise click.UsageError("--overwrite is only for --to safetensors")
    if given["prove"] and given["dry_run"]:
        raise click.UsageError("--prove needs the output that --dry-run does not write")
