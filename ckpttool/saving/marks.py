"""What the mark of an unfinished save says of the process that wrote it, and whether that still runs.

Source: Linux, proc(5): ``boot_id``, ``/proc/PID/stat`` and ``/proc/PID/ns``.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

ALIVE: set[str] = set()
"""Attempts of this process that have not ended."""


def identity() -> dict[str, Any]:
    """What tells whether the process that writes a mark still runs, to other processes of its machine."""
    process = os.getpid()
    return {"host": socket.gethostname(), "machine": _machine(), "process": process, "began": _began(process)}


def is_alive(mark: Mapping[str, Any]) -> bool | None:
    """Whether the save that wrote a mark still runs; None if it ran on another machine, so that nothing tells."""
    if "machine" not in mark:
        return False  # of a release that did not say
    machine = _machine()
    if not machine or mark["machine"] != machine:
        return None
    process, began = mark.get("process"), mark.get("began")
    if process == os.getpid() and began == _began(os.getpid()):
        return str(mark.get("key", "")).removeprefix("save ") in ALIVE
    return isinstance(process, int) and bool(began) and _began(process) == began


def _machine() -> str:
    """This start of this machine, and the name space in which its processes are numbered; "" if nothing tells."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _began(process: int) -> str:
    """When a process began, as Linux counts; "" if it does not run, or nothing tells."""
    try:
        with open(f"/proc/{process}/stat") as file:
            state, *rest = file.read().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in {"Z", "X"} else rest[18]
