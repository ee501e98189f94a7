"""The commands that keep checkpoints: ``ls``, ``prune``, ``pin`` and ``unpin``."""

from __future__ import annotations

from typing import Any

import click

from ckpttool.cli import _options as options


@click.command(short_help="List the checkpoints under a root.")
@click.argument("root", type=click.Path())
@options.html_options
@options.retention_options
@options.json_option
@options.common_options
def ls(root: str, as_json: bool, **given: Any) -> None:
    """List the checkpoints in the directory ROOT, sorted by step: ranks, size, age, complete or torn.

    ROOT is a checkpoint root, or the output directory of a trainer, with a directory for each checkpoint. With --html,
    the rules show what prune would keep, thin and remove; nothing is changed.
    """
    import ckpttool
    from ckpttool.cli._output import print_json
    from ckpttool.cli._reports import print_catalog, write_page

    rules = options.RETENTION
    page = options.page_of(given, as_json, *rules)
    options.check_page(page, given)
    found = ckpttool.ls(root, **options.chosen(given))
    if page["html"] is not None:
        from ckpttool.api._pages import page_of_catalog

        write_page(page, page_of_catalog(found, **{rule: page[rule] for rule in rules}), given)
    elif as_json:
        print_json(found)
    else:
        print_catalog(found)


@click.command(short_help="Remove the checkpoints that no rule keeps, or their optimizer states.")
@click.argument("root", type=click.Path())
@options.retention_options
@click.option(
    "--torn", is_flag=True, help="Remove incomplete and uncommitted checkpoints that no save writes any more."
)
@click.option(
    "--grace",
    type=options.Duration(),
    metavar="AGE",
    help="With --torn, least age of their newest file.  [default: 1h]",
)
@click.option("--sign-key", metavar="KEY", help="Key of signed checkpoints to thin: a file, or env:NAME.")
@click.option("--dry-run", is_flag=True, help="Print the decisions and the bytes that would go, and change nothing.")
@options.jobs_option
@options.memory_option
@options.json_option
@options.common_options
def prune(root: str, as_json: bool, **given: Any) -> None:
    """Remove checkpoints from the directory ROOT, or thin them, and print the reason for each.

    A checkpoint stays whole if any rule keeps it. The newest complete checkpoint always stays; so do the one in latest,
    those in the snapshot of a Ray Train run, pinned ones, torn ones without --torn (a save may be running) and all that
    are not native ZeRO checkpoints. A thin checkpoint keeps its weights, client state and configuration.
    """
    import ckpttool
    from ckpttool.catalog.retention import parse_best
    from ckpttool.cli._output import print_json, progress_bar
    from ckpttool.cli._reports import print_decisions
    from ckpttool.errors import PruneError

    if not given["torn"] and all(given[rule] is None for rule in options.RETENTION):
        flags = ", ".join(f"--{rule.replace('_', '-')}" for rule in options.RETENTION)
        raise click.UsageError(f"say what to keep: {flags}; or what goes: --torn")
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
            failed, decisions = error, list(error.decisions)
    if as_json:
        print_json(decisions)
    else:
        print_decisions(decisions, dry_run=given["dry_run"])
    if failed is not None:
        raise failed


@click.command(short_help="Keep a checkpoint from every retention rule.")
@click.argument("src", type=click.Path())
@click.option("--why", required=True, metavar="TEXT", help="The reason, for people.")
@options.tag_option
@options.json_option
@options.common_options
def pin(src: str, as_json: bool, **given: Any) -> None:
    """Pin the checkpoint SRC: prune, CheckpointManager and a trainer's rotation neither remove nor thin it.

    ls shows pins; unpin removes one.
    """
    import ckpttool
    from ckpttool.cli._output import print_json
    from ckpttool.cli._reports import print_pin

    made = ckpttool.pin(src, **options.chosen(given))
    if as_json:
        print_json(made)
    else:
        print_pin(src, made)


@click.command(short_help="Remove the pin of a checkpoint.")
@click.argument("src", type=click.Path())
@options.tag_option
@options.json_option
@options.common_options
def unpin(src: str, as_json: bool, **given: Any) -> None:
    """Remove the pin of the checkpoint SRC: retention rules count it again."""
    import ckpttool
    from ckpttool.cli._output import print_json
    from ckpttool.cli._reports import print_pin

    removed = ckpttool.unpin(src, **options.chosen(given))
    if as_json:
        print_json(removed)
    else:
        print_pin(src, removed, removed=True)
