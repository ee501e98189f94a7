"""Errors as one line on stderr and an exit code: 2 for wrong usage, FAILED for a failure, INTERRUPTED."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import click

from ckpttool._version import __version__
from ckpttool.errors import ArgumentError, CkptError
from ckpttool.messages import brief, hide_secrets, printable, short_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import FrameType

USAGE = 2
"""Exit code of wrong usage, as click has it."""
FAILED = 3
"""Exit code of a failure: 1 means that ``diff`` found a difference, or ``verify`` damage."""
INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM, as in shells."""
ISSUES = "https://github.com/ckpttool/ckpttool/issues"
"""Where to report a bug."""
EXIT_WORK = ("fsspec", "ray", "torch", "coverage", "multiprocessing")
"""Packages that register functions for the end of the process."""
FLAGS = {"storage_options": "storage_option", "buffers": "buffer"}
"""Options whose name differs from the parameter's."""
POSITIONAL = frozenset({"src", "out", "root"})
"""Parameters without a flag: the usage line shows them in capitals."""


def run_command(command: click.Command) -> NoReturn:
    """Run the command line and end the process."""
    arguments = sys.argv[1:]
    looks = arguments[:1] == ["inspect"] and not any("://" in argument for argument in arguments)
    if not looks and arguments and {"--help", "-h"}.isdisjoint(arguments):
        _silence_logs()  # help, and to look at local files, import no library that logs, and should start fast
    # SIGTERM ends the command like Ctrl-C, so that half-written output is removed.
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code = invoke(command, arguments)
    except Exception as error:
        _print_bug(error)
        code = FAILED
    _leave(code)


def _silence_logs() -> None:
    """Drop the log lines of libraries, which would hide the error's one line."""
    import logging

    logging.getLogger().addHandler(logging.NullHandler())


def _leave(code: int) -> NoReturn:
    """End the process; a local command skips the destruction of modules, which takes 20 ms with numpy.

    Python exits normally if a library, a thread or a profiler may have work to do at the end.
    """
    libraries = not sys.modules.keys().isdisjoint(EXIT_WORK)
    if libraries or threading.active_count() > 1 or sys.gettrace() or sys.getprofile():
        sys.exit(code)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        sys.exit(code)
    os._exit(code)


def invoke(command: click.Command, arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code; after a failure, name packages whose extensions have problems."""
    code = _code_of(command, arguments)
    if code and (others := sys.modules.get("ckpttool.other_packages")) is not None:
        for problem in others.problems():
            click.echo(f"note: {problem}", err=True)
    return code


def _code_of(command: click.Command, arguments: Sequence[str]) -> int:
    try:
        code = _run(command, arguments)
    except click.ClickException as error:
        if "--json" in arguments and isinstance(error, click.UsageError):
            from ckpttool.cli._output import print_json

            usage = error.ctx.command_path if error.ctx is not None else "ckpttool"
            print_json({"error": error.format_message(), "path": usage, "hint": f"see {usage} --help"})
        click.echo(hide_secrets(_shown(error)), err=True, nl=False)
        return error.exit_code if isinstance(error, click.UsageError) else FAILED
    except SystemExit as end:  # of click, after a completion, or for a closed pipe on the standard output
        return FAILED if end.code else 0
    except CkptError as error:
        # prune prints its decisions as JSON before it fails.
        if "--json" in arguments and not getattr(error, "decisions", ()):
            from ckpttool.cli._output import print_json

            hint = hint_with_flags(error.hint, error.options)
            print_json({"error": short_words(printable(error.problem)), "path": _shown_path(error), "hint": hint})
        if "--debug" in arguments:
            import traceback

            click.echo(hide_secrets(traceback.format_exc()), err=True, nl=False)
        else:
            click.echo(f"Error: {with_flags(error)}", err=True)
        return USAGE if isinstance(error, ArgumentError) else FAILED
    except (click.Abort, KeyboardInterrupt):
        click.echo("Error: interrupted; nothing was left half-written", err=True)
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def _run(command: click.Command, arguments: Sequence[str]) -> object:
    try:
        # Not standalone, click returns the code of an Exit instead of raising it.
        return command.main(list(arguments), prog_name="ckpttool", standalone_mode=False)
    except (MemoryError, OSError, RuntimeError) as error:
        no_thread = "can't start new thread" in str(error)
        if isinstance(error, MemoryError) or getattr(error, "errno", 0) == errno.ENOMEM or no_thread:
            problem = f"is not enough ({brief(str(error) or type(error).__name__)})"
            raise CkptError("memory", problem, "free some, or use fewer jobs", ("jobs",)) from error
        try:
            os.getcwd()  # relative paths need it
        except FileNotFoundError:
            raise CkptError("working directory", "was removed", "change to another directory") from error
        raise


def with_flags(error: CkptError) -> str:
    """Return the line of an error, with flags of the command line in place of the parameters in its hint."""
    line = str(error)
    if isinstance(error, ArgumentError):
        line = _shown_path(error) + line.removeprefix(error.path)
    hint = printable(error.hint)
    return line.removesuffix(hint) + hint_with_flags(hint, error.options)


def _shown_path(error: CkptError) -> str:
    """Return the path of an error; of an argument its flag, or its name in the usage line."""
    if not isinstance(error, ArgumentError):
        return error.path
    return error.path.upper() if error.path in POSITIONAL else _flag(error.path)


def hint_with_flags(hint: str, options: Iterable[str]) -> str:
    """Return a hint with flags of the command line in place of the parameters ``options``."""
    for name in options:
        hint = _parameter(name).sub(partial(_as_flag, name), hint)
    return hint


def _parameter(name: str) -> re.Pattern[str]:
    """Return a pattern for a parameter in a hint, alone or with its value: ``overwrite=True``, ``to="zero"``."""
    return re.compile(rf'\b{name}\b(?:=True\b|="([^"]*)")?')


def _as_flag(name: str, found: re.Match[str]) -> str:
    return _flag(name) if found[1] is None else f"{_flag(name)} {found[1]}"


def _flag(name: str) -> str:
    return f"--{FLAGS.get(name, name).replace('_', '-')}"


def _shown(error: click.ClickException) -> str:
    import io

    text = io.StringIO()
    error.show(text)
    return text.getvalue()


def _print_bug(error: Exception) -> None:
    """Print the traceback of a bug without secrets: users paste it into public reports."""
    import traceback

    sys.stderr.write(hide_secrets("".join(traceback.format_exception(error))))
    sys.stderr.write(f"Error: this is a bug in ckpttool {__version__}; report it with the lines above: {ISSUES}\n")


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
