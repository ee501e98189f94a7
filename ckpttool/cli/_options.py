"""Options that several commands share."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ckpttool.dtypes import short_name
from ckpttool.errors import ArgumentError, CkptError
from ckpttool.messages import brief
from ckpttool.options import OPTIONS
from ckpttool.registry import actions, imported, options_of
from ckpttool.units import parse_duration, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpttool.options import Option

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
            if str(value).strip().replace(".", "", 1).isdecimal() and float(str(value)):
                self.fail(f"{value!r} has no unit; write {value}d, {value}h, {value}min or {value}s", param, ctx)
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


class Dtype(click.Choice[str]):
    """A type of weights; torch's names mean the short ones."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the short name; fail as wrong usage."""
        return super().convert(short_name(value), param, ctx)


class Command(click.Command):
    """A command whose help lists its own options first, then sections of others, and rare ones last.

    It has the options of all commands, and the options of extensions.
    """

    def __init__(self, *args: Any, page: str = "", examples: tuple[str, ...] = (), **given: Any) -> None:
        """Take the page and the examples of the help, of a command that ``_examples`` does not have."""
        super().__init__(*args, **given)
        self.page, self.examples = page, examples
        self.params = [*self.params, *_OF_ALL]
        self.added = options_of(self.name or "")
        for option in self.added:
            names = [one.name for one in self.params]
            place = names.index(option.after) + 1 if option.after else len(names)
            self.params.insert(place, click.Option(**_arguments(option)))

    def invoke(self, ctx: click.Context) -> Any:
        """Call the function of the command, whose report an option of an extension may write elsewhere."""
        for option in (one for one in self.added if not one.before):
            value = ctx.params.pop(option.name)
            if value and option.sets:
                ctx.params[option.sets] = value
            elif value is not None and not option.sets:
                ctx.meta[OUTPUT] = imported(option.code)(value)
                ctx.invoke(ctx.meta[OUTPUT].check, ctx)
        return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments; name all missing ones at once."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter:
            values = self.make_parser(ctx).parse_args(given)[0]
            required = (one for one in self.get_params(ctx) if one.required and one.resolve_envvar_value(ctx) is None)
            missing = [one for one in required if not isinstance(values.get(one.name or ""), (str, tuple))]
            if len(missing) < 2:
                raise
            names = " and ".join(f"{one.param_type_name} {one.get_error_hint(ctx)}" for one in missing)
            raise click.UsageError(f"Missing {names}.", ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections."""
        titles = {name: title for title, names in SECTIONS.items() for name in names}
        titles |= {option.name: option.section for option in (*_ROWS.values(), *self.added)}
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in SECTIONS}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if record is not None:
                sections[titles.get(option.name or "", "Options")].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, and the address of the page."""
        from ckpttool.cli._examples import DOCS, EXAMPLES

        page, lines = EXAMPLES.get(self.name or "", (self.page, self.examples))
        with formatter.section("Examples"):
            for line in lines:
                formatter.write(f"  {line}\n")
        formatter.write(f"\nMore: {DOCS}/{page}.html\n")


_ROWS = {row.name: row for row in OPTIONS if row.help}
"""The rows of commands, by name."""


def shared(*names: str) -> Callable[[F], F]:
    """Add options that several commands have, by the names of their rows."""

    def add(function: F) -> F:
        for name in reversed(names):
            given = _arguments(_ROWS[name])
            function = click.option(*given.pop("param_decls"), **given)(function)
        return function

    return add


def _arguments(row: Option) -> dict[str, Any]:
    """Return the arguments of ``click.Option`` for a row."""
    flag = f"--{(row.singular or row.name).replace('_', '-')}"
    given: dict[str, Any] = {"param_decls": [flag, row.name], "help": row.help, "metavar": row.metavar}
    if row.annotation.startswith("bool"):
        given |= {"is_flag": True, "default": row.default}
    if row.annotation.startswith("Sequence") or row.singular:
        given["multiple"] = True
    if isinstance(row.choices, range):
        given["type"] = click.IntRange(row.choices[0], row.choices[-1])
    elif row.choices:
        given["type"] = click.Choice(row.choices)
    elif row.annotation.startswith("int"):
        given["type"] = SizeType() if row.annotation.startswith("int | str") else click.IntRange(1)
    if row.parser:
        given["callback"] = partial(_parsed, row.parser)
    if row.metavar == "TAG":
        given["shell_complete"] = complete_tags
    if row.envvar:
        given |= {"envvar": row.envvar, "show_envvar": True}
    return given


def _parsed(parser: str, _: click.Context, parameter: click.Parameter, text: Any) -> Any:
    """Make the value of an option by its parser; fail as wrong usage."""
    if text is None:
        return None
    try:
        return imported(parser)(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param=parameter) from None


SECTIONS: dict[str, tuple[str, ...]] = {
    "Options": (),
    "The run that will load it": (
        "world_size", "stage", "sub_group_size", "round_robin", "expert_parallel", "layout", "buffers",
    ),
    "Choice of tensors": ("exclude_frozen", "optimizer"),
    "LoRA": ("adapter_only",),
    "Names": ("rename", "rename_map"),
    "Output": (),
    "Resources": (),
    "Messages": ("as_json", "wide", "quiet", "verbose", "debug", "help"),
    "Rare": ("part",),
}  # fmt: skip
"""Titles of the sections in a command's help, and their options without a row; the first has all others."""
OPENING = ("tag", "trust_names", "storage_options", "follow_links")
"""Parameters of ``ckpttool.inspect``."""
_PARTS = "ckpttool.parts"
"""Key of ``--part`` in a command's context."""
JSON = "ckpttool.json"
"""Key of ``--json``."""
OUTPUT = "ckpttool.output"
"""Key of the output of an extension."""
QUIET = "ckpttool.quiet"
"""Key of ``--quiet``."""
WIDE = "ckpttool.wide"
"""Key of ``--wide``."""


def _note(key: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    """Return a callback that keeps the value of an option in the context, for the callback of another one."""

    def note(context: click.Context, _: click.Parameter, value: Any) -> None:
        context.meta[key] = value

    return note


def _source(context: click.Context, _: click.Parameter, value: str) -> str | tuple[str, ...]:
    return (value, *context.meta[_PARTS]) if context.meta[_PARTS] else value


def _sources(context: click.Context, _: click.Parameter, values: tuple[str, ...]) -> tuple[str | tuple[str, ...], ...]:
    if not context.meta[_PARTS]:
        return values
    if len(values) > 1:
        raise click.UsageError("--part is for a single SRC")
    return ((*values, *context.meta[_PARTS]),)


def _part_option(function: F) -> F:
    return click.option(
        "--part",
        multiple=True,
        metavar="DIR",
        is_eager=True,  # before SRC
        expose_value=False,
        callback=_note(_PARTS),
        help="Directory with the files of further ranks of SRC, from the disk of another node (repeatable).",
    )(function)


def source_argument(function: F) -> F:
    """Add SRC, one checkpoint, and ``--part`` for the directories of other nodes."""
    return click.argument("src", type=click.Path(readable=False), callback=_source)(_part_option(function))


def sources_argument(function: F) -> F:
    """Add SRC..., several checkpoints, and ``--part`` for the directories of other nodes if there is only one."""
    argument = click.argument(
        "src", type=click.Path(readable=False), nargs=-1, required=True, metavar="SRC...", callback=_sources
    )
    return argument(_part_option(function))


def complete_tags(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the tags of SRC that begin with a text."""
    import ckpttool

    with contextlib.suppress(CkptError):
        return [one.name for one in ckpttool.ls(_given_source(ctx)).entries if one.name.startswith(incomplete)]
    return []


def complete_names(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of the parameters and buffers of SRC that begin with a text."""
    import ckpttool

    with contextlib.suppress(CkptError):
        found = ckpttool.inspect(_given_source(ctx))
        names = [*(p.name for p in found.parameters), *(b.name for b in found.buffers), *found.aliases]
        return [name for name in names if name.startswith(incomplete)]
    return []


def _given_source(ctx: click.Context) -> str:
    """Return SRC, the first word after the command: click does not parse words before an option without its value."""
    words = shlex.split(os.environ.get("COMP_WORDS", ""))[len(ctx.command_path.split()) :]
    return os.path.expanduser(next((word for word in words if not word.startswith("-")), ""))


out_argument = click.argument("out", type=click.Path(readable=False))


def parse_storage_options(values: tuple[str, ...]) -> dict[str, Any] | None:
    """Parse KEY=VALUE pairs into fsspec options; dots make nested dictionaries.

    Raises:
        ValueError: One is not KEY=VALUE, or two exclude each other.
    """
    result: dict[str, Any] = {}
    for text in values:
        path, equals, value = text.partition("=")
        *outer, key = path.split(".")
        if not equals or not all((*outer, key)):
            # The message leaves out the value, which may be a secret.
            raise ValueError("one of them is not KEY=VALUE")
        into = result
        for name in outer:
            into = into.setdefault(name, {})
            if not isinstance(into, dict):
                raise ValueError(f"{path} and {name} cannot both be given")  # noqa: TRY004  of a text
        into[key] = _parsed_option(key, value)
    return result or None


def _parsed_option(key: str, value: str) -> Any:
    """Parse numbers and truth values; user names and secrets are always text."""
    if key in {"key", "secret", "token", "username", "password", "account_name", "account_key"}:
        return value
    if value in {"true", "false", "null"} or re.fullmatch(r"-?\d+", value):
        import json  # hardly any command needs it

        return json.loads(value)
    return value


def _log(_: click.Context, __: click.Parameter, count: int) -> None:
    """Write the log of ckpttool to stderr: once its steps, twice each request and file."""
    if count:
        import logging

        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        log = logging.getLogger("ckpttool")
        log.addHandler(handler)
        log.setLevel(logging.INFO if count == 1 else logging.DEBUG)


_UNEXPOSED: dict[str, Any] = {"is_flag": True, "expose_value": False}
_OF_ALL = (
    click.Option(["--json", "as_json"], callback=_note(JSON), help="Print JSON for programs.", **_UNEXPOSED),
    click.Option(["--wide"], callback=_note(WIDE), help="Print tables whole on a terminal, too.", **_UNEXPOSED),
    *(click.Option(**_arguments(_ROWS[name])) for name in ("storage_options", "follow_links")),
    click.Option(["-q", "--quiet"], callback=_note(QUIET), help="Print errors and --json alone.", **_UNEXPOSED),
    click.Option(["-v", "--verbose"], count=True, expose_value=False, callback=_log, help="Log to stderr; -vv more."),
    click.Option(["--debug"], help="Show the traceback of an error.", **_UNEXPOSED),
)
"""The options of all commands: of storages, of opening and of printing."""
RETENTION = ("keep_last", "keep_every", "keep_best", "keep_for", *(rule for one in actions() for rule in one.rules))
"""The retention rules of ``prune``, also of the actions of extensions."""


def chosen(options: dict[str, Any]) -> dict[str, Any]:
    """Return the given options; the library has the defaults of the others."""
    return {name: value for name, value in options.items() if value is not None}
