"""Run commands side by side and compare: wall time, CPU time and peak memory of whole processes.

With ``CKPTTOOL_BENCHMARK_RECORD`` set to a file, every comparison is appended to it as one line of JSON; ``record.py``
collects them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

DATA = Path(os.environ.get("CKPTTOOL_BENCHMARK_DATA") or Path(__file__).resolve().parent / ".data")
"""Directory of the checkpoints and results."""
TRIAL = "CKPTTOOL_BENCHMARK_TRIAL" in os.environ
"""Whether this is a trial run of the scripts: fewer ranks, no warm-up."""
RECORD = os.environ.get("CKPTTOOL_BENCHMARK_RECORD", "")
"""File that comparisons are appended to; "" for none."""
SCALES = {"large": "253M", "small": "24M", "tiny": "a few thousand"}
"""Parameters of the checkpoints; tiny is for trying a benchmark out."""

HELD_BYTES = 4 << 30
"""More bytes than any command here writes."""

_HOLD = """
import mmap, sys
memory = mmap.mmap(-1, int(sys.argv[1]), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Usage:
    """Time and memory of one run of a command."""

    wall: float
    """Seconds from start to end."""
    cpu: float
    """Seconds of processor time, the kernel's on its behalf included."""
    peak_mb: float
    """Largest resident memory of one process, in MB."""


@dataclass(frozen=True)
class Figures:
    """Usage of several runs of one command."""

    runs: Sequence[Usage]

    @property
    def wall(self) -> float:
        """Median of the wall times, in seconds."""
        return statistics.median(u.wall for u in self.runs)

    @property
    def cpu(self) -> float:
        """Median of the processor times, in seconds."""
        return statistics.median(u.cpu for u in self.runs)

    @property
    def peak_mb(self) -> float:
        """Largest peak memory, in MB."""
        return max(u.peak_mb for u in self.runs)


@dataclass(frozen=True)
class Command:
    """Commands to run, and their preparation."""

    name: str
    """Its name."""
    steps: Sequence[Sequence[str]]
    """Commands, one after another; their times add up."""
    prepare: Callable[[], None]
    """Called before each run, not timed."""
    reads: Path | None = None
    """A directory that it reads, to be in the page cache when it starts."""


def run_once(command: Command) -> Usage:
    """Run a command; return its time and memory, as the kernel reports them.

    Raises:
        RuntimeError: The command failed.
    """
    command.prepare()
    os.sync()  # do not measure pending writes of the previous command
    if command.reads is not None:
        _read(command.reads)
    if not TRIAL:
        FREE_MEMORY.release()
    wall = cpu = peak = 0.0
    for step in command.steps:
        began = time.perf_counter()
        process = subprocess.Popen(step, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=_environment())
        errors = process.stderr.read() if process.stderr else b""
        _, status, usage = os.wait4(process.pid, 0)
        wall += time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{' '.join(step)} failed:\n{errors.decode()[-2000:]}")
        cpu += usage.ru_utime + usage.ru_stime
        peak = max(peak, usage.ru_maxrss / 1000)
    if not TRIAL:
        FREE_MEMORY.hold()
    return Usage(wall, cpu, peak)


def alternate(commands: Sequence[Command], runs: int) -> dict[str, Figures]:
    """Run each command once to warm up, then all in turn; every second round in the reverse order."""
    if not runs:
        return {}
    for command in commands if not TRIAL else ():
        run_once(command)
    taken: dict[str, list[Usage]] = {c.name: [] for c in commands}
    for number in range(runs):
        for command in commands[:: -1 if number % 2 else 1]:
            taken[command.name].append(run_once(command))
    return {name: Figures(usages) for name, usages in taken.items()}


def keep(comparison: str, base: str, runs: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Append a comparison to the record.

    Args:
        comparison: Its name, unique in a benchmark.
        base: The contestant that ratios refer to.
        runs: By contestant and quantity ("wall", "cpu" in seconds, "peak_mb", ...): the value of each run.
    """
    if not RECORD:
        return
    line = {
        "benchmark": Path(sys.argv[0]).stem.removesuffix("_rank"),
        "comparison": comparison,
        "base": base,
        "runs": runs,
    }
    with open(RECORD, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def print_table(title: str, usages: dict[str, Figures], base: str, comparison: str = "") -> None:
    """Print each command's figures and its ratio to one of them; keep them as ``comparison`` if that is given."""
    if not usages:
        return
    if comparison:
        quantities = ("wall", "cpu", "peak_mb")
        keep(comparison, base, {n: {q: [getattr(u, q) for u in f.runs] for q in quantities} for n, f in usages.items()})
    print(f"\n{title}")
    print(f"{'':36}{'wall s':>9}{'CPU s':>9}{'peak MB':>9}   {'wall':>8}{'CPU':>8}{'memory':>8}  of {base}")
    reference = usages[base]
    for name, u in usages.items():
        ratios = (u.wall / reference.wall, u.cpu / reference.cpu, u.peak_mb / reference.peak_mb)
        print(
            f"{name:36}{u.wall:9.2f}{u.cpu:9.2f}{u.peak_mb:9.0f}   " + "".join(f"{r:7.2f}x" for r in ratios), flush=True
        )


def _read(directory: Path) -> None:
    """Bring files into the page cache: some machines evict files after a few seconds without use."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 20):
                    pass


class FreeMemory:
    """Free memory that a virtual machine's host backs.

    Getting a page back from the host takes many times longer than a copy into it, and would slow down the first command
    that uses the page: without this, the same ``cp`` took between 0.9 and 4.7 s. The host takes pages that are free for
    some seconds, so that they are held from the end of one command to the start of the next.
    """

    def __init__(self) -> None:
        self._holder: subprocess.Popen[bytes] | None = None

    def hold(self) -> subprocess.Popen[bytes]:
        """Begin to hold it, in a process that ends with this one: a child of this one begins with its peak."""
        with open("/proc/meminfo", encoding="ascii") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemFree"))
        size = min(HELD_BYTES, free * 9 // 10)
        self._holder = subprocess.Popen([sys.executable, "-c", _HOLD, str(size)], stdin=subprocess.PIPE)
        return self._holder

    def release(self) -> None:
        """Wait until the host backs it, and release it.

        Raises:
            RuntimeError: It cannot be held.
        """
        holder = self._holder or self.hold()
        self._holder = None
        holder.communicate()
        if holder.returncode:
            raise RuntimeError(f"the process that holds free memory failed ({holder.returncode})")


FREE_MEMORY = FreeMemory()


def _environment() -> dict[str, str]:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    # An installed program runs from compiled bytecode; without this it would be compiled at each start.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment
