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
def stats(
    src: tuple[str, ...],
    tag: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    optimizer: bool,
    jobs: int | None,
    as_json: bool,
    trust_names: bool,
    storage_options: dict[str, Any] | None,
) -> None:
    """Minimum, maximum, mean, norm and counts of NaN, infinity and zero of every tensor of SRC.

    Weights are the fp32 masters where there are any. Every value is read once, in small pieces.
    """
    import ckpttool
    from ckpttool.cli._output import print_json, progress_bar
    from ckpttool.cli._reports import print_stats

    with progress_bar("stats") as progress:
        found = ckpttool.stats(
            src, tag=tag, include=include, exclude=exclude, optimizer=optimizer, trust_names=trust_names,
            progress=progress, **options.chosen(storage_options=storage_options, jobs=jobs),
        )  # fmt: skip
    if as_json:
        print_json(found)
    else:
        print_stats(found)
