"""Read and write marks beside a checkpoint's files: the in-progress marker of a save, and pins.

The marker also shows whether its save still runs. ``state_of`` detects whether any file of a directory, marks included,
has changed since a decision to remove or thin it.

Source: Linux, proc(5): ``boot_id``, ``/proc/PID/stat`` and ``/proc/PID/ns``.
"""

from __future__ import annotations

import json
import os
import posixpath
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.checksums import crc32
from ckpttool.commit import is_commit, read_mark
from ckpttool.errors import CkptError, StorageError
from ckpttool.storage import BESIDE, MARK, find_text, read_json
from ckpttool.storage.base import DAMAGED, PIN
from ckpttool.storage.safe_files import is_temporary

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckpttool.storage import Entry, Storage, WritableStorage


TAKEN = "check that no other run saves there, or choose another root or tag"
ALIVE: set[str] = set()
"""Identifiers of the running saves of this process."""


class TakenError(StorageError):
    """Another process has claimed the directory."""


def own_directories(storage: Storage, path: str) -> Iterator[tuple[str, list[Entry]]]:
    """Yield each directory that a removal of a path deletes, with its entries: links are not followed.

    Raises:
        StorageError: A directory cannot be listed.
    """
    storage.list_tree(path)
    waiting = [path]
    while waiting:
        directory = waiting.pop()
        entries = storage.listing(directory)
        yield directory, entries
        inside = [posixpath.join(directory, entry.name) for entry in entries if entry.is_dir]
        waiting += [one for one in inside if storage.remote or not os.path.islink(one)]


def own_files(storage: Storage, path: str) -> Iterator[tuple[str, Entry]]:
    """Yield the directory and the entry of each file in ``own_directories``."""
    return ((directory, e) for directory, entries in own_directories(storage, path) for e in entries if not e.is_dir)


def state_of(storage: Storage, path: str) -> str:
    """Return a text that changes when a file below a path is written or removed, as by a save, a pin or a marker.

    A caller takes it before it decides about a checkpoint, and compares it before it changes the checkpoint, because a
    run may have saved the same tag again meanwhile.

    Args:
        storage: The storage of the path.
        path: The path.

    Raises:
        StorageError: A directory cannot be listed.
    """
    files = ((f"{directory}/{e.name}", e) for directory, e in own_files(storage, path))
    found = sorted((name, e.nbytes, e.version) for name, e in files)
    return f"{crc32(repr(found).encode()):08x}"


def _content_of(storage: Storage, path: str) -> str:
    """Return a text that changes when a file of a checkpoint is rewritten, not when the checkpoint is moved or copied.

    A copy must keep the times of modification.
    """
    files = ((posixpath.relpath(directory, path), e) for directory, e in own_files(storage, path))
    found = sorted(
        (directory, e.name, e.nbytes, e.version if storage.remote else f"{e.modified}")
        for directory, e in files
        if e.name not in BESIDE
    )
    return f"{crc32(repr(found).encode()):08x}"


def mark_damaged(storage: WritableStorage, path: str, problem: str, *, for_good: bool) -> None:
    """Mark a checkpoint that cannot be restored: readers pass over it.

    Args:
        storage: Its storage.
        path: Its directory.
        problem: Why.
        for_good: Whether the mark also holds when the files change; else a repaired checkpoint is read again.

    Raises:
        StorageError: The mark cannot be written.
    """
    state = None if for_good else _content_of(storage, path)
    storage.put(posixpath.join(path, DAMAGED), json.dumps({"problem": problem, "state": state}).encode())


def damage_of(storage: Storage, path: str) -> str | None:
    """Return the problem in the mark of a checkpoint that cannot be restored; None without one that holds.

    Raises:
        StorageError: It cannot be read.
    """
    text = find_text(storage, posixpath.join(path, DAMAGED))
    if text is None:
        return None
    try:
        found = json.loads(text)
        problem, state = str(found["problem"]), found["state"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "its mark is damaged"
    return problem if state in {None, _content_of(storage, path)} else None


def below(storage: Storage, path: str, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the marks of a checkpoint at a path: directory and name of each file whose name has the prefix.

    The checkpoint may be at any depth: Ray Train and trainers nest their directories.
    """
    return ((directory, e.name) for directory, e in own_files(storage, path) if e.name.startswith(prefix))


def is_uncommitted(storage: Storage, directory: str) -> bool:
    """Return whether a save into a directory has begun and is not committed.

    A directory into which a command writes is not an unfinished save: it may contain other files, and only that command
    knows which are its own.
    """
    names = {entry.name for entry in storage.listing(directory)}
    # A save writes the marker first: killed at that moment, it leaves only incomplete markers.
    begun = bool(names) and all(n.startswith(f"{MARK}.") and is_temporary(n) for n in names)
    if is_commit(storage, directory) or "over" in read_mark(storage, directory):
        return False
    return MARK in names or begun


def identity() -> dict[str, Any]:
    """Return the fields of the marker by which other processes of the machine see whether this process still runs."""
    import socket  # readers need no marker of their own

    process = os.getpid()
    return {"host": socket.gethostname(), "machine": _machine(), "process": process, "began": _began(process)}


def is_alive(mark: Mapping[str, Any]) -> bool | None:
    """Return whether the save that wrote a marker still runs; None if unknown, because it is of another machine."""
    if "machine" not in mark:
        return False  # written by an old release
    machine = _machine()
    if not machine or mark["machine"] != machine:
        return None
    process, began = mark.get("process"), mark.get("began")
    if process == os.getpid() and began == _began(os.getpid()):
        return str(mark.get("key", "")).removeprefix("save ") in ALIVE
    return isinstance(process, int) and bool(began) and _began(process) == began


def is_old(modified: float, grace: float) -> bool:
    """Return whether a modification time is at least ``grace`` seconds away from now, in the past or the future."""
    return abs(time.time() - modified) >= grace


def _machine() -> str:
    """Return an identifier of this boot of this machine and of the PID namespace; "" if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _began(process: int) -> str:
    """Return the start time of a process in clock ticks since boot; "" if it does not run, or if unknown."""
    try:
        with open(f"/proc/{process}/stat") as file:
            state, *rest = file.read().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in {"Z", "X"} else rest[18]


@dataclass(frozen=True, slots=True)
class Pin:
    """The pin of one checkpoint."""

    who: str
    """User and host that pinned it; "" if the pin cannot be read."""
    when: float
    """Time in seconds since 1970."""
    why: str
    """The reason given."""
    path: str = ""
    """Path or URL of the directory that it keeps."""

    def __str__(self) -> str:
        return f"{self.path}: pinned by {self.who or '?'}: {self.why}"


def find_pin(storage: Storage, path: str) -> Pin | None:
    """Return the pin of a checkpoint, in its directory or at any depth below it; None without one.

    Any entry with the name of a pin counts as a pin, such as a directory or a dangling link.

    Raises:
        StorageError: The directory cannot be listed.
    """
    every = (directory for directory, _ in own_directories(storage, path))
    pinned = (directory for directory in every if storage.exists(posixpath.join(directory, PIN)))
    return next((read_pin(storage, directory) for directory in pinned), None)


def read_pin(storage: Storage, directory: str) -> Pin:
    """Read the pin in a directory; a damaged one keeps the checkpoint all the same."""
    try:
        found = read_json(storage, posixpath.join(directory, PIN), "", "")
        return Pin(str(found["who"]), float(found["when"]), str(found["why"]), directory)
    except (CkptError, ValueError, KeyError, TypeError, OverflowError):
        return Pin("", 0.0, "its pin cannot be read", directory)


def write_pin(storage: WritableStorage, directory: str, pin: Pin) -> None:
    """Pin the checkpoint in a directory; replaces an earlier pin.

    Raises:
        StorageError: The file cannot be written.
    """
    storage.put(posixpath.join(directory, PIN), json.dumps({"who": pin.who, "when": pin.when, "why": pin.why}).encode())
