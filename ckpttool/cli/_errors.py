"""Where errors become one line on stderr and an exit code: 1 for a bad checkpoint or a failure, 2 for wrong usage."""

from __future__ import annotations

import logging
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

import click

from ckpttool.errors import CkptError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM, as shells have it."""


def run(command: click.Command) -> NoReturn:
    """Run the command line and leave."""
    # What libraries log on the way to an error would hide the one line that says it.
    logging.getLogger().addHandler(logging.NullHandler())
    # Being told to stop must take the same way out as Ctrl-C, so that half-written output is removed.
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(invoke(command, sys.argv[1:]))


def invoke(command: click.Command, arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code."""
    try:
        # Not standalone, click returns the code of an Exit instead of raising it.
        code = command.main(list(arguments), prog_name="ckpttool", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except CkptError as error:
        if "--debug" in arguments:
            raise
        click.echo(f"Error: {error}", err=True)
        return 1
    except (click.Abort, KeyboardInterrupt):
        click.echo("Error: interrupted; nothing was left half-written", err=True)
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
