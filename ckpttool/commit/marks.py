"""The mark of an unfinished save: which process wrote it, and whether that still runs.

Source: Linux, proc(5): ``boot_id``, ``/proc/PID/stat`` and ``/proc/PID/ns``.
"""

from __future__ import annotations

import json
import os
import posixpath
import socket
from typing import TYPE_CHECKING, Any

from ckpttool.commit.manifest import is_commit
from ckpttool.errors import StorageError
from ckpttool.storage import MARK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.storage import Storage

PARTIAL = ".partial"
"""Behind the name of a file that is being written, where files are seen before they are whole."""
TAKEN = "see that no other run saves there; choose another root or tag"
ALIVE: set[str] = set()
"""Attempts of this process that have not ended."""


class TakenError(StorageError):
    """Another process has the same directory."""


def read_mark(storage: Storage, directory: str) -> dict[str, Any]:
    """What the mark of a directory says; nothing if it has none, or that cannot be read."""
    path = posixpath.join(directory, MARK)
    try:
        mark = json.loads(storage.read_text(path)) if storage.exists(path) else {}
    except (StorageError, ValueError):
        return {}
    return mark if isinstance(mark, dict) else {}


def is_unfinished(storage: Storage, directory: str) -> bool:
    """Whether a save into a directory has begun, and was not committed."""
    names = {entry.name for entry in storage.listing(directory)}
    # The mark is the first that is written: who was killed at that has left nothing else.
    begun = bool(names) and all(n.startswith(MARK) and n.endswith(PARTIAL) for n in names)
    return (MARK in names or begun) and not is_commit(storage, directory)


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
