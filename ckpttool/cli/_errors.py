"""Where errors become one line on stderr and an exit code: 1 for a bad checkpoint or a failure, 2 for wrong usage."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

import click

from ckpttool.errors import CkptError

if TYPE_CHECKING:
    from types import FrameType


def run(command: click.Command) -> NoReturn:
    """Run the command line and leave."""
    # Being told to stop must take the same way out as Ctrl-C, so that half-written output is removed.
    signal.signal(signal.SIGTERM, _terminate)
    try:
        command(standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except CkptError as error:
        if "--debug" in sys.argv:
            raise
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    except (click.Abort, KeyboardInterrupt):
        click.echo("Error: interrupted; nothing is left of the output", err=True)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of a pipe has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    sys.exit(0)


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
