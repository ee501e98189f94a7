"""``ckpttool delta``."""

from __future__ import annotations

from typing import Any

import click

from ckpttool.cli import _options as options


@click.command(short_help="Write what changed between two checkpoints.")
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@options.out_argument
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="Type of the parameters.  [default: the type that B computes in; weights alone as they are stored]",
)
@click.option("--tag-a", metavar="TAG", help="Which checkpoint of A.  [default: the one latest names]")
@click.option("--tag-b", metavar="TAG", help="Which checkpoint of B.  [default: the one latest names]")
@click.option("--prove", is_flag=True, help="Apply the delta to A in memory, and commit only if the result is B.")
@options.check_options
@click.option("--dry-run", is_flag=True, help="Compare A and B, and write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace a delta that OUT already holds.")
@options.jobs_option
@options.memory_option
@options.json_option
@options.trust_option
@options.storage_option
@options.debug_option
def delta(a: str, b: str, out: str, as_json: bool, **given: Any) -> None:
    """Write the elements of B's weights that differ from A's into OUT, as indices and new values.

    A and B may have different formats, stages and numbers of ranks. Their fp32 master weights are cast to --dtype and
    compared bit for bit. OUT appears complete or not at all; ckpttool apply makes B's weights of A and OUT.
    """
    import ckpttool
    from ckpttool.cli._delta_reports import print_delta_report
    from ckpttool.cli._output import print_json, progress_bar

    if given["prove"] and given["dry_run"]:
        raise click.UsageError("--prove needs the output that --dry-run does not write")
    with progress_bar("delta") as progress:
        report = ckpttool.delta(a, b, out, progress=progress, **options.chosen(given))
    if as_json:
        print_json(report)
    else:
        print_delta_report(report)
