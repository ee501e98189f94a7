"""The one place that writes to the terminal: tables and JSON on stdout, progress on stderr."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from ckpttool.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from ckpttool.progress import Progress

SECONDS_BETWEEN_LINES = 5.0
"""How often progress is told where there is no terminal to draw a bar on."""


def printable(text: str) -> str:
    """Text from a file, with nothing in it that could drive the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def console() -> Console:
    """Where results go. Nothing is wrapped or cut when stdout is not a terminal."""
    from rich.console import Console

    return Console(markup=False, highlight=False, emoji=False, width=None if sys.stdout.isatty() else 4096)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Print rows under a header.

    Args:
        columns: Headings.
        rows: Cells.
        right: Headings of columns to align at the right.
    """
    from rich.table import Table
    from rich.text import Text

    out = console()
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        # A name that is cut is of no use; a terminal that is too narrow folds it.
        table.add_column(Text(column), justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    out.print(table)


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print labels and values in two columns; empty values are left out."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in facts:
        if value:
            table.add_row(Text(label), Text(printable(value)))
    console().print(table)


def print_line(text: str, *, style: str = "") -> None:
    """Print one line."""
    console().print(printable(text), style=style, soft_wrap=True)


def print_json(report: Any) -> None:
    """Print a dataclass of plain values as JSON; the keys are its field names."""
    sys.stdout.write(json.dumps(dataclasses.asdict(report), indent=2) + "\n")


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Progress]:
    """A bar on a terminal, a line every few seconds elsewhere; nothing for work that is over at once."""
    if sys.stderr.isatty():
        with _bar(what) as progress:
            yield progress
    else:
        yield _lines(what)


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (what, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(what: str) -> Progress:
    last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            percent = 100 * done // max(total, 1)
            sys.stderr.write(f"{what}: {percent} % ({format_size(done)} of {format_size(total)})\n")
            sys.stderr.flush()

    return tell
