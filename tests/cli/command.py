"""Run the command line in this process, or in a separate one."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import json
import os
import pty
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ckpttool.cli import cli
from ckpttool.cli._errors import FAILED, invoke
from ckpttool.registry import EXTENSIONS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NOBODY = 65534


def _needs_only_src(name: str) -> bool:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return [parameter.name for parameter in command.params if parameter.required] == ["src"]


EXTENSIONS_READING = [c.name for e in EXTENSIONS for c in e.commands if _needs_only_src(c.name)]
"""Commands of extensions that need a checkpoint and nothing else."""


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    """Its exit code."""
    stdout: str
    """What it printed."""
    stderr: str
    """What it said about how it went."""

    @property
    def error(self) -> str:
        """The only line on stderr, of a command that failed as it should: no result, no traceback."""
        of_argument = re.match(r"Error: (--[a-z-]+|[A-Z]+): ", self.stderr)  # a wrong one is wrong usage
        assert self.code == (2 if of_argument else FAILED), self
        line = self.stderr.removesuffix("\n")
        assert line.startswith("Error: "), self
        if self.stdout:  # of --json
            failure = json.loads(self.stdout)
            assert failure.keys() == {"version", "error", "path", "hint"}, self
            assert failure["error"] in line, self
        assert line.isprintable(), self
        return line


def ckpttool(*arguments: object) -> Outcome:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = invoke(cli, [str(a) for a in arguments])
    return Outcome(code, out.getvalue(), err.getvalue())


def ckpttool_process(*arguments: object, **options: Any) -> Outcome:
    """Run a command in a process of its own."""
    command = [sys.executable, "-m", "ckpttool", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **options)
    return Outcome(done.returncode, done.stdout, done.stderr)


def ckpttool_without_privileges(*arguments: object) -> Outcome:
    """Run a command as a user that permissions apply to."""
    ckpttool(*arguments[:1], "--help")  # imports all that the child may not be able to read
    return Outcome(**without_privileges(lambda: dataclasses.asdict(ckpttool(*arguments))))


def without_privileges(call: Callable[[], Any]) -> Any:
    """Call a function as a user that permissions apply to, in a forked child that gives root's rights away.

    A process of its own will not do: nobody but root may be able to read this installation. The result goes through
    JSON.
    """
    if os.geteuid() != 0:
        return call()
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there are threads, but none that the child needs
        child = os.fork()
    if child == 0:
        try:
            gc.disable()  # closing what other tests have left of s3fs would wait for a thread that the child lacks
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(write, json.dumps(call()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    assert answer, "the child failed"
    return json.loads(answer)


def leftover(out: Path, mode: int = 0o700) -> Path:
    """Make a directory such as an interrupted run leaves beside its output."""
    path = out.with_name(f".{out.name}.0123456789abcdef.partial")
    path.mkdir(parents=True)
    path.chmod(mode)
    return path


def staging_of(out: Path) -> list[Path]:
    """The directories in which runs to an output have begun to write."""
    return list(out.parent.glob(f".{out.name}.*.partial"))


def remains(directory: Path) -> list[str]:
    """Everything under a directory."""
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*"))


def in_terminal(*arguments: object, columns: int, code: int = 0, errors: bool = True, **environment: str) -> str:
    """What a command shows on a terminal of so many columns, with what it says of errors and progress."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ckpttool", *map(str, arguments)]
    settings = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "FORCE_COLOR", "COLORTERM", "CI"}}
    settings |= {"TERM": "xterm", "COLUMNS": str(columns), **environment}
    told = theirs if errors else subprocess.DEVNULL
    with subprocess.Popen(command, stdout=theirs, stderr=told, stdin=theirs, env=settings) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            shown += part
    os.close(ours)
    assert process.returncode == code
    return shown.decode().replace("\r\n", "\n")


def plain(text: str) -> str:
    """The text of a terminal without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
