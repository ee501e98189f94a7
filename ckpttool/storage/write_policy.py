"""Choose between direct I/O and the page cache for each write, by measured speed."""

from __future__ import annotations

import threading

_TRIALS = 0.04
"""Fraction of the time to spend on trials of the slower method, which may have become the faster one."""


class Pace:
    """Chooses the method of each write to one of several files. Threads may share it.

    Direct I/O takes the time of the disk. The page cache takes the time to allocate memory and to copy; when too many
    bytes await writeback, it takes the time of the disk too. If several threads write one file each, half of the writes
    use direct I/O and the others the page cache, which keeps disk and memory busy. A single file, or a file of several
    threads, gets the method that was faster recently, because the two methods lock each other out of a file. One slow
    write changes nothing: the faster of the last two writes counts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writing: dict[object, int] = {}
        """Running writes by file."""
        self._direct = 0
        """Running writes with direct I/O."""
        self._recent: dict[bool, tuple[float, float]] = {}
        """Seconds per byte of the last two writes of one thread, with direct I/O (True) and through the page cache."""
        self._trial_seconds = 0.0
        """Seconds available for trials."""

    def begin(self, file: object, nbytes: int, *, by_one: bool) -> bool:
        """Begin a write; return whether to use direct I/O.

        Args:
            file: Identifier of the file.
            nbytes: Size of the write in bytes, approximately.
            by_one: Whether only one thread writes the file.
        """
        with self._lock:
            if not by_one or self._writing.keys() <= {file}:
                direct = self._faster(nbytes)
            else:
                direct = 2 * self._direct <= sum(self._writing.values())
            self._writing[file] = self._writing.get(file, 0) + 1
            self._direct += direct
            return direct

    def end(self, file: object, direct: bool, nbytes: int, seconds: float) -> None:
        """End a write and record its time; ``nbytes`` is 0 for a write that is too small to measure."""
        with self._lock:
            self._direct -= direct
            self._writing[file] -= 1
            if not self._writing[file]:
                del self._writing[file]
            if not nbytes:
                return
            cost = seconds / nbytes
            _, last = self._recent.get(direct, (cost, cost))
            other = self._cost(not direct)
            if other is not None and other < min(last, cost):
                self._trial_seconds = 0.0
            else:
                self._trial_seconds += _TRIALS * seconds
            self._recent[direct] = (last, cost)

    def _cost(self, direct: bool) -> float | None:
        """Seconds per byte of a method; None before the first write."""
        recent = self._recent.get(direct)
        return None if recent is None else min(recent)

    def _faster(self, nbytes: int) -> bool:
        direct, cached = self._cost(True), self._cost(False)
        if direct is None or cached is None:
            return direct is None
        lost = nbytes * abs(direct - cached)
        return (direct <= cached) != (lost <= self._trial_seconds)
