"""Run modules in processes forked from one that has imported DeepSpeed: importing it takes ten seconds of CPU.

Each line of standard input is a job: a module, its argument, its environment, and the files for what it prints. The
answer is a line with its exit status. The process ends with its standard input.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any


def _serve() -> dict[str, Any] | None:
    """Fork a process for each job; return the job in that process, and None in this one at the end."""
    from recipes import common

    common.preload()
    for line in iter(sys.stdin.readline, ""):
        job: dict[str, Any] = json.loads(line)
        child = os.fork()
        if not child:
            return job
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()
    return None


def _become(job: dict[str, Any]) -> None:
    """Take on the environment, the arguments and the streams of a job."""
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.argv[:] = [job["module"], job["argument"]]
    for fd, path in ((0, os.devnull), (1, job["stdout"]), (2, job["stderr"])):
        opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(opened, fd)
        os.close(opened)


if __name__ == "__main__" and (own := _serve()) is not None:
    _become(own)
    runpy.run_module(own["module"], run_name="__main__", alter_sys=True)
