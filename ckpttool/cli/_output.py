"""The one place that writes to the terminal: tables and JSON on stdout, progress on stderr."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import textwrap
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import click

from ckpttool.blocks import Facts, Line, Table
from ckpttool.cli._options import JSON, OUTPUT, QUIET, WIDE
from ckpttool.messages import printable
from ckpttool.storage import storage_error
from ckpttool.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rich.progress import Progress as Bar

    from ckpttool.blocks import Block
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


class Output(ABC):
    """Writes the report of a command, with an option of an extension, instead of the terminal."""

    @abstractmethod
    def check(self, context: click.Context) -> None:
        """Refuse what must not be written, before any work is done.

        Raises:
            click.UsageError: The options of the command exclude each other.
            CkptError: The output cannot be written.
        """

    @abstractmethod
    def show(self, report: Any, context: click.Context) -> None:
        """Write the report of a command that was called with the arguments in its context.

        Raises:
            CkptError: It cannot be written.
        """


def show(
    report: Any, *, plain: Callable[[], Any] | None = None, blocks: Callable[[], Iterable[Block]] | None = None
) -> None:
    """Show the report of a command: in the output of an extension, as JSON, or as lines and tables.

    Args:
        report: The report.
        plain: Returns the mapping or dataclass for JSON; default: the report.
        blocks: Returns the lines and tables; default: the report's.

    Raises:
        CkptError: It cannot be written.
    """
    context = click.get_current_context()
    if OUTPUT in context.meta:
        context.meta[OUTPUT].show(report, context)
    elif is_given(JSON):
        print_json(report if plain is None else plain())
    else:
        print_blocks(report.blocks() if blocks is None else blocks())


def is_text() -> bool:
    """Return whether ``show`` prints lines and tables."""
    return not is_given(JSON) and not is_given(OUTPUT)


def print_blocks(blocks: Iterable[Block]) -> None:
    """Print lines, facts and tables."""
    for block in blocks:
        if isinstance(block, Line):
            print_line(block.text, color=block.color)
        elif isinstance(block, Table):
            _print_table(block)
        else:
            _print_facts(block)


def _print_table(table: Table) -> None:
    """Print a table: whole into a file or pipe and with ``--wide``, else in the width of the terminal."""
    width, less = terminal_width(), []
    if width and not is_wide():
        from rich.cells import cell_len  # only terminals need it

        shown = table.head()
        lines, shortened = shown.fitted(width, cell_len)
        less += [f"first {len(shown.rows)} of {len(table.rows):,} rows"] if len(shown.rows) < len(table.rows) else []
        less += [f"shortened to {width} columns"] if shortened else []
    else:
        lines = table.lines()
    if is_colored():
        lines[0] = click.style(lines[0], bold=True)
    _print("".join(f"{line}\n" for line in lines))
    if less:
        print_line(f"{', '.join(less)}; --wide prints all", color="bright_black")


def _print_facts(facts: Facts) -> None:
    """Print labels and values, which wrap in the width of the terminal."""
    start, width = facts.start(), terminal_width() if not is_wide() else 0
    for label, value in facts.shown():
        # A path is not broken, so that it can be copied: the terminal wraps it.
        wrapped = textwrap.wrap(value, max(width - start, 20), break_on_hyphens=False, break_long_words=False)
        lines = wrapped if width else [value]
        shown = click.style(label, bold=True) if is_colored() else label
        _print(shown + " " * (start - len(label)) + f"\n{' ' * start}".join(lines) + "\n")


def is_wide() -> bool:
    """Return whether the command has the option ``--wide``."""
    return is_given(WIDE)


def is_given(key: str) -> bool:
    """Return whether the context of the command has an option, by its key."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(key))


def _print(text: str) -> None:
    """Write a text for people."""
    if not is_given(QUIET):
        write(text)


def print_line(text: str, *, color: str | None = None) -> None:
    """Print one line, coloured on a terminal."""
    text = printable(text, 0)
    colored = color and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    _print((click.style(text, fg=color) if colored else text) + "\n")


def print_json(data: Any) -> None:
    """Print a mapping or a dataclass of plain values as a JSON object; the keys of a dataclass are its field names."""
    import json  # tables do not need it

    from ckpttool.analysis.json_report import JSON_VERSION, as_plain

    write(json.dumps({"version": JSON_VERSION, **as_plain(data)}, indent=2, allow_nan=False) + "\n")


def write(text: str | bytes) -> None:
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
    if is_given(QUIET):
        yield lambda done, total: None
    elif sys.stderr.isatty():
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
            bar = _started_bar(what, total)
        bar.update(bar.task_ids[0], completed=done, total=total)

    try:
        yield tell
    finally:
        if bar is not None:
            bar.stop()


def _started_bar(what: str, total: int) -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (what, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(what, total=total)
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
