"""``ckpttool apply``."""

from __future__ import annotations

from typing import Any

import click

from ckpttool.cli import _options as options


@click.command(short_help="Apply deltas to a checkpoint.")
@click.argument("a", type=click.Path())
@click.argument("deltas", type=click.Path(), nargs=-1, required=True, metavar="DELTAS...")
@options.out_argument
@options.tag_option
@click.option("--max-shard-size", type=options.Size(), help="Split into files of at most this size.  [default: 5GB]")
@click.option("--prove", is_flag=True, help="Digest the result and the output, and commit only if they are equal.")
@options.check_options
@options.dry_run_option
@click.option("--overwrite", is_flag=True, help="Replace weights that OUT already holds.")
@options.jobs_option
@options.memory_option
@options.json_option
@options.trust_option
@options.storage_option
@options.debug_option
def apply(a: str, deltas: tuple[str, ...], out: str, as_json: bool, **given: Any) -> None:
    """Apply the DELTAS, in order, to A, and write the weights to OUT as safetensors.

    A must have the weights that the first of them begins at, in any format; each must begin where the one before it
    ends. This is checked before anything is written. OUT appears complete or not at all.
    """
    import ckpttool
    from ckpttool.cli._delta_reports import print_apply_report
    from ckpttool.cli._output import print_json, progress_bar

    if given["prove"] and given["dry_run"]:
        raise click.UsageError("--prove needs the output that --dry-run does not write")
    with progress_bar("apply") as progress:
        report = ckpttool.apply(a, deltas, out, progress=progress, **options.chosen(given))
    if as_json:
        print_json(report)
    else:
        print_apply_report(report)
