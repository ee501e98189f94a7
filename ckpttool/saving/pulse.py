"""The pulse of each rank in the store, by which ranks that wait for another one learn that its process has ended."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

BEAT = 10.0
"""Seconds between two beats."""
MISSED = 4
"""Beats after which a rank without a pulse is lost: some calls of C code let no other thread of a process run."""


class Counters(Protocol):
    """The method of ``torch.distributed.Store`` that a pulse uses."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; return its new value."""


class Pulse:
    """Counts the beats of this rank in the store, in a thread, until the process ends.

    Args:
        store: A store that all ranks reach, through a connection of its own: another thread may wait with its own.
        rank: Number of this rank.
        beat: Seconds between two beats; the same on all ranks.
        current: Whether the store is still used; the thread ends when it is not.
    """

    def __init__(
        self, store: Counters, rank: int, *, beat: float = BEAT, current: Callable[[], bool] = lambda: True
    ) -> None:
        self.beat = beat
        self._store = store
        self._rank = rank
        self._current = current
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckpttool-pulse", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()
        atexit.register(self.stop)  # a thread must not return from the store while the interpreter ends

    def stop(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join(self.beat)

    def of(self, rank: int) -> int:
        """Return the beats of a rank so far; 0 if its pulse never began."""
        return self._store.add(_key(rank), 0)

    def _run(self) -> None:
        while self._current():
            try:
                self._store.add(_key(self._rank), 1)
            except RuntimeError:  # the process that holds the store has ended
                return
            if self._end.wait(self.beat):
                return


class Watch:
    """Watches the pulses of ranks while this rank waits for them.

    A rank is lost if several looks, each a beat after the one before, find no beat between them: where this process
    was stopped too, it looks again first.

    Args:
        pulse: The pulse of this rank; None to watch none.
        ranks: Returns the ranks that it waits for.
    """

    def __init__(self, pulse: Pulse | None, ranks: Callable[[], Iterable[int]]) -> None:
        self.seconds = 0.0 if pulse is None else MISSED * pulse.beat
        self._pulse = pulse
        self._ranks = ranks
        self._next = time.monotonic()
        self._seen: dict[int, tuple[int, int]] = {}

    def lost(self) -> list[int]:
        """Return the ranks that are lost; a rank whose pulse never began is not one."""
        if self._pulse is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._pulse.beat
            with contextlib.suppress(RuntimeError):  # without the store the ranks fail in their next call of it
                beats = {rank: self._pulse.of(rank) for rank in self._ranks()}
                self._seen = {rank: self._look(now, *self._seen.get(rank, (0, 0))) for rank, now in beats.items()}
        return [rank for rank, (_, missed) in self._seen.items() if missed >= MISSED]

    @staticmethod
    def _look(beats: int, before: int, missed: int) -> tuple[int, int]:
        """Return the beats of a rank, and how many looks have missed a new one."""
        return beats, missed + 1 if beats == before > 0 else 0


def _key(rank: int) -> str:
    return f"pulse/{rank}"
