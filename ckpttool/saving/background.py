"""A save that runs beside the train loop, and is over before the program is.

At the end of a program Python first closes all pools of ``concurrent.futures``, of every library, and only then waits
for threads: a save that is still running would fail there. So it is waited for before that. An error that nobody has
heard of by then shows in the exit status.

Source: CPython 3.10 to 3.13, Lib/threading.py (``_register_atexit``, ``_shutdown``: the hooks run in reverse order),
Lib/concurrent/futures/thread.py (``_python_exit``) and Python/pylifecycle.c (``flush_std_files``, and ``Py_RunMain``:
status 120).
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  registers its hook, which ours must come after to run before it
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
"""The function of ``multiprocessing.util`` that flushes at the end of a child process."""


class Background:
    """Runs one save at a time in a thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failed: CkptError | None = None

    def start(self, save: Callable[[], CkptError | None]) -> None:
        """Run a save; ``wait`` first for the one before it.

        Args:
            save: Returns its error.

        Raises:
            RuntimeError: The program is ending, and no thread can be started.
        """

        def run() -> None:
            try:
                self._failed = save()
            except BaseException as error:  # even the log may be closed by now
                problem = f"{type(error).__name__}: {error}"
                self._failed = PlanError("a save", f"ended with {problem}", "it may not be committed: see the log")

        _wait_at_end()
        thread = threading.Thread(target=run, name="ckpttool-save")
        thread.start()
        self._thread = thread
        _running[id(self)] = self

    @property
    def running(self) -> bool:
        """Whether a save is running now."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the save is over.

        Raises:
            CkptError: It failed; raised once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        _running.pop(id(self), None)
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed


_running: dict[int, Background] = {}
"""What nobody has waited for yet."""
_process = 0
"""The process that waits at its end."""


def _wait_at_end() -> None:
    global _process  # a forked child has hooks of its own to run, and no save of its parent's
    if _process == os.getpid():
        return
    _running.clear()
    if not _process:
        # None of the public hooks runs before the pools are closed.
        threading._register_atexit(_end)  # type: ignore[attr-defined]
    _process = os.getpid()


def _end() -> None:
    if _process != os.getpid():
        return
    for background in list(_running.values()):
        try:
            background.wait()
        except CkptError:  # the log has it
            _fail_process()
        except KeyboardInterrupt:
            LOG.error("interrupted: a save was still running, and may not be committed")  # noqa: TRY400
            _fail_process()
            raise


def _fail_process() -> None:
    """Let the process end with status 120, and everything else that is still to end it run as ever."""
    if not isinstance(sys.stderr, _FailingStream):
        sys.stderr = _FailingStream(sys.stderr)


class _FailingStream:
    """Standard error that cannot be flushed by the interpreter's end, which makes the exit status 120.

    Args:
        stream: What it is otherwise; None where a process has none.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def closed(self) -> bool:
        """False: what is closed is not flushed."""
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
        except ValueError:  # no Python code runs any more
            caller = _MULTIPROCESSING
        if caller == _MULTIPROCESSING:
            raise RuntimeError("a save failed when the program had ended")
