"""Training scripts on several ranks, forked from one process that has imported what they import.

``torch.distributed.run`` starts an interpreter for each rank, and each takes ten seconds of CPU for its imports.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tests import forked


def run(directory: Path, imports: list[str], *starts: tuple[int, list[str]]) -> list[str]:
    """Run scripts one after another; return what the ranks of each printed and logged.

    Args:
        directory: Directory for the output.
        imports: Modules to import before ranks are forked.
        starts: Number of ranks of each start, and its command line: the path of a script or ``-m`` and a module,
            and arguments.
    """
    jobs = []
    for number, (ranks, command) in enumerate(starts):
        jobs.append({"imports": imports, "ranks": ranks, "command": command, "log": str(directory / f"log-{number}")})
    forked.start("tests.scripts", jobs, directory)
    return [Path(str(job["log"])).read_text() for job in jobs]


def main(directory: Path) -> None:
    """Run all jobs of a directory."""
    for job in forked.jobs_in(directory):
        for name in job["imports"]:
            importlib.import_module(name)
        forked.run_ranks(job["ranks"], partial(_run, job))


def _run(job: dict[str, Any]) -> None:
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]  # torch.distributed.run sets it
    command = job["command"]
    if command[0] == "-m":
        sys.argv[:] = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = command
    sys.path.insert(0, os.path.dirname(command[0]))
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
