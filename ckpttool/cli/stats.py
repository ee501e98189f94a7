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
@options.html_options
@click.option("--each", is_flag=True, help="Each SRC is a checkpoint of its own: show the series over their steps.")
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

    page = options.page_of(given, as_json, "each")
    options.check_page(page, given)
    if page["html"] is not None:
        _write_page(src, page, given)
        return
    with progress_bar("stats") as progress:
        found = ckpttool.stats(src, progress=progress, **options.chosen(given))
    if as_json:
        print_json(found)
    else:
        print_stats(found)


def _write_page(src: tuple[str, ...], page: dict[str, Any], given: dict[str, Any]) -> None:
    import ckpttool
    from ckpttool.cli._output import progress_bar
    from ckpttool.cli._reports import write_page
    from ckpttool.pages.stats import stats_page

    chosen = options.chosen(given)
    opening = {name: chosen[name] for name in ("tag", "trust_names", "storage_options") if name in chosen}
    series = []
    for one in [(path,) for path in src] if page["each"] else [src]:
        checkpoint = ckpttool.inspect(one, **opening)
        with progress_bar(f"stats {checkpoint.tag}") as progress:
            series.append((checkpoint, ckpttool.stats(one, progress=progress, **chosen)))
    write_page(page, stats_page(series), given)
