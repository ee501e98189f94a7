"""``ckpttool stats``."""

from __future__ import annotations

from typing import Any

import click

from ckpttool.cli import _options as options


@click.command(short_help="Minimum, maximum, mean, norm and odd values of every tensor.")
@options.sources_argument
@options.tag_option
@options.include_option
@options.exclude_option
@click.option("--optimizer", is_flag=True, help="Also the optimizer's states.")
@options.jobs_option
@options.json_option
@options.trust_option
@options.storage_option
@options.debug_option
def stats(src: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Minimum, maximum, mean, norm and counts of NaN, infinity and zero of every tensor of SRC.

    Weights are the fp32 master weights, if present. Reads every value once, in small parts.
    """
    import ckpttool
    from ckpttool.cli._output import print_json, progress_bar
    from ckpttool.cli._reports import print_stats

    with progress_bar("stats") as progress:
        found = ckpttool.stats(src, progress=progress, **options.chosen(given))
    if as_json:
        print_json(found)
    else:
        print_stats(found)
