"""Forecast what a run of a plan needs: bytes, memory and time, from a short measurement."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ckpttool.concurrency import MAX_JOBS, default_jobs, in_threads
from ckpttool.execution.assemble import PartAssembler
from ckpttool.execution.local import DISK_JOBS
from ckpttool.execution.sources import Sources
from ckpttool.storage.block_writes import DIRECT_BYTES
from ckpttool.storage.posix import open_unnamed, write_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpttool.execution.run import RunOptions
    from ckpttool.plan import CopyPlan

PART_BYTES = 1 << 22
"""Bytes of one measured part."""
PARTS = 24
"""Maximum number of measured parts."""
SECONDS = 0.5
"""No part is begun after this time."""
THREAD_BYTES = DIRECT_BYTES + (1 << 20)
"""Buffers of one thread that copies between local files."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Disk space, memory and time of a run. The report itself has the bytes read and written."""

    free_bytes: int | None
    """Free bytes of the file system of OUT; None where the storage does not report them."""
    memory_bytes: int
    """Peak memory of this process, in bytes: what it holds now and the buffers of the run. For Ray, of one task."""
    seconds: float | None
    """Wall time, from the time of a few parts; None for Ray, and where nothing is written."""
    uploads_measured: bool
    """False for a remote OUT: nothing is sent for a forecast, so that ``seconds`` is the time of the reads alone."""


def forecast(
    plan: CopyPlan, options: RunOptions, *, directory: str | None, free_bytes: int | None, spent: float
) -> Needs:
    """Measure a few parts of a plan; no file appears.

    The parts lie at equal distances. Each is read, cast and, for a local output, written to a file without a name.

    Args:
        plan: The plan.
        options: Threads, memory and workers of the run.
        directory: Existing local directory on the file system of the output; None for a remote output.
        free_bytes: Free bytes of the file system of the output, if known.
        spent: Seconds that the command has taken until now.

    Raises:
        StorageError: Reading or writing failed, or a source changed meanwhile.
    """
    remote = directory is None or any(file.storage.remote for file in plan.sources)
    threads = (options.jobs or default_jobs(remote=True)) if remote else _local_threads(plan, options.jobs)
    seconds = None
    if options.workers is None and plan.nbytes_written:
        seconds = _seconds(plan, threads if remote else 1, directory)
        if not remote:
            seconds /= min(threads, os.cpu_count() or 1)
        seconds += spent
    buffers = min(options.memory, 4 * plan.nbytes_written) if remote else threads * THREAD_BYTES
    return Needs(free_bytes, resident_bytes() + buffers, seconds, uploads_measured=directory is not None)


def resident_bytes() -> int:
    """Return the memory of this process in bytes; where the system does not tell it, its peak until now."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _local_threads(plan: CopyPlan, jobs: int | None) -> int:
    """Return how many threads ``local.run`` keeps busy: one thread writes a file that is not cast."""
    computed = any(source != target for source, target in plan.casts) or any(file.gathers for file in plan.files)
    return jobs or MAX_JOBS if computed else min(jobs or DISK_JOBS, len(plan.files))


def _seconds(plan: CopyPlan, jobs: int, directory: str | None) -> float:
    """Return the time of the whole plan at the rate of its measured parts."""
    fd = -1 if directory is None else open_unnamed(directory)
    try:
        with Sources(plan.sources) as sources:
            tasks = _tasks(plan, sources, fd, time.perf_counter() + SECONDS)
            began = time.perf_counter()
            with contextlib.closing(in_threads(tasks, jobs)) as results:
                measured = sum(results)
            taken = time.perf_counter() - began
    finally:
        if fd >= 0:
            os.close(fd)
    return taken * plan.nbytes_written / max(measured, 1)


def _tasks(plan: CopyPlan, sources: Sources, fd: int, end: float) -> Iterator[Callable[[], int]]:
    """Yield tasks that process one part each and return its size."""
    count = min(PARTS, -(-plan.nbytes_written // PART_BYTES))
    wanted = [plan.nbytes_written * n // count for n in range(count)]
    before = at = 0
    for file in plan.files:
        assembler = None
        while wanted and wanted[0] < before + file.nbytes:
            if at and time.perf_counter() > end:
                return
            assembler = assembler or PartAssembler(plan, file, sources)
            start = wanted.pop(0) - before
            yield partial(_part, assembler, start, min(start + PART_BYTES, file.nbytes), fd, at)
            at += PART_BYTES
        before += file.nbytes


def _part(assembler: PartAssembler, start: int, end: int, fd: int, at: int) -> int:
    data, _ = assembler.assemble(start, end)
    if fd >= 0:
        write_at(fd, data, at, "a file without a name")
    return end - start
