"""``ckpttool verify``."""

from __future__ import annotations

from typing import Any

import click

from ckpttool.cli import _options as options


@click.command(short_help="Check that a checkpoint is whole and sound.")
@options.sources_argument
@options.tag_option
@click.option(
    "--deep",
    is_flag=True,
    help="Read every byte: checksums, NaN and infinity, 16-bit copies against fp32 master weights.",
)
@click.option(
    "--key",
    metavar="FILE|env:NAME",
    help="Also check the signature with the key in a file or an environment variable; reads every byte.",
)
@options.jobs_option
@options.json_option
@options.trust_option
@options.storage_option
@options.debug_option
def verify(src: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Check that a checkpoint is complete and sound: every rank's file exists, is intact and agrees with the others.

    Prints one line for each finding and exits with 1 if there is any.
    """
    from dataclasses import replace

    import ckpttool
    from ckpttool.cli._errors import hint_with_flags
    from ckpttool.cli._output import print_json, progress_bar
    from ckpttool.cli._reports import print_verify_report

    with progress_bar("verify") as progress:
        report = ckpttool.verify(src, progress=progress, **options.chosen(given))
    findings = (replace(f, hint=hint_with_flags(f.hint, f.options)) for f in report.findings)
    report = replace(report, findings=tuple(findings))
    if as_json:
        print_json(report)
    else:
        print_verify_report(report)
    if report.findings:
        raise click.exceptions.Exit(1)
