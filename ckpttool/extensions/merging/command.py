"""The command ``average``."""

from __future__ import annotations

from typing import Any

import click

from ckpttool.cli import _options as options


def _comma_separated(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[float, ...] | None:
    """Parse numbers between commas."""
    if value is None:
        return None
    try:
        return tuple(float(number) for number in value.split(","))
    except ValueError:
        raise click.BadParameter("write numbers between commas, such as 1,2,4") from None


@click.command(
    cls=options.Command,
    short_help="Average several checkpoints of one model.",
    page="average",
    examples=(
        "ckpttool average runs/checkpoint-500 runs/checkpoint-600 mean --to safetensors",
        "ckpttool average a b c mean --to safetensors --weights 1,2,4",
        "ckpttool average a b c mean --to zero",
    ),
)
@options.sources_argument
@options.out_argument
@click.option(
    "--to",
    type=click.Choice(["safetensors", "zero"]),
    required=True,
    help="Only weights, or a checkpoint with the optimizer of the newest SRC.",
)
@click.option(
    "--weights",
    metavar="NUMBERS",
    callback=_comma_separated,
    help="One weight for each SRC, such as 1,2,4.  [default: equal]",
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
    help="Weights equivalent to this decay of the learning rate (WSM), the oldest SRC first.",
)
@click.option("--accumulate", type=options.Dtype(["fp32", "fp64"]), help="dtype to compute in.  [default: fp32]")
@options.shared("tag")
@click.option(
    "--dtype",
    type=options.Dtype(["fp32", "bf16", "fp16"]),
    help="dtype of the parameters; for zero the dtype to train in, if no SRC records it.  [default: fp32]",
)
@options.shared("max_shard_size", "include", "exclude")
@click.option(
    "--world-size", type=click.IntRange(1, 1 << 20), help="Data-parallel ranks for zero.  [default: the newest SRC's]"
)
@click.option("--stage", type=click.IntRange(1, 3), help="ZeRO stage for zero.  [default: the newest SRC's]")
@click.option("--overwrite", is_flag=True, help="Replace weights in OUT (for safetensors).")
@options.shared("dry_run")
@click.option("--prove", is_flag=True, help="Compute the mean again, and commit only if the output is equal.")
@options.shared("allow_partial", "check", "jobs", "memory", "trust_names")
def average(src: tuple[Any, ...], out: str, **given: Any) -> None:
    """Average the checkpoints SRC, each of the same model, into OUT.

    The fp32 master weights are averaged, in the order of SRC. Sources may have different formats, stages and numbers of
    ranks. OUT appears complete or not at all.
    """
    import ckpttool
    from ckpttool.cli._output import progress_bar, show

    _check_average(src, given)
    with progress_bar("average") as progress:
        report = ckpttool.average(src, out, progress=progress, **options.chosen(given))
    show(report)


def _check_average(src: tuple[Any, ...], given: dict[str, Any]) -> None:
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
