"""The one place that writes to the terminal: tables and JSON on stdout, progress on stderr."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from ckpttool.messages import printable
from ckpttool.storage import storage_error
from ckpttool.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.progress import Progress as Bar

    from ckpttool.units import Progress

SECONDS_BEFORE_BAR = 0.5
"""Seconds of work before a bar appears."""
SECONDS_BETWEEN_LINES = 60.0
"""Seconds between lines of progress if stderr is not a terminal."""


def terminal_width() -> int:
    """Return the columns of the terminal; 0 if the output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def is_colored() -> bool:
    """Return whether the output is a terminal that shows colours."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Print rows under a header.

    Args:
        columns: Headings.
        rows: Cells.
        right: Headings of right-aligned columns.
    """
    cells = [[printable(cell, 0) for cell in row] for row in rows]
    aligned = [column in right for column in columns]
    if sys.stdout.isatty():
        _write(_drawn(columns, cells, aligned))
    else:
        _write(_aligned([columns, *cells], aligned))


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print labels and values in two columns; empty values are left out."""
    cells = [[label, printable(value, 0)] for label, value in facts if value]
    if sys.stdout.isatty():
        _write(_drawn(None, cells, [False, False]))
    else:
        _write(_aligned(cells, [False, False]))


def print_line(text: str, *, color: str | None = None) -> None:
    """Print one line, coloured on a terminal."""
    text = printable(text, 0)
    colored = color and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    _write((click.style(text, fg=color) if colored else text) + "\n")


def print_json(data: Any) -> None:
    """Print plain values or dataclasses of them as JSON; the keys of a dataclass are its field names."""
    import json  # tables do not need it

    from ckpttool.analysis.json_report import as_plain

    _write(json.dumps(as_plain(data), indent=2, allow_nan=False) + "\n")


def _aligned(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """Return aligned columns for files and pipes, without wrapping or truncation."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, right, strict=True)
        lines.append("  ".join(c.rjust(w) if at_right else c.ljust(w) for c, w, at_right in cells).rstrip() + "\n")
    return "".join(lines)


def _drawn(header: Sequence[str] | None, rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """Return a table for a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_edge=False, show_header=header is not None, header_style="bold")
    for i, at_right in enumerate(right):
        # A truncated name is useless: a narrow terminal folds it.
        style = "bold" if header is None and i == 0 else ""
        heading = Text(header[i]) if header else ""
        table.add_column(heading, justify="right" if at_right else "left", overflow="fold", style=style)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(highlight=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def write_bytes(data: bytes) -> None:
    """Write UTF-8 to stdout, whatever its encoding."""
    _write(data)


def _write(text: str | bytes) -> None:
    """Write to stdout. A closed pipe (``| head``) is not an error, a full disk is.

    Raises:
        StorageError: Writing failed.
    """
    try:
        binary = getattr(sys.stdout, "buffer", None)  # None where a program replaced stdout by a text of its own
        if isinstance(text, str) or binary is None:
            sys.stdout.write(text if isinstance(text, str) else text.decode())
        else:
            sys.stdout.flush()
            binary.write(text)
        sys.stdout.flush()
    except OSError as error:
        # Python must not try to flush the rest when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise storage_error("standard output", error) from error


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Progress]:
    """Show a bar on a terminal, a line every minute elsewhere; nothing for work that ends or fails at once."""
    if sys.stderr.isatty():
        with _bar(what) as progress:
            yield progress
    else:
        yield _lines(what)


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Progress]:
    bar: Bar | None = None
    began = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            if time.monotonic() - began < SECONDS_BEFORE_BAR:
                return
            bar = _started_bar(what)
        bar.update(bar.task_ids[0], completed=done, total=total)

    try:
        yield tell
    finally:
        if bar is not None:
            bar.stop()


def _started_bar(what: str) -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (what, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(what)
    bar.start()
    return bar


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
