"""The command ``stats``."""

from __future__ import annotations

from typing import Any

import click

from ckpttool.cli import _options as options

WIDE = 140
"""Columns of a terminal that has room for a small histogram in each row of statistics."""


@click.command(
    cls=options.Command,
    short_help="Minimum, maximum, mean, norm and non-finite values of every tensor.",
    page="see",
    examples=(
        "ckpttool stats runs/checkpoint-500",
        "ckpttool stats runs/checkpoint-500 --optimizer --include '*norm*'",
        "ckpttool stats runs/checkpoint-500 runs/checkpoint-600 --html stats.html",
    ),
)
@options.sources_argument
@options.tag_option
@options.include_option
@options.exclude_option
@click.option("--optimizer", is_flag=True, help="Also the optimizer's states.")
@options.html_option
@options.jobs_option
@options.json_option
@options.trust_option
@options.common_options
def stats(src: tuple[Any, ...], html: str | None, as_json: bool, **given: Any) -> None:
    """Minimum, maximum, mean, norm and counts of NaN, infinity and zero of every tensor of each SRC.

    Weights are the fp32 master weights, if present. Reads every value once, in small parts. The page shows the series
    over the steps of several SRC.
    """
    import ckpttool
    from ckpttool.cli._output import print_blocks, print_json, print_line, progress_bar, terminal_width, write_page

    options.check_page(html, as_json, given)
    chosen = options.chosen(given)
    opening = {name: value for name, value in chosen.items() if name in options.OPENING}
    found = []
    sketches = terminal_width() >= WIDE
    drawn = as_json or html is not None or sketches
    for one in src:
        checkpoint = ckpttool.inspect(one, **opening)
        with progress_bar(f"stats {checkpoint.tag}") as progress:
            found.append((checkpoint, ckpttool.stats(one, magnitudes=drawn, progress=progress, **chosen)))
    if html is not None:
        from ckpttool.extensions.stats.page import stats_page

        write_page(html, stats_page(found), given)
    elif as_json:
        print_json({"checkpoints": [{"location": checkpoint.location, "tensors": own} for checkpoint, own in found]})
    else:
        from ckpttool.extensions.stats.statistics import table

        for checkpoint, tensors in found:
            if len(found) > 1:
                print_line(f"{checkpoint.location}:")
            print_blocks(table(tensors, sketches=sketches))
