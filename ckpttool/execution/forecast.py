"""Tell what a run of a plan needs: memory and disk space."""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttool.concurrency import default_jobs

if TYPE_CHECKING:
    from ckpttool.execution.output.destination import RunOptions
    from ckpttool.plan import CopyPlan

THREAD_BYTES = 2 << 20
"""Buffers of one thread that copies between local files."""
CODE_BYTES = 8 << 20
"""Modules that a run imports."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Disk space and memory of a run. The report itself has the bytes read and written."""

    free_bytes: int | None
    """Free bytes of the file system of OUT; None where the storage does not report them."""
    memory_bytes: int
    """Peak memory of this process, in bytes: its memory now and the buffers of the run. For Ray, of one task."""


def forecast(plan: CopyPlan, options: RunOptions, *, remote: bool, free_bytes: int | None) -> Needs:
    """Return what a run needs; nothing is read.

    Args:
        plan: The plan.
        options: Threads and memory of the run.
        remote: Whether the output is remote.
        free_bytes: Free bytes of the file system of the output, if known.
    """
    if remote or any(file.storage.remote for file in plan.sources):
        buffers = min(options.memory, 4 * plan.nbytes_written)
    else:
        buffers = (options.jobs or default_jobs()) * THREAD_BYTES
    return Needs(free_bytes, resident_bytes() + CODE_BYTES + buffers)


def resident_bytes() -> int:
    """Return the memory of this process in bytes; where the system does not report it, its peak."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
