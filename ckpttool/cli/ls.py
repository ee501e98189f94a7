"""``ckpttool ls``."""

from __future__ import annotations

from typing import Any

import click

from ckpttool.cli import _options as options


@click.command(short_help="List the checkpoints under a root.")
@click.argument("root", type=click.Path())
@options.html_options
@options.retention_options
@options.json_option
@options.storage_option
@options.debug_option
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
