"""``ckpttool cp``."""

from __future__ import annotations

from typing import Any

import click

from ckpttool.cli import _options as options


@click.command(short_help="Copy a whole checkpoint to another storage.")
@options.sources_argument
@click.argument("dst", type=click.Path())
@options.tag_option
@click.option("--prove", is_flag=True, help="Digest the checkpoint and the copy; commit only if they agree.")
@options.check_options
@click.option("--resume", is_flag=True, help="Go on from what a killed or failed run of the same copy has left.")
@options.jobs_option
@options.memory_option
@options.json_option
@options.trust_option
@options.storage_option
@options.debug_option
def cp(
    src: tuple[str, ...],
    dst: str,
    tag: str | None,
    prove: bool,
    check: str | None,
    no_check: bool,
    resume: bool,
    jobs: int | None,
    memory: int | None,
    as_json: bool,
    trust_names: bool,
    storage_options: dict[str, Any] | None,
) -> None:
    """Copy the checkpoint SRC into the root DST: the directory of its tag, and the small files beside it.

    SRC and DST may lie on different storages. latest is written when all of it is there and was read back.
    """
    import ckpttool
    from ckpttool.cli._output import print_json, progress_bar
    from ckpttool.cli._reports import print_transfer_report

    given = options.chosen(
        check=options.checked(check, no_check), jobs=jobs, memory=memory, storage_options=storage_options
    )
    with progress_bar("cp") as progress:
        report = ckpttool.cp(
            src, dst, tag=tag, prove=prove, resume=resume, trust_names=trust_names, progress=progress, **given
        )
    if as_json:
        print_json(report)
    else:
        print_transfer_report(report)
