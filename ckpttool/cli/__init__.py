"""The command line: parse, call ``ckpttool``'s function of the same name, print its result."""

from __future__ import annotations

import gc
import importlib
import io
import os
import sys
from typing import Any

import click

from ckpttool._version import __version__
from ckpttool.cli._errors import run_command
from ckpttool.registry import EXTENSIONS, with_extensions

_CORE: dict[str, dict[str, tuple[str, ...]]] = {
    "Look": {"reading": ("inspect", "verify", "diff", "digest")},
    "Export": {"writing": ("consolidate",), "reading": ("extract",)},
    "Resume": {"writing": ("convert",)},
    "Keep": {"keeping": ("ls", "prune", "pin", "unpin"), "writing": ("cp",)},
    "Shell": {"completion": ("completion",)},
}
"""The commands of the core, by section of the help and module of this package."""
SECTIONS = with_extensions(
    {
        section: {command: f"{__name__}.{module}" for module, commands in modules.items() for command in commands}
        for section, modules in _CORE.items()
    }
)
"""The modules of all commands, by section of the help and command."""
MEANT = {
    "export": "consolidate", "merge": "consolidate", "load": "consolidate", "check": "verify", "show": "inspect",
    "info": "inspect", "compare": "diff", "list": "ls", "copy": "cp", "rm": "prune", "clean": "prune",
    "reshard": "convert", "universal": "convert", "hash": "digest",
    **{word: command.name for extension in EXTENSIONS for command in extension.commands for word in command.words},
}  # fmt: skip
"""The command for a word that other tools use."""
COMMANDS = {command: module for commands in SECTIONS.values() for command, module in commands.items()}
GC_OBJECTS = 100_000
"""Allocations of containers between two garbage collections."""


class _Commands(click.Group):
    """Imports the module of a command when it is called: start-up takes half of the time of a small command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by section."""
        for section, names in SECTIONS.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(section):
                formatter.write_dl([(name, command.get_short_help_str(100)) for name, command in commands if command])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command of some arguments; ``help`` means ``--help``. A mistyped name gets a suggestion."""
        if ctx.resilient_parsing and args[0] not in COMMANDS:  # the completion of a shell, also after ``help``
            return None, None, []
        if args[0] == "help":
            args = [*args[1:2], "--help"]
        if args[0] == "--help":
            click.echo(ctx.get_help())
            ctx.exit()
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            from ckpttool.messages import brief, similar

            hint = f"did you mean {MEANT[args[0]]}?" if args[0] in MEANT else similar(args[0], COMMANDS).strip()
            raise click.UsageError(f"no command {brief(args[0])}; {hint or 'see ckpttool --help'}", ctx)
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name, of ckpttool or else of another package; None if there is none."""
        if cmd_name not in COMMANDS:
            from ckpttool.other_packages import find_command

            found = find_command(cmd_name, click.Command)
            return None if found is None else _naming_its_package(*found)
        command: click.Command = getattr(importlib.import_module(COMMANDS[cmd_name]), cmd_name)
        return command


def _naming_its_package(command: click.Command, code: str) -> click.Command:
    """Return the command of another package, whose errors name the package."""
    from ckpttool.other_packages import naming

    invoke = command.invoke

    def named(ctx: click.Context) -> Any:
        with naming(code, command.name or "", click.ClickException, click.exceptions.Exit, click.Abort, SystemExit):
            return invoke(ctx)

    command.invoke = named  # type: ignore[method-assign]
    return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, "-V", "--version", package_name="ckpttool")
def cli() -> None:
    """Inspect, verify and convert sharded checkpoints (DeepSpeed ZeRO, FSDP2), without torch or running their code.

    SRC is a checkpoint root (with a file named latest), a tag's directory, a Hugging Face Trainer's checkpoint-N, a
    universal checkpoint, a directory of torch.distributed.checkpoint, the files or the run of verl, Accelerate or
    torchtitan, or safetensors. Sources and outputs may be URLs: s3://, gs://, az:// or any other scheme of fsspec.

    \b
    Exit codes:
    0    done; diff: equal; verify: sound
    1    diff: different; verify: damaged
    2    wrong usage
    3    failed: a bad checkpoint, or the operation
    130  interrupted
    """  # noqa: D301  click reads the backspace


def main() -> None:
    """Entry point of the ``ckpttool`` command."""
    # numpy would start a pool of threads for linear algebra, which takes a third of the start-up time and is not used.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Imports allocate many objects and no garbage: with the default of 700, collections take 5 % of a small command.
    gc.set_threshold(GC_OBJECTS)
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Characters that the terminal's encoding lacks are escaped.
        sys.stdout.reconfigure(errors="backslashreplace")
    run_command(cli)


def _open_closed_streams() -> None:
    """Open /dev/null as each standard stream that is closed (``>&-``).

    Otherwise the next opened file, perhaps an output, would get its number, and libraries would print into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False))
