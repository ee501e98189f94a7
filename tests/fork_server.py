"""Run modules in processes forked from one that has imported DeepSpeed: importing it takes ten seconds of CPU.

Each line of standard input is a job: a module, its argument, its environment, and the files for what it prints. The
answer is a line with its exit status. The process ends with its standard input.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import sys
from typing import Any

PRELOADED = (
    "torch._dynamo",  # the first optimizer imports it
    "deepspeed.module_inject.auto_ep_layer",  # the first engine imports these
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "setuptools",  # the search for compilers imports it
)
"""Modules that engines import late. Each fork would take seconds to import them."""


def _serve() -> dict[str, Any] | None:
    """Fork a process for each job; return the job in that process, and None in this one at the end."""
    for name in PRELOADED:
        importlib.import_module(name)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # looks for compilers, which takes a second
    gc.collect()
    gc.freeze()  # engines at stage 3 call gc.collect, which takes half a second over all that is imported
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
