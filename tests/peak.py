"""The memory that a call needs above what its process has."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def memory_above(function: Callable[[], object]) -> int:
    """Return the bytes by which resident memory was larger during a call than before it.

    Source: Linux, proc(5): 5 in ``clear_refs`` sets the peak to the memory that the process has.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(
        0
    )  # else a call would use freed pages that are still resident, and its need would not show
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    function()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))
