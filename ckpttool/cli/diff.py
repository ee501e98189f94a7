"""``ckpttool diff``."""

from __future__ import annotations

from typing import Any

import click

from ckpttool.cli import _options as options


@click.command(short_help="Compare two checkpoints, of any formats and topologies.")
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option("--tag-a", metavar="TAG", help="Which checkpoint of A.  [default: the one latest names]")
@click.option("--tag-b", metavar="TAG", help="Which checkpoint of B.  [default: the one latest names]")
@click.option("--rtol", type=click.FloatRange(min=0), help="Relative tolerance.  [default: 0]")
@click.option("--atol", type=click.FloatRange(min=0), help="Absolute tolerance.  [default: 0]")
@options.include_option
@options.exclude_option
@click.option(
    "--all", is_flag=True, help="Also compare steps, learning rates, the scheduler, the loss scale and client state."
)
@options.html_options
@options.jobs_option
@options.json_option
@options.trust_option
@options.storage_option
@options.debug_option
def diff(a: str, b: str, as_json: bool, **given: Any) -> None:
    """Compare the weights and optimizer states of A and B by name, for any formats and topologies.

    Weights are the fp32 master weights, if present. Prints the differences and exits with 1, or with 0 if A and B are
    equal.
    """
    import ckpttool
    from ckpttool.cli._output import print_json, progress_bar
    from ckpttool.cli._reports import print_diff_report, write_page

    page = options.page_of(given, as_json)
    options.check_page(page, given)
    with progress_bar("diff") as progress:
        report = ckpttool.diff(a, b, progress=progress, **options.chosen(given))
    if page["html"] is not None:
        from ckpttool.pages.diff import diff_page

        write_page(page, diff_page(report), given)
    elif as_json:
        names = ("a", "b", "equal", "tensors", "notes", "others")
        print_json({name: getattr(report, name) for name in names})
    else:
        print_diff_report(report)
    if not report.equal:
        raise click.exceptions.Exit(1)
