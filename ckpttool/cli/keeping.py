"""The commands that keep checkpoints: ``ls``, ``prune``, ``pin`` and ``unpin``."""

from __future__ import annotations

from typing import Any

import click

from ckpttool.cli import _options as options


@click.command(cls=options.Command, short_help="List the checkpoints under a root.")
@click.argument("root", type=click.Path(readable=False))
def ls(root: str, **given: Any) -> None:
    """List the checkpoints in the directory ROOT, sorted by step: ranks, size, age, complete or torn.

    ROOT is a checkpoint root, or the output directory of a trainer, with a directory for each checkpoint.
    """
    import ckpttool
    from ckpttool.cli._output import show

    show(ckpttool.ls(root, **options.chosen(given)))


@click.command(cls=options.Command, short_help="Delete the checkpoints that no rule keeps, or their optimizer states.")
@click.argument("root", type=click.Path(readable=False))
@click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help="Keep the N newest.")
@click.option("--keep-every", type=click.IntRange(min=1), metavar="K", help="Keep those whose step is a multiple of K.")
@click.option(
    "--keep-best",
    metavar="METRIC",
    help="Keep the one saved with the smallest METRIC (METRIC:max: the largest; METRIC:min:3: the three smallest).",
)
@click.option("--keep-for", type=options.Duration(), metavar="AGE", help="Keep those younger than AGE: 7d, 12h, 30min.")
@click.option(
    "--torn", is_flag=True, help="Delete incomplete and uncommitted checkpoints, unless a save may still write them."
)
@click.option(
    "--grace",
    type=options.Duration(),
    metavar="AGE",
    help="With --torn, least age of their newest file.  [default: 1h]",
)
@click.option("--dry-run", is_flag=True, help="Print the decisions and the bytes that they free, and change nothing.")
@options.shared("jobs", "memory")
def prune(root: str, **given: Any) -> None:
    """Delete checkpoints from the directory ROOT, or thin them, and print the reason for each.

    A checkpoint that any rule keeps is not changed. These are always kept: the newest complete checkpoint, the one
    in latest, those in the snapshot of a Ray Train run, pinned ones, torn ones without --torn (a save may be
    running), and all that no run saves: conversions of ZeRO, exports, weights alone. A thin checkpoint keeps its
    weights, client state and configuration.
    """
    import ckpttool
    from ckpttool.catalog.retention import Decisions, parse_best
    from ckpttool.cli._output import progress_bar, show
    from ckpttool.errors import PruneError

    if not given["torn"] and all(given[rule] is None for rule in options.RETENTION):
        flags = ", ".join(f"--{rule.replace('_', '-')}" for rule in options.RETENTION)
        raise click.UsageError(f"give a retention rule: {flags}; or --torn")
    if given["keep_best"] is not None:
        try:
            parse_best(given["keep_best"])
        except ValueError:
            raise click.UsageError("--keep-best takes METRIC, METRIC:min or METRIC:max, and :COUNT after it") from None
    failed: PruneError | None = None
    with progress_bar("prune") as progress:
        try:
            decisions = ckpttool.prune(root, progress=progress, **options.chosen(given))
        except PruneError as error:
            failed, decisions = error, Decisions(error.decisions)
    show(decisions, plain=lambda: {"decisions": decisions})
    if failed is not None:
        raise failed


@click.command(cls=options.Command, short_help="Keep a checkpoint from every retention rule.")
@click.argument("src", type=click.Path(readable=False))
@click.option("--why", required=True, metavar="TEXT", help="The reason, for people.")
@options.shared("tag")
def pin(src: Any, **given: Any) -> None:
    """Pin the checkpoint SRC: prune, CheckpointManager and a trainer's rotation neither remove nor thin it.

    ls shows pins; unpin removes one.
    """
    import ckpttool
    from ckpttool.blocks import Line
    from ckpttool.cli._output import show

    made = ckpttool.pin(src, **options.chosen(given))
    show(made, blocks=lambda: [Line(str(made))])


@click.command(cls=options.Command, short_help="Remove the pin of a checkpoint.")
@click.argument("src", type=click.Path(readable=False))
@options.shared("tag")
def unpin(src: Any, **given: Any) -> None:
    """Remove the pin of the checkpoint SRC: retention rules count it again."""
    import ckpttool
    from ckpttool.blocks import Line
    from ckpttool.cli._output import show

    removed = ckpttool.unpin(src, **options.chosen(given))
    show(
        removed,
        blocks=lambda: [Line(f"{removed.path}: unpinned; it was pinned by {removed.who or '?'}: {removed.why}")],
    )
