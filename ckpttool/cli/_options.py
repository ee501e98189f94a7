"""Options that several commands share."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ckpttool.budget import OPTION
from ckpttool.errors import ArgumentError
from ckpttool.messages import brief
from ckpttool.storage.base import FOLLOW_LINKS
from ckpttool.units import parse_duration, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable

_FOLLOW_LINKS = "ckpttool.follow_links"
"""Key of ``--follow-links`` in a command's context."""
_OPEN_BUDGET = "ckpttool.open_budget"
"""Key of ``--open-budget``."""
_NO_CHECK = "ckpttool.no_check"
"""Key of ``--no-check``."""
F = TypeVar("F", bound="Callable[..., Any]")
if TYPE_CHECKING:
    _IntegerType = click.ParamType[int]
    _FloatType = click.ParamType[float]
else:  # click before 8.4 cannot subscript it
    _IntegerType = _FloatType = click.ParamType


class Duration(_FloatType):
    """A duration such as 7d."""

    name = "DURATION"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse a duration; fail as wrong usage."""
        try:
            return parse_duration(str(value))
        except ArgumentError as error:
            self.fail(f"{brief(value)} is not a duration: {error.hint}", param, ctx)


class SizeType(_IntegerType):
    """A size such as 5GB."""

    name = "SIZE"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse a size; fail as wrong usage."""
        try:
            return parse_size(str(value))
        except ArgumentError as error:
            self.fail(f"{brief(value)} is not a size: {error.hint}", param, ctx)


sources_argument = click.argument("src", type=click.Path(), nargs=-1, required=True, metavar="SRC...")
out_argument = click.argument("out", type=click.Path())
tag_option = click.option("--tag", metavar="TAG", help="Tag of the checkpoint in a root.  [default: the tag in latest]")
trust_option = click.option(
    "--trust-names", is_flag=True, help="Accept files whose content names another file name, after a deliberate rename."
)
include_option = click.option(
    "--include", multiple=True, metavar="GLOB", help="Only parameters whose name matches (repeatable)."
)
exclude_option = click.option(
    "--exclude", multiple=True, metavar="GLOB", help="No parameters whose name matches (repeatable)."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
memory_option = click.option(
    "--memory", type=SizeType(), help="Memory for requests in flight to or from remote storages.  [default: 256MB]"
)
dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Print the planned files and what the run needs, and write nothing."
)
resume_option = click.option(
    "--resume", is_flag=True, help="Continue from the files that a killed run with --resume and the same SRC completed."
)
jobs_option = click.option(
    "--jobs",
    type=click.IntRange(1, 256),
    help="Threads.  [default: one per core (at most 4), 16 for remote storages]",
)


ray_option = click.option(
    "--ray",
    is_flag=False,
    flag_value="",
    metavar="[ADDRESS]",
    help="Spread the work over a Ray cluster: the one at ADDRESS, or the one that Ray finds, or a new one on this "
    "machine. Without ADDRESS, --ray must be the last option.",
)


def _storage_options(context: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, Any] | None:
    """Parse KEY=VALUE pairs into fsspec options; dots make nested dictionaries."""
    result: dict[str, Any] = {}
    for text in values:
        path, equals, value = text.partition("=")
        *outer, key = path.split(".")
        if not equals or not all((*outer, key)):
            # The message leaves out the value, which may be a secret.
            raise click.BadParameter("one of them is not KEY=VALUE")
        into = result
        for name in outer:
            into = into.setdefault(name, {})
            if not isinstance(into, dict):
                raise click.BadParameter(f"{path} and {name} cannot both be given")
        into[key] = _parsed_option(key, value)
    if context.meta.get(_FOLLOW_LINKS):
        result[FOLLOW_LINKS] = True
    if context.meta.get(_OPEN_BUDGET) is not None:
        result[OPTION] = context.meta[_OPEN_BUDGET]
    return result or None


def _open_budget(context: click.Context, _: click.Parameter, value: float | None) -> None:
    context.meta[_OPEN_BUDGET] = value


def _follow_links(context: click.Context, _: click.Parameter, value: bool) -> None:
    context.meta[_FOLLOW_LINKS] = value


def _parsed_option(key: str, value: str) -> Any:
    """Parse numbers and truth values; user names and secrets are always text."""
    if key in {"key", "secret", "token", "username", "password", "account_name", "account_key"}:
        return value
    if value in {"true", "false", "null"} or re.fullmatch(r"-?\d+", value):
        import json  # hardly any command needs it

        return json.loads(value)
    return value


def storage_option(function: F) -> F:
    """Add ``--storage-option``, ``--follow-links`` and ``--open-budget``: options of a storage."""
    function = click.option(
        "--open-budget",
        type=click.FloatRange(min=0, min_open=True),
        metavar="FACTOR",
        is_eager=True,
        expose_value=False,
        callback=_open_budget,
        help="Multiply the memory and time that opening a checkpoint may take.  [default: 1]",
    )(function)
    function = click.option(
        "--follow-links",
        is_flag=True,
        is_eager=True,  # before --storage-option, whose callback reads it
        expose_value=False,
        callback=_follow_links,
        help="Follow links in a checkpoint out of its root, to any file that you may read.",
    )(function)
    return click.option(
        "--storage-option",
        "storage_options",
        multiple=True,
        metavar="KEY=VALUE",
        callback=_storage_options,
        help="Option of the fsspec class of a URL, such as endpoint_url=http://host:9000 (repeatable).",
    )(function)


def html_options(function: F) -> F:
    """Add ``--html``, and ``--overwrite`` for the page."""
    function = click.option("--overwrite", is_flag=True, help="Replace the page if it is there.")(function)
    return click.option(
        "--html",
        metavar="FILE",
        help="Write a page for a browser: one file, which needs no network (-: to the standard output).",
    )(function)


RETENTION = ("keep_last", "keep_every", "keep_best", "keep_for", "thin", "thin_every")
"""Options of ``retention_options``."""


def retention_options(function: F) -> F:
    """Add the retention rules, RETENTION."""
    rules = (
        click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help="Keep the N newest."),
        click.option(
            "--keep-every", type=click.IntRange(min=1), metavar="K", help="Keep those whose step is a multiple of K."
        ),
        click.option(
            "--keep-best",
            metavar="METRIC",
            help="Keep the one saved with the smallest METRIC (METRIC:max: the largest; METRIC:min:3: the three "
            "smallest).",
        ),
        click.option("--keep-for", type=Duration(), metavar="AGE", help="Keep those younger than AGE: 7d, 12h, 30min."),
        click.option(
            "--thin",
            type=click.Choice(["bf16", "fp32"]),
            help="Keep the weights of those that no rule keeps, in this type; only their optimizer states go.",
        ),
        click.option(
            "--thin-every",
            type=click.IntRange(min=1),
            metavar="K",
            help="Thin only those whose step is a multiple of K, and remove the others.  [default type: bf16]",
        ),
    )
    for rule in reversed(rules):
        function = rule(function)
    return function


def page_of(given: dict[str, Any], as_json: bool, *others: str) -> dict[str, Any]:
    """Take the options of a page out of those of a command.

    Args:
        given: Options of the command; those of the page are removed.
        as_json: Whether JSON is asked for.
        others: Further options that only the page has.

    Raises:
        click.UsageError: One of them is given without ``--html``, or JSON is asked for as well.
    """
    page = {name: given.pop(name) for name in ("html", "overwrite", *others)}
    for name in ("overwrite", *others):
        if page["html"] is None and page[name] not in {None, False}:
            raise click.UsageError(f"--{name.replace('_', '-')} is for --html")
    if page["html"] is not None and as_json:
        raise click.UsageError("choose one of --html and --json")
    return page


def check_page(page: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuse a page that must not be written, before any work is done.

    Raises:
        StorageError: The file exists.
    """
    if page["html"] is None:
        return
    from ckpttool.api._pages import STDOUT
    from ckpttool.api._pages import check_page as check

    if page["html"] == STDOUT and sys.stdout.isatty():
        raise click.UsageError("--html - writes to the standard output: redirect it to a file")

    check(page["html"], overwrite=page["overwrite"], storage_options=given["storage_options"])


def _no_check(context: click.Context, _: click.Parameter, value: bool) -> None:
    context.meta[_NO_CHECK] = value


def _check(context: click.Context, _: click.Parameter, value: str | None) -> str | None:
    if not context.meta[_NO_CHECK]:
        return value
    if value not in {None, "off"}:
        raise click.UsageError(f"--check {value} and --no-check contradict each other")
    return "off"


def check_options(function: F) -> F:
    """Add ``--check``, and ``--no-check`` for ``--check off``."""
    function = click.option(
        "--no-check",
        is_flag=True,
        is_eager=True,  # before --check
        expose_value=False,
        callback=_no_check,
        help="Compare no checksums.",
    )(function)
    return click.option(
        "--check",
        type=click.Choice(["read", "full", "off"]),
        callback=_check,
        help="Compare the CRC-32 of records read whole (read), or also of those read in part (full).  [default: read]",
    )(function)


def debug_option(function: F) -> F:
    """Add ``--debug``; ``_errors`` reads it from the arguments."""
    help_text = "Show the traceback of an error."
    return click.option("--debug", is_flag=True, expose_value=False, help=help_text)(function)


def common_options(function: F) -> F:
    """Add the options of all commands: of storages, and ``--debug``."""
    return storage_option(debug_option(function))


def run_options(function: F) -> F:
    """Add the options of commands that run a plan: ``--jobs``, ``--memory`` and ``--ray``."""
    return jobs_option(memory_option(ray_option(function)))


def chosen(options: dict[str, Any]) -> dict[str, Any]:
    """Return the given options; the library has the defaults of the others."""
    return {name: value for name, value in options.items() if value is not None}
