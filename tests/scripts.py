"""Training scripts on several ranks, forked from one process that has imported what they import.

``torch.distributed.run`` starts an interpreter for each rank, and each takes ten seconds of CPU for its imports.
"""

from __future__ import annotations

import glob
import os
import runpy
import sys
from functools import partial
from typing import TYPE_CHECKING

from tests import forked

if TYPE_CHECKING:
    from pathlib import Path


def run(directory: Path, imports: list[str], *starts: tuple[int, list[str]], killed: str = "") -> list[str]:
    """Run scripts one after another; return what the ranks of each printed and logged.

    Args:
        directory: Directory for the output.
        imports: Modules to import before ranks are forked.
        starts: Number of ranks of each start, and its command line: the path of a script or ``-m`` and a module,
            and arguments.
        killed: Pattern of paths: the ranks of the first start are killed when there is one.
    """
    forked.call(_run_all, starts, directory, killed, imports=imports)
    return [(directory / f"log-{number}").read_text() for number in range(len(starts))]


def _run_all(starts: list[tuple[int, list[str]]], directory: Path, killed: str) -> None:
    directory.mkdir(exist_ok=True)
    for number, (ranks, command) in enumerate(starts):
        body = partial(_run, command, directory / f"log-{number}")
        if killed and not number:
            assert -9 in forked.kill_ranks(ranks, body, lambda: bool(glob.glob(killed)))
        else:
            forked.run_ranks(ranks, body)


def _run(command: list[str], path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]  # torch.distributed.run sets it
    if command[0] == "-m":
        sys.argv[:] = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = command
    sys.path.insert(0, os.path.dirname(command[0]))
    runpy.run_path(command[0], run_name="__main__")
