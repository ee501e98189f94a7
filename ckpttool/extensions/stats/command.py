"""The command ``stats``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ckpttool.cli import _options as options

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpttool.blocks import Block
    from ckpttool.extensions.stats.statistics import Statistics
    from ckpttool.model import Checkpoint

WIDE = 140
"""Columns of a terminal that has room for a small histogram in each row of statistics."""


@click.command(
    cls=options.Command,
    short_help="Minimum, maximum, mean, norm and non-finite values of every tensor.",
    page="see",
    examples=(
        "ckpttool stats runs/checkpoint-500",
        "ckpttool stats runs/checkpoint-500 --optimizer --include '*norm*'",
        "ckpttool stats runs/checkpoint-500 runs/checkpoint-600 --json",
    ),
)
@options.sources_argument
@options.shared("tag", "include", "exclude")
@click.option("--optimizer", is_flag=True, help="Also the optimizer's states.")
@options.shared("jobs", "trust_names")
def stats(src: tuple[Any, ...], **given: Any) -> None:
    """Minimum, maximum, mean, norm and counts of NaN, infinity and zero of every tensor of each SRC.

    Weights are the fp32 master weights, if present. Reads every value once, in small parts.
    """
    import ckpttool
    from ckpttool.cli._output import is_text, progress_bar, show, terminal_width

    chosen = options.chosen(given)
    opening = {name: value for name, value in chosen.items() if name in options.OPENING}
    found = []
    sketches = terminal_width() >= WIDE
    drawn = sketches or not is_text()
    for one in src:
        checkpoint = ckpttool.inspect(one, **opening)
        with progress_bar(f"stats {checkpoint.tag}") as progress:
            found.append((checkpoint, ckpttool.stats(one, magnitudes=drawn, progress=progress, **chosen)))
    series = [{"location": checkpoint.location, "tensors": own} for checkpoint, own in found]
    show(found, plain=lambda: {"checkpoints": series}, blocks=partial(_blocks, found, sketches=sketches))


def _blocks(found: Sequence[tuple[Checkpoint, Statistics]], *, sketches: bool) -> Iterator[Block]:
    """Yield the table of each checkpoint, below its name if there are several."""
    from ckpttool.blocks import Line
    from ckpttool.extensions.stats.statistics import table

    for checkpoint, tensors in found:
        if len(found) > 1:
            yield Line(f"{checkpoint.location}:")
        yield from table(tensors, sketches=sketches)
