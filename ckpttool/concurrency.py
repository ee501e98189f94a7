"""Work in threads: no more at once than asked for, and none left over after an error."""

from __future__ import annotations

import os
import threading
from contextvars import copy_context
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

T = TypeVar("T")

MAX_JOBS = 4
"""Threads that are used unasked for work that keeps a core busy."""
REMOTE_JOBS = 16
"""Threads that are used unasked for work that waits for round trips."""


def default_jobs(*, remote: bool = False) -> int:
    """Threads that are used unasked."""
    return REMOTE_JOBS if remote else min(MAX_JOBS, os.cpu_count() or 1)


class Once(Generic[T]):
    """Thread-safe lazy value; callers block while it is computed, and all of them get its error.

    Args:
        make: Makes it; called once at most.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: list[T] = []
        self._failed: BaseException | None = None

    def __call__(self) -> T:
        """What it is."""
        with self._lock:
            if self._failed is not None:
                raise self._failed
            if not self._made:
                try:
                    self._made.append(self._make())
                except BaseException as error:
                    self._failed = error
                    raise
            return self._made[0]

    @property
    def made(self) -> T | None:
        """What it is, if it was made; nobody waits."""
        return self._made[0] if self._made else None


def in_threads(
    tasks: Iterator[Callable[[], T]], jobs: int, stopped: threading.Event | None = None
) -> Generator[T, None, None]:
    """Run tasks, at most ``jobs`` at once and only as many waiting; the first error stops the rest.

    Args:
        tasks: Taken one by one, in the thread that asks for results.
        jobs: Threads.
        stopped: Set when no more results will be asked for: tasks that take long look at it, for they are waited for.
    """
    if jobs <= 1:
        for task in tasks:
            yield task()
        return
    # Imported here, where it is needed: it takes a tenth of the start-up time.
    from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

    with ThreadPoolExecutor(jobs) as pool:
        running: set[Future[T]] = set()
        try:
            for task in tasks:
                if len(running) >= 2 * jobs:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    yield from (f.result() for f in done)
                running.add(pool.submit(copy_context().run, task))
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (f.result() for f in done)
        finally:
            if stopped is not None:
                stopped.set()
            for future in running:
                future.cancel()


class MemoryBudget:
    """Lets so many windows be in flight as fit into memory, and one in any case.

    Args:
        nbytes: What they may take together.
    """

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes
        self._whole = nbytes
        self._freed = threading.Condition()

    def take(self, nbytes: int) -> int:
        """Wait until so much is free; returns what to give back."""
        nbytes = min(nbytes, self._whole)
        with self._freed:
            self._freed.wait_for(lambda: self._left >= nbytes)
            self._left -= nbytes
        return nbytes

    def give_back(self, nbytes: int) -> None:
        """Free what was taken."""
        with self._freed:
            self._left += nbytes
            self._freed.notify_all()
