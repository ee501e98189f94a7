"""Options that several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")

src_argument = click.argument("src", type=click.Path())
out_argument = click.argument("out", type=click.Path())
tag_option = click.option("--tag", metavar="TAG", help="Which checkpoint of a root.  [default: the one latest names]")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
jobs_option = click.option(
    "--jobs",
    type=click.IntRange(1, 256),
    help="Threads.  [default: one for copying, one a core for the rest, at most 4]",
)


def debug_option(function: F) -> F:
    """Add ``--debug``, which ``_errors`` looks for."""
    help_text = "Show the traceback of an error."
    return click.option("--debug", is_flag=True, expose_value=False, help=help_text)(function)


def chosen(**options: object) -> dict[str, Any]:
    """Options that were given: what was not keeps the library's default, which is written there alone."""
    return {name: value for name, value in options.items() if value is not None}
