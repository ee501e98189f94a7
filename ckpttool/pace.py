"""Which of two ways to write is the faster one, by what was measured lately."""

from __future__ import annotations

import threading

_WEIGHT = 0.2
"""Of the newest measurement."""
_FORGOTTEN = 0.997
"""What is left of the other way's cost after each: one that was slow for a moment is tried again some time."""


class Pace:
    """Chooses between writing past the page cache and through it. Threads may share it.

    Neither is the faster one everywhere: past the cache it takes the time of the disk, through it the time to find
    memory and to copy into it, and once too much waits there, that of the disk as well.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._costs: dict[bool, float] = {}
        """Seconds that a byte takes one thread, past the cache (True) and through it."""

    def past_cache(self) -> bool:
        """Whether to write past the cache now."""
        with self._lock:
            if len(self._costs) < 2:
                return True not in self._costs
            return self._costs[True] <= self._costs[False]

    def note(self, past_cache: bool, nbytes: int, seconds: float) -> None:
        """Take in how long a thread took to write something."""
        cost = seconds / nbytes
        with self._lock:
            held = self._costs.get(past_cache)
            self._costs[past_cache] = cost if held is None else held + _WEIGHT * (cost - held)
            other = not past_cache
            if other in self._costs:
                self._costs[other] *= _FORGOTTEN
