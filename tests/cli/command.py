"""Runs the command line: here, where that is enough, or in a process of its own."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.cli import cli
from ckpttool.cli._errors import invoke

if TYPE_CHECKING:
    from pathlib import Path


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
        assert self.code == 1, self
        assert self.stdout == "", self
        line = self.stderr.removesuffix("\n")
        assert line.startswith("Error: "), self
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)
    return Outcome(done.returncode, done.stdout, done.stderr)


def remains(directory: Path) -> list[str]:
    """Everything under a directory."""
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*"))
