"""``ckpttool prune``."""

from __future__ import annotations

from typing import Any

import click

from ckpttool.cli import _options as options


@click.command(short_help="Remove the checkpoints that no rule keeps.")
@click.argument("root", type=click.Path())
@options.retention_options
@click.option("--dry-run", is_flag=True, help="Print the decisions, and remove nothing.")
@options.json_option
@options.storage_option
@options.debug_option
def prune(root: str, as_json: bool, **given: Any) -> None:
    """Remove checkpoints from the directory ROOT, and print the reason for each.

    A checkpoint stays if any rule keeps it. The newest complete checkpoint always stays; so do the one in latest, those
    in the snapshot of a Ray Train run, torn ones (a save may be running) and all that are not native ZeRO checkpoints.
    """
    import ckpttool
    from ckpttool.catalog.retention import parse_best
    from ckpttool.cli._output import print_json
    from ckpttool.cli._reports import print_decisions

    if given["keep_last"] is None and given["keep_every"] is None and given["keep_best"] is None:
        raise click.UsageError("say what to keep: --keep-last, --keep-every or --keep-best")
    if given["keep_best"] is not None:
        try:
            parse_best(given["keep_best"])
        except ValueError:
            raise click.UsageError("--keep-best takes METRIC, METRIC:min or METRIC:max, and :COUNT after it") from None
    decisions = ckpttool.prune(root, **options.chosen(given))
    if as_json:
        print_json(decisions)
    else:
        print_decisions(decisions, dry_run=given["dry_run"])
