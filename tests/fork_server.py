"""Fork processes from one that has imported DeepSpeed: importing it takes seconds of CPU.

Each line of standard input is a call: the directory that describes it, where also goes what it prints, its
environment, and modules to import before. The answer is a line with its exit status. The process ends with its
standard input.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from ckpttool.registry import EXTENSIONS
from tests import forked
from tests.storage.server import RARE_COLLECTIONS

IMPORTED = (
    *(f"ckpttool.integrations.deepspeed.{n}" for n in (
        "capture", "inject", "load", "restorable", "run", "stage0",
    )),
    *(f"ckpttool.integrations.live.{n}" for n in ("host_memory", "load", "manager")),
    "ckpttool.integrations.torch.run", *(row.hooks for row in EXTENSIONS if row.hooks),
    *(f"ckpttool.formats.{n}" for n in ("state_dict", "zero.reader", "zero.stage0", "zero.stage12")),
    "ckpttool.integrations.torch.live", "ckpttool.storage.local_writer",
    "deepspeed.comm.mori", "deepspeed.utils.pin_memory", "deepspeed.runtime.superoffload.superoffload_stage3",
    "ml_dtypes", "recipes.moe", "recipes.parallel", "recipes.plain", "recipes.tensor_parallel", "s3fs",
    "tests.deepspeed.engines", "tests.parallel_engines", "torch._subclasses.schema_check_mode",
    "torch.profiler._cupti_monitor", "torch.utils.serialization", "torchdata.stateful_dataloader",
)  # fmt: skip
"""What most ranks import, beside what ``preload`` does."""


def _serve() -> tuple[str, dict[str, str]] | None:
    """Fork a process for each call; return the call in that process, and None in this one at the end."""
    gc.disable()  # imported modules live as long as the process
    import pytest  # noqa: F401  the modules of tests import it
    from recipes import common

    # Each optimizer of DeepSpeed on the CPU asks for the processor's vendor, for a warning: it takes two seconds.
    cpuinfo: Any = importlib.import_module("cpuinfo")
    cpuinfo.get_cpu_info = dict
    # torch.manual_seed keeps each seed for devices that may come later, with the stack of the call.
    for name in ("torch.cuda", "torch.mtia", "torch.xpu"):
        device: Any = importlib.import_module(name)
        device.manual_seed_all = _seed_no_device
    for name in IMPORTED:
        importlib.import_module(name)
    common.preload()
    gc.set_threshold(*RARE_COLLECTIONS)
    gc.enable()
    for line in iter(sys.stdin.readline, ""):
        directory, environment, modules = json.loads(line)
        for name in modules:
            importlib.import_module(name)
        child = os.fork()
        if not child:
            return directory, environment
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()
    return None


def _seed_no_device(_: int) -> None:
    """Stand in for the seeds of a device that is not there."""


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
