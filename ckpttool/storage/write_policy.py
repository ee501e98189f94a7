"""Which of two ways to write is taken: past the page cache, or through it."""

from __future__ import annotations

import threading

_WEIGHT = 0.5
"""Of the newest measurement."""
_TRIALS = 0.04
"""Part of the time that may be lost by trying the way that was the slower one: it may no longer be."""


class Pace:
    """Chooses for each write to one of several files. Threads may share it.

    Past the cache it takes the time of the disk; through it, the time to find memory and to copy into it, and once too
    much waits there, that of the disk as well. Where threads write a file each both are kept busy: half of the writes
    go past the cache, the others through it, and each way takes what it can. Into a file that is written alone, or by
    many, they go the way that was the faster one lately, for a write of one kind keeps those of the other out of its
    file.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writing: dict[object, int] = {}
        """Writes to each file at this moment."""
        self._past = 0
        """Those of them that go past the cache."""
        self._costs: dict[bool, float] = {}
        """Seconds that a byte takes one thread, past the cache (True) and through it."""
        self._to_lose = 0.0
        """Seconds that may be lost by trying."""

    def begin(self, file: object, nbytes: int, *, by_one: bool) -> bool:
        """Begin to write about so many bytes; whether past the cache.

        Args:
            file: Which file, by anything that is the same for it alone.
            nbytes: How many.
            by_one: Whether one thread alone writes it.
        """
        with self._lock:
            if not by_one or self._writing.keys() <= {file}:
                past_cache = self._faster(nbytes)
            else:
                past_cache = 2 * self._past <= sum(self._writing.values())
            self._writing[file] = self._writing.get(file, 0) + 1
            self._past += past_cache
            return past_cache

    def end(self, file: object, past_cache: bool, nbytes: int, seconds: float) -> None:
        """Take in how long it took; of no bytes nothing is learned."""
        with self._lock:
            self._past -= past_cache
            self._writing[file] -= 1
            if not self._writing[file]:
                del self._writing[file]
            if not nbytes:
                return
            cost = seconds / nbytes
            held, other = self._costs.get(past_cache), self._costs.get(not past_cache)
            if other is not None and other < (held if held is not None else cost):
                self._to_lose = 0.0
            else:
                self._to_lose += _TRIALS * seconds
            self._costs[past_cache] = cost if held is None else held + _WEIGHT * (cost - held)

    def _faster(self, nbytes: int) -> bool:
        if len(self._costs) < 2:
            return True not in self._costs
        past_cache = self._costs[True] <= self._costs[False]
        lost = nbytes * abs(self._costs[True] - self._costs[False])
        return not past_cache if lost <= self._to_lose else past_cache
