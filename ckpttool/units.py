"""Parse and format sizes, format durations, and count the progress of long work."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

from ckpttool.errors import ArgumentError
from ckpttool.messages import brief

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}


def parse_size(text: str, name: str = "size") -> int:
    """Return the bytes of "5GB", "512MiB" or "1000".

    Args:
        text: The text.
        name: Name of the argument, for the error.

    Raises:
        ArgumentError: The text is not a size above 0.
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([a-z]*)\s*", text.lower())
    nbytes = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if nbytes < 1:
        raise ArgumentError(name, f"is {brief(text)}, not a size", "write 5GB, 512MiB or a number of bytes")
    return nbytes


_SECONDS = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

MAX_SECONDS = 36500 * 86400
"""The longest duration: a hundred years."""


def parse_duration(text: str, name: str = "duration") -> float:
    """Return the seconds of "7d", "12h", "30min", "90s" or "90".

    Args:
        text: The text.
        name: Name of the argument, for the error.

    Raises:
        ArgumentError: The text is not a duration, or is too long a one.
    """
    match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,6})?)\s*([a-z]*)\s*", text.lower())
    if not match or match[2] not in _SECONDS:
        raise ArgumentError(name, f"is {brief(text)}, not a duration", "write 7d, 12h, 30min or a number of seconds")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds > MAX_SECONDS:
        longest = f"{MAX_SECONDS // 86400}d"
        raise ArgumentError(name, f"is {brief(text)}, not a duration of at most {longest}", f"write {longest} or less")
    return seconds


def format_duration(seconds: float) -> str:
    """Format a duration exactly, as ``parse_duration`` reads it: "7d"."""
    unit = next((unit for unit in ("d", "h", "min") if seconds % _SECONDS[unit] == 0), "s")
    return f"{seconds / _SECONDS[unit]:.15g}{unit}"


def format_size(nbytes: float) -> str:
    """Format bytes in powers of 1000: "1.2 GB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} PB"


def format_age(seconds: float) -> str:
    """Format a duration in the largest unit that fits at least twice: "3 h"; of a future time "3 h ahead"."""
    if seconds <= -1:  # clocks of two machines differ by less
        return f"{format_age(-seconds)} ahead"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def format_ago(seconds: float) -> str:
    """Format how long ago a time was: "3 h ago", or "3 h ahead" for a time to come."""
    age = format_age(seconds)
    return age if seconds <= -1 else f"{age} ago"


Progress = Callable[[int, int], None]
"""Callback with (bytes done, bytes in total); never called from two threads at once."""
Advance = Callable[[int], None]
"""Callback with the number of bytes done since the last call; any thread calls it."""


class Meter:
    """Sums the bytes that threads have done and reports the sum to a callback.

    Args:
        total: Bytes in total.
        callback: Receives the sum; None for none.
        shown: Total to report: of bytes that are read twice each counts half. Default: ``total``.
    """

    def __init__(self, total: int, callback: Progress | None, shown: int | None = None) -> None:
        self.total = total
        self.shown = total if shown is None else shown
        self.done = 0
        self._callback = callback
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> None:
        """Add the bytes done since the last call."""
        with self._lock:
            self.done += nbytes
            if self._callback is not None:
                self._callback(self.done * self.shown // max(self.total, 1), self.shown)
