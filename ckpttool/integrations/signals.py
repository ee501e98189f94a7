"""Note the signals that announce the end of a run."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

from ckpttool.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence


class SignalWatch:
    """Notes signals, and calls the previous handlers; ``restore`` sets those again.

    Args:
        numbers: The signals.

    Raises:
        ArgumentError: A number is not a signal or cannot be handled, or this is not the main thread.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self.noted = False
        """Whether a signal has arrived."""
        self._before: dict[int, Any] = {}
        try:
            for number in numbers:
                self._watch(number)
        except ArgumentError:
            self.restore()
            raise

    def _watch(self, number: int) -> None:
        try:
            before = signal.getsignal(number)
        except (ValueError, TypeError) as error:
            raise ArgumentError("signals", f"has {number!r}, which is not a signal", "use signal.SIGTERM") from error
        try:
            signal.signal(number, self._note)
        except OSError as error:
            problem = f"has {signal.Signals(number).name}, which no program can handle"
            raise ArgumentError("signals", problem, "use signal.SIGTERM") from error
        except ValueError as error:
            problem = f"cannot be watched in the thread {threading.current_thread().name}"
            raise ArgumentError("signals", problem, "make the manager in the main thread") from error
        self._before[number] = before

    def _note(self, number: int, frame: Any) -> None:
        self.noted = True
        before = self._before.get(number)
        if callable(before):
            before(number, frame)

    def restore(self) -> None:
        """Set the previous handlers again, except over handlers that other code has set since; main thread only."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if before is not None and signal.getsignal(number) == self._note:
                signal.signal(number, before)
