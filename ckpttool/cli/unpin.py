"""``ckpttool unpin``."""

from __future__ import annotations

from typing import Any

import click

from ckpttool.cli import _options as options


@click.command(short_help="Remove the pin of a checkpoint.")
@click.argument("src", type=click.Path())
@options.tag_option
@options.json_option
@options.storage_option
@options.debug_option
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
