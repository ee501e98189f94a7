"""``ckpttool prune``."""

from __future__ import annotations

from typing import Any

import click

from ckpttool.cli import _options as options


@click.command(short_help="Remove the checkpoints that no rule keeps.")
@click.argument("root", type=click.Path())
@click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help="Keep the N newest.")
@click.option("--keep-every", type=click.IntRange(min=1), metavar="K", help="Keep those whose step is a multiple of K.")
@click.option(
    "--keep-best",
    metavar="METRIC",
    help="Keep that with the least METRIC it was saved with (METRIC:max: the most; METRIC:min:3: the three least).",
)
@click.option("--dry-run", is_flag=True, help="Say what would go, and remove nothing.")
@options.json_option
@options.storage_option
@options.debug_option
def prune(
    root: str,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: str | None,
    dry_run: bool,
    as_json: bool,
    storage_options: dict[str, Any] | None,
) -> None:
    """Remove checkpoints from the directory ROOT, and say for each why it stays or goes.

    What any rule keeps stays. So do the newest whole one, the one that latest names, those that a run of Ray Train
    counts on, what is torn (it may be being saved) and what is no native ZeRO checkpoint.
    """
    import ckpttool
    from ckpttool.catalog.retention import parse_best
    from ckpttool.cli._output import print_json
    from ckpttool.cli._reports import print_decisions

    if keep_last is None and keep_every is None and keep_best is None:
        raise click.UsageError("say what to keep: --keep-last, --keep-every or --keep-best")
    if keep_best is not None:
        try:
            parse_best(keep_best)
        except ValueError:
            raise click.UsageError("--keep-best takes METRIC, METRIC:min or METRIC:max, and :COUNT behind it") from None
    decisions = ckpttool.prune(
        root, keep_last=keep_last, keep_every=keep_every, keep_best=keep_best, dry_run=dry_run,
        **options.chosen(storage_options=storage_options),
    )  # fmt: skip
    if as_json:
        print_json(decisions)
    else:
        print_decisions(decisions, dry_run=dry_run)
