"""Fork processes from one that has imported DeepSpeed: importing it takes ten seconds of CPU.

Each line of standard input is a call: the directory that describes it, where also goes what it prints, and its
environment. The answer is a line with its exit status. The process ends with its standard input.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests import forked


def _serve() -> tuple[str, dict[str, str]] | None:
    """Fork a process for each call; return the call in that process, and None in this one at the end."""
    import pytest  # noqa: F401  the modules of tests import it
    from recipes import common

    common.preload()
    for line in iter(sys.stdin.readline, ""):
        directory, environment = json.loads(line)
        child = os.fork()
        if not child:
            return directory, environment
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()
    return None


def _become(directory: str, environment: dict[str, str]) -> None:
    """Take on the environment and the streams of a call."""
    os.environ.clear()
    os.environ.update(environment)
    for fd, path in enumerate((os.devnull, f"{directory}/stdout", f"{directory}/stderr")):
        opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(opened, fd)
        os.close(opened)


if __name__ == "__main__" and (own := _serve()) is not None:
    _become(*own)
    forked.answer(Path(own[0]))
