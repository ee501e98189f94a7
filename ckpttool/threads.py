"""Work in threads: no more at once than asked for, and none left over after an error."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Generator, Iterator

T = TypeVar("T")

MAX_JOBS = 4
"""Threads that are used unasked for work that keeps a core busy."""
DISTANT_JOBS = 16
"""Threads that are used unasked for work that waits for round trips."""


def default_jobs(*, distant: bool = False) -> int:
    """Threads that are used unasked."""
    return DISTANT_JOBS if distant else min(MAX_JOBS, os.cpu_count() or 1)


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
                running.add(pool.submit(task))
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (f.result() for f in done)
        finally:
            if stopped is not None:
                stopped.set()
            for future in running:
                future.cancel()
