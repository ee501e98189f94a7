"""``ckpttool inspect``."""

from __future__ import annotations

from typing import Any

import click

from ckpttool.cli import _options as options


@click.command(short_help="Show the content of a checkpoint.")
@options.sources_argument
@options.tag_option
@click.option("--params", "view", flag_value="params", help="One row for each parameter, buffer and tied name.")
@click.option("--ranks", "view", flag_value="ranks", help="One row for each rank: what it holds.")
@click.option("--files", "view", flag_value="files", help="One row for each file.")
@click.option("--param", "name", metavar="NAME", help="Show the byte ranges of one parameter.")
@click.option("--digest", is_flag=True, help="Digests of all values, the same however they are sharded (reads them).")
@options.json_option
@options.trust_option
@options.storage_option
@options.debug_option
def inspect(
    src: tuple[str, ...], view: str | None, name: str | None, digest: bool, as_json: bool, **given: Any
) -> None:
    """Show the content of a checkpoint; reads a few kilobytes, for any size.

    Without a view: format, topology, versions, totals and parameter groups. Several SRC are directories of one
    checkpoint, each with the files of some ranks.
    """
    import ckpttool
    from ckpttool.cli import _checkpoint_json, _checkpoint_tables

    if view and name:
        raise click.UsageError(f"choose one of --{view} and --param")
    if digest and (view or name):
        raise click.UsageError("--digest goes with no view")
    if digest:
        _print_digest(src, as_json, given)
        return
    checkpoint = ckpttool.inspect(src, **options.chosen(given))
    if as_json:
        _checkpoint_json.print_checkpoint(checkpoint, name)
    else:
        _checkpoint_tables.print_checkpoint(checkpoint, view, name)


def _print_digest(src: tuple[str, ...], as_json: bool, given: dict[str, Any]) -> None:
    import ckpttool
    from ckpttool.cli._output import print_facts, print_json, progress_bar

    with progress_bar("digest") as progress:
        found = ckpttool.digest(src, progress=progress, **options.chosen(given))
    if as_json:
        print_json(found)
    else:
        print_facts([("weights", found.weights), ("optimizer", found.optimizer or "no states")])
