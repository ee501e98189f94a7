"""What opening a checkpoint may cost: memory for structure, objects, chunks and seconds of CPU, counted in one place.

A file of a kilobyte can ask for gigabytes and hours. What is allowed grows with the bytes of the files that are opened,
so that a checkpoint of a thousand ranks opens as it is, and ``open_budget`` multiplies it for what is unlike any other.
"""

from __future__ import annotations

import contextlib
import threading
import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttool.errors import ContainerError

if TYPE_CHECKING:
    from collections.abc import Iterator

OPTION = "open_budget"
"""The storage option that multiplies the limits."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """How much of something an open may take."""

    base: float
    """Whatever the size of the files."""
    per_byte: float
    """More for each byte of the files that are opened."""
    unit: str
    """What it is counted in."""


MEMORY = Allowance(256 << 20, 16.0, "bytes of memory for structure")
OBJECTS = Allowance(2_000_000, 0.1, "objects")
CHUNKS = Allowance(1_000_000, 0.05, "chunks of tensors")
SECONDS = Allowance(30.0, 2e-7, "seconds of CPU")


class Budget:
    """What one open has taken. Threads may share it.

    Args:
        factor: Multiplies what is allowed.
    """

    def __init__(self, factor: float = 1.0) -> None:
        self._factor = factor
        self._taken: dict[Allowance, float] = {}
        self._files: dict[str, int] = {}
        self._nbytes = 0
        self._lock = threading.Lock()
        self._began = time.process_time()

    def saw(self, path: str, nbytes: int) -> None:
        """Allow for a file that is opened; each counts once."""
        with self._lock:
            self._nbytes += nbytes - self._files.get(path, 0)
            self._files[path] = nbytes

    def left(self, what: Allowance) -> float:
        """How much may still be taken."""
        return self._limit(what) - self._taken.get(what, 0)

    def take(self, what: Allowance, amount: float, path: str) -> None:
        """Count an allowance that a file uses.

        Raises:
            ContainerError: It is more than is allowed, or the open has taken too long.
        """
        with self._lock:
            taken = self._taken[what] = self._taken.get(what, 0) + amount
        if taken > self._limit(what):
            raise self._exceeded(what, path)
        if time.process_time() - self._began > self._limit(SECONDS):
            raise self._exceeded(SECONDS, path)

    def _limit(self, what: Allowance) -> float:
        return self._factor * (what.base + what.per_byte * self._nbytes)

    def _exceeded(self, what: Allowance, path: str) -> ContainerError:
        problem = f"to open it takes more than {self._limit(what):,.0f} {what.unit}, too much for its size"
        return ContainerError(path, problem, "if you trust the file, set open_budget=10", ("open_budget",))


_CURRENT: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextlib.contextmanager
def opening(factor: float = 1.0) -> Iterator[Budget]:
    """The budget of an open, for all that the body does; one that has begun goes on."""
    begun = _CURRENT.get()
    if begun is not None:
        yield begun
        return
    budget = Budget(factor)
    token = _CURRENT.set(budget)
    try:
        yield budget
    finally:
        _CURRENT.reset(token)


def saw(path: str, nbytes: int) -> None:
    """Allow for a file that is opened, where an open is going on."""
    if (budget := _CURRENT.get()) is not None:
        budget.saw(path, nbytes)


def take(what: Allowance, amount: float, path: str) -> None:
    """Count an allowance of the open that is running.

    Raises:
        ContainerError: It is more than is allowed.
    """
    if (budget := _CURRENT.get()) is not None:
        budget.take(what, amount, path)


def left(what: Allowance, most: int) -> int:
    """How much may still be taken, and never more than ``most``."""
    budget = _CURRENT.get()
    return most if budget is None else max(0, min(most, int(budget.left(what))))
