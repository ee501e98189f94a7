"""``ckpttool cp``."""

from __future__ import annotations

from typing import Any

import click

from ckpttool.cli import _options as options


@click.command(short_help="Copy a whole checkpoint to another storage.")
@options.sources_argument
@click.argument("dst", type=click.Path())
@options.tag_option
@click.option("--prove", is_flag=True, help="Digest the checkpoint and the copy, and commit only if they are equal.")
@options.check_options
@click.option(
    "--resume", is_flag=True, help="Continue from the files that a killed or failed run of the same copy completed."
)
@options.jobs_option
@options.memory_option
@options.json_option
@options.trust_option
@options.storage_option
@options.debug_option
def cp(src: tuple[str, ...], dst: str, as_json: bool, **given: Any) -> None:
    """Copy the checkpoint SRC into the root DST: the directory of its tag, and its sidecar files.

    SRC and DST may be on different storages. latest is written after the whole copy was read back.
    """
    import ckpttool
    from ckpttool.cli._output import print_json, progress_bar
    from ckpttool.cli._reports import print_cp_report

    with progress_bar("cp") as progress:
        report = ckpttool.cp(src, dst, progress=progress, **options.chosen(given))
    if as_json:
        print_json(report)
    else:
        print_cp_report(report)
