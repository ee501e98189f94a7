"""``ckpttool ls``."""

from __future__ import annotations

from typing import Any

import click

from ckpttool.cli import _options as options


@click.command(short_help="List the checkpoints under a root.")
@click.argument("root", type=click.Path())
@options.json_option
@options.storage_option
@options.debug_option
def ls(root: str, as_json: bool, **given: Any) -> None:
    """List the checkpoints in the directory ROOT, oldest first: step, ranks, size, age, complete or torn.

    ROOT is a checkpoint root, or the output directory of a trainer, with a directory for each checkpoint.
    """
    import ckpttool
    from ckpttool.cli._output import print_json
    from ckpttool.cli._reports import print_catalog

    found = ckpttool.ls(root, **options.chosen(given))
    if as_json:
        print_json(found)
    else:
        print_catalog(found)
