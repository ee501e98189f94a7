"""Measure a conversion spread over a Ray cluster against the same one without Ray, side by side in one run.

    python benchmarks/ray_offline.py [--workers 1 2] [--runs N] [--stage 3]

The cluster is on this machine: for each number of workers so many nodes with one core each, which run before the
command that joins them and after it. All of them share this machine's cores, memory and disk: what is seen is what
spreading the work costs, and whether two cores do twice as much, not what other machines would add. Memory is what the
command, one of Ray's processes that do its tasks, and all of them together hold at the most, shared pages counted once
for each process. The checkpoint is that of ``consolidate.py``. Quote the ratios: the seconds are this machine's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
from consolidate import DATA, PYTHON, checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_usage_threshold": "0.98"}
COMMANDS = {
    "consolidate, fp32": ["consolidate", "--to", "safetensors"],
    "consolidate, bf16": ["consolidate", "--to", "safetensors", "--dtype", "bf16"],
    "convert to 8 ranks": ["convert", "--to", "zero", "--world-size", "8"],
    "convert to universal": ["convert", "--to", "universal"],
}
EACH_SECONDS = 0.02


@dataclass(frozen=True)
class Usage:
    """What one run took."""

    wall: float
    """Seconds, start-up included."""
    command_mb: float
    """Most memory of the command's own process, in MB."""
    worker_mb: float
    """Most memory of one of Ray's processes that did its tasks."""
    all_mb: float
    """Most memory of all of them together."""


@contextlib.contextmanager
def cluster(workers: int) -> Iterator[str]:
    """So many nodes of one core; their address."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 100 << 20}
    nodes = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    for _ in range(workers - 1):
        nodes.add_node(**node)
    try:
        yield nodes.address
    finally:
        nodes.shutdown()


def run(arguments: list[str]) -> Usage:
    """Run a command, and look at its memory and at that of its tasks all the while.

    Raises:
        RuntimeError: It failed.
    """
    os.sync()
    peaks = [0.0, 0.0, 0.0]
    over = threading.Event()
    began = time.perf_counter()
    with subprocess.Popen(
        [PYTHON, "-m", "ckpttool", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:

        def watch() -> None:
            while not over.wait(EACH_SECONDS):
                own = _mb(psutil.Process(process.pid))
                tasks = [_mb(p) for p in psutil.Process().children(recursive=True) if _does_a_task(p)]
                for i, value in enumerate((own, max(tasks, default=0.0), own + sum(tasks))):
                    peaks[i] = max(peaks[i], value)

        watcher = threading.Thread(target=watch)
        watcher.start()
        _, errors = process.communicate()
        wall = time.perf_counter() - began
        over.set()
        watcher.join()
    if process.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{errors}")
    return Usage(wall, *peaks)


def _does_a_task(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "".join(process.cmdline()[:1]).startswith("ray::ckpttool_task")
    return False


def _mb(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        return process.memory_info().rss / 1e6
    return 0.0


def bench(name: str, src: str, out: str, runs: int, workers: list[int]) -> None:
    """One command without Ray, and on clusters of several sizes."""
    command, *more = COMMANDS[name]
    print(f"\n{name}: {src} to {out}")
    print(f"{'':28}{'wall s':>9}{'of local':>10}{'command MB':>12}{'worker MB':>11}{'together':>10}")
    base = 0.0
    for count in (0, *workers):
        with cluster(count) if count else contextlib.nullcontext("") as address:
            joined = ["--ray", address] if count else []
            taken = []
            for number in range(runs + 1):  # the first starts the workers' processes
                shutil.rmtree(out, ignore_errors=True)
                usage = run([command, src, out, *more, *joined])
                taken += [usage] if number else []
        wall = statistics.median(u.wall for u in taken)
        base = base or wall
        peaks = [max(getattr(u, key) for u in taken) for key in ("command_mb", "worker_mb", "all_mb")]
        title = f"{count} workers" if count else "without Ray"
        print(f"{title:28}{wall:9.2f}{wall / base:9.2f}x{peaks[0]:12.0f}{peaks[1]:11.0f}{peaks[2]:10.0f}", flush=True)
    shutil.rmtree(out, ignore_errors=True)


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--runs", type=int, default=3, help="counted runs (default: 3)")
    parser.add_argument("--stage", type=int, choices=(2, 3), default=3)
    parser.add_argument("--scale", choices=("small", "large"), default="large")
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    arguments = parser.parse_args()
    os.environ |= ENVIRONMENT
    DATA.mkdir(exist_ok=True)
    src = str(checkpoint(arguments.stage, arguments.scale))
    for name in arguments.only:
        bench(name, src, str(DATA / "out"), arguments.runs, arguments.workers)


if __name__ == "__main__":
    main()
