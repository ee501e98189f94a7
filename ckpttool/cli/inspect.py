"""``ckpttool inspect``."""

from __future__ import annotations

import click

from ckpttool.cli import _options as options


@click.command(short_help="Show what is in a checkpoint.")
@options.src_argument
@options.tag_option
@click.option("--params", "view", flag_value="params", help="One row for each parameter, buffer and tied name.")
@click.option("--ranks", "view", flag_value="ranks", help="One row for each rank: what it holds.")
@click.option("--files", "view", flag_value="files", help="One row for each file.")
@click.option("--param", "name", metavar="NAME", help="Where each byte of one parameter lies.")
@options.json_option
@options.debug_option
def inspect(src: str, tag: str | None, view: str | None, name: str | None, as_json: bool) -> None:
    """Show what is in a checkpoint: reads a few kilobytes, whatever its size.

    Without a view: format, topology, versions, totals and parameter groups.
    """
    from ckpttool import api
    from ckpttool.cli import _checkpoint_json, _checkpoint_tables

    if view and name:
        raise click.UsageError(f"choose one of --{view} and --param")
    checkpoint = api.inspect(src, tag=tag)
    if as_json:
        _checkpoint_json.print_checkpoint(checkpoint, name)
    else:
        _checkpoint_tables.print_checkpoint(checkpoint, view, name)
