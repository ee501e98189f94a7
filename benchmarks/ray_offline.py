"""Measure a conversion spread over a Ray cluster against the same one without Ray, side by side in one run.

    python benchmarks/ray_offline.py [--workers 1 2] [--runs N] [--stage 3] [--only NAME ...]

The cluster is on this machine: one node with one core for each worker, started before the measured command. The nodes
share this machine's cores, memory and disk. So the figures show the cost of spreading the work, and whether two cores
do twice as much; they do not show the gain of further machines. Memory is the peak of the command, of one of Ray's
worker processes, and of all of them together, with shared pages counted once for each process. The checkpoint is the
one of ``consolidate.py``. "of work" subtracts the time of the same command for a checkpoint of a few kilobytes:
starting, joining, and a process for a first task. With checkpoint and output in a bucket (``s3_server.py``, with a
pause before each answer and a limit on each connection), the network limits the speed, as with nodes on several
machines, and not these cores. Quote the ratios: the seconds are this machine's.
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
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from consolidate import PYTHON, checkpoint
from measure import DATA, SCALES, keep
from s3_server import running

if TYPE_CHECKING:
    from collections.abc import Iterator

ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_usage_threshold": "0.98"}
TINY = str(Path(__file__).resolve().parent.parent / "fixtures" / "checkpoints" / "zero3-dp4-bf16")
BUCKET = "bucket to bucket"
COMMANDS = {
    "consolidate, fp32": ["consolidate", "--to", "safetensors"],
    "consolidate, bf16": ["consolidate", "--to", "safetensors", "--dtype", "bf16"],
    "convert to 8 ranks": ["convert", "--to", "zero", "--world-size", "8"],
    "convert to universal": ["convert", "--to", "universal"],
    BUCKET: ["consolidate", "--to", "safetensors", "--jobs", "1", "--overwrite"],
}
EACH_SECONDS = 0.02


@dataclass(frozen=True)
class Usage:
    """Time and memory of one run."""

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
    """Start nodes of one core each; return their address."""
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
    """Run a command, and sample its memory and the memory of its tasks.

    Raises:
        RuntimeError: The command failed.
    """
    os.sync()
    peaks = [0.0, 0.0, 0.0]
    over = threading.Event()
    began = time.perf_counter()
    with subprocess.Popen(
        [PYTHON, "-m", "ckpttool", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:

        def watch() -> None:
            own = 0.0
            while not over.wait(EACH_SECONDS):
                with contextlib.suppress(psutil.Error):
                    own = _mb(psutil.Process(process.pid))
                tasks = [_mb(p) for p in psutil.Process().children(recursive=True) if _does_a_task(p)]
                for i, value in enumerate((own, max(tasks, default=0.0), own + sum(tasks))):
                    peaks[i] = max(peaks[i], value)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            _, errors = process.communicate()
            wall = time.perf_counter() - began
        finally:
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
        return float(process.memory_info().rss) / 1e6
    return 0.0


def bench(name: str, src: str, out: str, runs: int, workers: list[int]) -> None:
    """One command without Ray, and on clusters of several sizes."""
    command, *more = COMMANDS[name]
    print(f"\n{name}: {src} to {out}")
    heads = f"{'wall s':>9}{'of local':>10}{'of work':>9}{'command MB':>12}{'worker MB':>11}{'together':>10}"
    print(f"{'':16}{heads}")
    base: tuple[float, float] | None = None
    contestants: dict[str, dict[str, list[float]]] = {}
    for count in (0, *workers):
        with cluster(count) if count else contextlib.nullcontext("") as address:
            joined = ["--ray-address", address] if count else []
            start = min(_tiny(command, out, more, joined) for _ in range(runs + 1))
            taken = []
            for number in range(runs + 1):  # the first starts the workers' processes
                shutil.rmtree(out, ignore_errors=True)
                usage = run([command, src, out, *more, *joined])
                taken += [usage] if number else []
        wall = statistics.median(u.wall for u in taken)
        base = base or (wall, wall - start)
        peaks = [max(getattr(u, key) for u in taken) for key in ("command_mb", "worker_mb", "all_mb")]
        title = f"{count} worker{'s' * (count > 1)}" if count else "without Ray"
        contestants[title] = {"wall": [u.wall for u in taken], "peak_mb": [u.all_mb for u in taken]}
        ratios = f"{wall:9.2f}{wall / base[0]:9.2f}x{(wall - start) / base[1]:8.2f}x"
        print(f"{title:16}{ratios}{peaks[0]:12.0f}{peaks[1]:11.0f}{peaks[2]:10.0f}", flush=True)
    keep(name, "without Ray", contestants)
    shutil.rmtree(out, ignore_errors=True)


def _tiny(command: str, out: str, more: list[str], joined: list[str]) -> float:
    shutil.rmtree(out, ignore_errors=True)
    return run([command, TINY, out, *more, *joined]).wall


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--runs", type=int, default=3, help="counted runs (default: 3)")
    parser.add_argument("--stage", type=int, choices=(2, 3), default=3)
    parser.add_argument("--scale", choices=SCALES, default="large")
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--latency", type=float, default=0.05, help="seconds before the bucket answers")
    parser.add_argument("--rate", type=float, default=40e6, help="bytes a second of one connection to the bucket")
    arguments = parser.parse_args()
    os.environ |= ENVIRONMENT
    DATA.mkdir(exist_ok=True)
    src = str(checkpoint(arguments.stage, arguments.scale))
    out = str(DATA / "out")
    for name in arguments.only:
        if name != BUCKET:
            bench(name, src, out, arguments.runs, arguments.workers)
            continue
        limits = ["--latency", str(arguments.latency), "--rate", str(arguments.rate)]
        with running("--serve", f"data={DATA}", "--bucket", "out", *limits) as server:
            os.environ |= server.environment()
            bench(name, f"s3://data/{Path(src).name}", "s3://out/weights", arguments.runs, arguments.workers)


if __name__ == "__main__":
    main()
