"""Limit the memory for structure, the objects, the chunks and the CPU seconds that opening a checkpoint takes.

A hostile file of a kilobyte can demand gigabytes and hours. The limits grow with the bytes of the opened files, so that
a checkpoint of a thousand ranks opens.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.errors import ContainerError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Allowance(NamedTuple):
    """The limit of one resource."""

    base: float
    """Limit for files of any size."""
    per_byte: float
    """Added for each byte of the opened files."""
    unit: str
    """Unit, as error messages name it."""


MEMORY = Allowance(256 << 20, 16.0, "bytes of memory for structure")
OBJECTS = Allowance(2_000_000, 0.1, "objects")
CHUNKS = Allowance(1_000_000, 0.05, "chunks of tensors")
_CORES = os.cpu_count() or 1
SECONDS = Allowance(30.0, 2e-7, "seconds of CPU")


class Budget:
    """Resources that the opening of one checkpoint has used. Threads may share it."""

    def __init__(self) -> None:
        self._spent: dict[Allowance, float] = {}
        self._files: dict[str, int] = {}
        self._nbytes = 0
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._began = time.process_time()

    def note_file(self, path: str, nbytes: int) -> None:
        """Raise the limits for an opened file, or a part of it; each file counts once."""
        with self._lock:
            known = self._files.get(path, 0)
            self._nbytes += max(0, nbytes - known)
            self._files[path] = max(nbytes, known)

    def left(self, what: Allowance) -> float:
        """Return the amount that is left of a resource."""
        return self._limit(what) - self._spent.get(what, 0)

    def spend(self, what: Allowance, amount: float, path: str) -> None:
        """Count the amount of a resource that a file uses.

        Raises:
            ContainerError: The amount exceeds the limit, or opening has used too many CPU seconds.
        """
        with self._lock:
            spent = self._spent[what] = self._spent.get(what, 0) + amount
        if spent > self._limit(what):
            raise self._exceeded(what, path)
        # Asking for the CPU time is a system call; each core adds at most the time elapsed.
        most = (time.monotonic() - self._started) * _CORES
        if most > self._limit(SECONDS) and time.process_time() - self._began > self._limit(SECONDS):
            raise self._exceeded(SECONDS, path)

    def _limit(self, what: Allowance) -> float:
        return what.base + what.per_byte * self._nbytes

    def _exceeded(self, what: Allowance, path: str) -> ContainerError:
        problem = f"needs more than {self._limit(what):,.0f} {what.unit}, too much for its size"
        return ContainerError(path, problem, "if you trust the file, load it with the framework that wrote it")


_CURRENT: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextlib.contextmanager
def opening() -> Iterator[Budget]:
    """Set the budget for the body; inside another ``opening``, use the budget of that one."""
    begun = _CURRENT.get()
    if begun is not None:
        yield begun
        return
    budget = Budget()
    token = _CURRENT.set(budget)
    try:
        yield budget
    finally:
        _CURRENT.reset(token)


def note_file(path: str, nbytes: int) -> None:
    """Raise the limits of the current budget, if any, for an opened file."""
    if (budget := _CURRENT.get()) is not None:
        budget.note_file(path, nbytes)


def spend(what: Allowance, amount: float, path: str) -> None:
    """Count the amount of a resource against the current budget, if any.

    Raises:
        ContainerError: The amount exceeds the limit.
    """
    if (budget := _CURRENT.get()) is not None:
        budget.spend(what, amount, path)


def left(what: Allowance, most: int) -> int:
    """Return the amount that the current budget has left, at most ``most``."""
    budget = _CURRENT.get()
    return most if budget is None else max(0, min(most, int(budget.left(what))))
