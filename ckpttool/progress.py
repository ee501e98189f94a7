"""How far long work has come."""

from __future__ import annotations

import threading
from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), never from two threads at once."""
Advance = Callable[[int], None]
"""Called with the number of bytes done since the last call, from any thread."""


class Meter:
    """Adds up what threads have done and passes it on."""

    def __init__(self, total: int, callback: Progress | None) -> None:
        self.total = total
        self.done = 0
        self._callback = callback
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> None:
        """Count bytes done since the last call."""
        with self._lock:
            self.done += nbytes
            if self._callback is not None:
                self._callback(self.done, self.total)
