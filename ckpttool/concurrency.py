"""Run tasks in a limited number of threads, with bounded memory, and leave none running after an error."""

from __future__ import annotations

import contextlib
import os
import threading
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

T = TypeVar("T")

MAX_JOBS = 4
"""Default number of threads for work that keeps a core busy."""
REMOTE_JOBS = 16
"""Default number of threads for work that waits for round trips."""


def default_jobs(*, remote: bool = False) -> int:
    """Return the default number of threads."""
    return REMOTE_JOBS if remote else min(MAX_JOBS, os.cpu_count() or 1)


class Tally:
    """A counter that threads may share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def add(self) -> None:
        """Add one."""
        with self._lock:
            self.count += 1


class Lazy(Generic[T]):
    """Thread-safe lazy value; callers block while it is computed, and an error is raised in all of them.

    Args:
        make: Computes the value; called once at most.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._values: list[T] = []
        self._failed: BaseException | None = None

    def __call__(self) -> T:
        """Return the value; compute it in the first call."""
        with self._lock:
            if self._failed is not None:
                raise self._failed
            if not self._values:
                try:
                    self._values.append(self._make())
                except BaseException as error:
                    self._failed = error
                    raise
            return self._values[0]

    @property
    def value(self) -> T | None:
        """The value, or None if it is not computed yet; never blocks."""
        return self._values[0] if self._values else None


def in_threads(
    tasks: Iterator[Callable[[], T]], jobs: int, stopped: threading.Event | None = None
) -> Generator[T, None, None]:
    """Run at most ``jobs`` tasks at once and queue at most as many; the first error cancels the rest.

    Args:
        tasks: The iterator advances in the thread that takes the results.
        jobs: Number of threads.
        stopped: This function sets it when the caller takes no more results. Long tasks should check it, because this
            function waits for running tasks.
    """
    if jobs <= 1:
        for task in tasks:
            yield task()
        return
    # Imported here: the import takes a tenth of the start-up time.
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


def in_order(tasks: Iterator[Callable[[], T]], jobs: int) -> Generator[T, None, None]:
    """Run tasks as ``in_threads`` does; yield the results in the order of the tasks."""
    ready: dict[int, T] = {}
    following = 0
    numbered = (partial(_numbered, *task) for task in enumerate(tasks))
    with contextlib.closing(in_threads(numbered, jobs)) as results:
        for number, result in results:
            ready[number] = result
            while following in ready:
                yield ready.pop(following)
                following += 1


def _numbered(number: int, task: Callable[[], T]) -> tuple[int, T]:
    return number, task()


class MemoryBudget:
    """Admits chunks as long as their sum fits into a limit, and always one.

    Args:
        nbytes: The limit in bytes.
    """

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes
        self._limit = nbytes
        self._freed = threading.Condition()

    def acquire(self, nbytes: int) -> int:
        """Wait until ``nbytes`` are free; return the number of bytes to give back."""
        nbytes = min(nbytes, self._limit)
        with self._freed:
            self._freed.wait_for(lambda: self._left >= nbytes)
            self._left -= nbytes
        return nbytes

    def release(self, nbytes: int) -> None:
        """Free the bytes of a chunk."""
        with self._freed:
            self._left += nbytes
            self._freed.notify_all()
