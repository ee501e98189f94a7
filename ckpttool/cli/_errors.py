"""Where errors become one line on stderr and an exit code: 1 for a bad checkpoint or a failure, 2 for wrong usage."""

from __future__ import annotations

import logging
import signal
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

import click

from ckpttool.errors import CkptError
from ckpttool.messages import hide_secrets

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType, TracebackType

INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM, as shells have it."""


def run(command: click.Command) -> NoReturn:
    """Run the command line and leave."""
    # What libraries log on the way to an error would hide the one line that says it.
    logging.getLogger().addHandler(logging.NullHandler())
    # Being told to stop must take the same way out as Ctrl-C, so that half-written output is removed.
    signal.signal(signal.SIGTERM, _terminate)
    sys.excepthook = _tell_bug
    sys.exit(invoke(command, sys.argv[1:]))


def invoke(command: click.Command, arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    try:
        # Not standalone, click returns the code of an Exit instead of raising it.
        code = command.main(list(arguments), prog_name="ckpttool", standalone_mode=False)
    except click.ClickException as error:
        click.echo(hide_secrets(_shown(error)), err=True, nl=False)
        return error.exit_code
    except CkptError as error:
        if "--debug" in arguments:
            click.echo(hide_secrets(traceback.format_exc()), err=True, nl=False)
            return 1
        click.echo(f"Error: {error}", err=True)
        return 1
    except (click.Abort, KeyboardInterrupt):
        click.echo("Error: interrupted; nothing was left half-written", err=True)
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def _shown(error: click.ClickException) -> str:
    import io

    text = io.StringIO()
    error.show(text)
    return text.getvalue()


def _tell_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What a bug of ckpttool's leaves behind: its traceback, which people paste where others read it."""
    sys.stderr.write(hide_secrets("".join(traceback.format_exception(kind, error, trace))))


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
