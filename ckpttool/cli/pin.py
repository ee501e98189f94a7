"""``ckpttool pin``."""

from __future__ import annotations

from typing import Any

import click

from ckpttool.cli import _options as options


@click.command(short_help="Keep a checkpoint from every retention rule.")
@click.argument("src", type=click.Path())
@click.option("--why", required=True, metavar="TEXT", help="The reason, for people.")
@options.tag_option
@options.json_option
@options.storage_option
@options.debug_option
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
