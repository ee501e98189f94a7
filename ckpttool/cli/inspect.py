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
@click.option("--map", "view", flag_value="map", help="Draw what each rank holds, as wide as the terminal.")
@options.html_options
@click.option("--verify", is_flag=True, help="Verify it too, and show the findings in the page.")
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
    page = options.page_of(given, as_json, "verify")
    _check_usage(view, name, digest, page)
    if digest:
        _print_digest(src, as_json, given)
    elif page["html"] is not None:
        _write_page(src, page, given)
    else:
        _print(src, view, name, as_json, given)


def _check_usage(view: str | None, name: str | None, digest: bool, page: dict[str, Any]) -> None:
    """Refuse options that exclude each other.

    Raises:
        click.UsageError: Two options exclude each other.
    """
    if view and name:
        raise click.UsageError(f"choose one of --{view} and --param")
    if digest and (view or name):
        raise click.UsageError("--digest goes with no view")
    if page["html"] is not None and (view or name or digest):
        raise click.UsageError("--html goes with no view, and not with --digest")


def _print(src: tuple[str, ...], view: str | None, name: str | None, as_json: bool, given: dict[str, Any]) -> None:
    import ckpttool
    from ckpttool.cli import _checkpoint_json, _checkpoint_tables

    checkpoint = ckpttool.inspect(src, **options.chosen(given))
    if as_json:
        _checkpoint_json.print_checkpoint(checkpoint, name)
    elif view == "map":
        from ckpttool.cli._map import print_map

        print_map(checkpoint)
    else:
        _checkpoint_tables.print_checkpoint(checkpoint, view, name)


def _write_page(src: tuple[str, ...], page: dict[str, Any], given: dict[str, Any]) -> None:
    from ckpttool.api._pages import page_of_source
    from ckpttool.cli._errors import hint_with_flags
    from ckpttool.cli._reports import write_page

    options.check_page(page, given)
    data, report = page_of_source(src, verify=page["verify"], hint=hint_with_flags, **options.chosen(given))
    write_page(page, data, given)
    if report is not None and report.findings:
        raise click.exceptions.Exit(1)


def _print_digest(src: tuple[str, ...], as_json: bool, given: dict[str, Any]) -> None:
    import ckpttool
    from ckpttool.cli._output import print_facts, print_json, progress_bar

    with progress_bar("digest") as progress:
        found = ckpttool.digest(src, progress=progress, **options.chosen(given))
    if as_json:
        print_json(found)
    else:
        print_facts([("weights", found.weights), ("optimizer", found.optimizer or "no states")])
