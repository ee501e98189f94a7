"""Run a save in a background thread, and wait for it at the end of the program.

At the end of a program Python first closes the ``concurrent.futures`` pools of every library, and only then waits for
threads: a running save would fail. Therefore an exit hook waits for the save before that. If ``wait`` was not called
    for a failed save by then, the exit status reports the error.

Source: CPython 3.10 to 3.13, Lib/threading.py (``_register_atexit``, ``_shutdown``: the hooks run in reverse order),
Lib/concurrent/futures/thread.py (``_python_exit``) and Python/pylifecycle.c (``flush_std_files``, and ``Py_RunMain``:
status 120).
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  registers its hook first, because hooks run in reverse order
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from ckpttool.errors import CkptError, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

LOG = logging.getLogger("ckpttool")
_MULTIPROCESSING = "_flush_std_streams"
"""The function of ``multiprocessing.util`` that flushes standard error at the end of a child process."""


class Background:
    """Runs one save at a time in a thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failed: CkptError | None = None

    def start(self, save: Callable[[], CkptError | None]) -> None:
        """Start a save; call ``wait`` for the previous save first.

        Args:
            save: Saves, and returns its error or None.

        Raises:
            RuntimeError: The program is ending, and Python starts no thread any more.
        """

        def keep_error() -> None:
            try:
                self._failed = save()
            except BaseException as error:  # even the log may be closed at the end of the program
                problem = f"{type(error).__name__}: {error}"
                self._failed = PlanError("a save", f"failed with {problem}", "it may not be committed: see the log")

        _wait_at_end()
        thread = threading.Thread(target=keep_error, name="ckpttool-save")
        thread.start()
        self._thread = thread
        _running[id(self)] = self

    @property
    def running(self) -> bool:
        """Whether a save is running."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the save has ended.

        Raises:
            CkptError: The save failed; raised only once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        _running.pop(id(self), None)
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed


_running: dict[int, Background] = {}
"""Saves without a call of ``wait`` yet."""
_process = 0
"""Identifier of the process with the registered exit hook."""


def _wait_at_end() -> None:
    global _process  # a forked child has hooks of its own, and no save of its parent runs in it
    if _process == os.getpid():
        return
    _running.clear()
    if not _process:
        # All public hooks run after Python has closed the pools.
        threading._register_atexit(_end)  # type: ignore[attr-defined]
    _process = os.getpid()


def _end() -> None:
    if _process != os.getpid():
        return
    for background in list(_running.values()):
        try:
            background.wait()
        except CkptError:  # the save has logged the error
            _fail_process()
        except KeyboardInterrupt:
            LOG.error("interrupted: a save was still running, and may not be committed")  # noqa: TRY400
            _fail_process()
            raise


def _fail_process() -> None:
    """Let the process end with status 120; all other exit hooks still run."""
    if not isinstance(sys.stderr, _FailingStream):
        sys.stderr = _FailingStream(sys.stderr)


class _FailingStream:
    """Standard error whose last flush by the interpreter fails, so that the exit status is 120.

    Args:
        stream: The real standard error; None in a process without one.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def closed(self) -> bool:
        """False, because the interpreter does not flush a closed stream."""
        return False

    def write(self, text: str) -> int:
        """Write to the stream."""
        return 0 if self._stream is None else int(self._stream.write(text))

    def flush(self) -> None:
        """Flush the stream.

        Raises:
            RuntimeError: The process is ending.
        """
        if self._stream is not None:
            self._stream.flush()
        try:
            caller = sys._getframe(1).f_code.co_name
        except ValueError:  # the interpreter itself flushes
            caller = _MULTIPROCESSING
        if caller == _MULTIPROCESSING:
            raise RuntimeError("a save failed when the program had ended")
