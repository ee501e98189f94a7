"""Ranks as threads of one process, with their own store and simulated time."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.saving import claim, coordination, two_phase
from ckpttool.saving.coordination import Alone, Ranks
from tests.faults.disks import Killed, Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest

TIMEOUT = 5.0
"""Seconds of the crew's own time."""


class Clock:
    """Time that passes only while all ranks wait, and then at once: nobody is late who is not dead."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._now = 0.0
        self._working = 0
        self._asleep: dict[int, float] = {}

    def begin(self, workers: int) -> None:
        self._working = workers
        self._asleep.clear()

    def end(self) -> None:
        """A rank has ended."""
        with self._changed:
            self._working -= 1
            self._pass()

    def monotonic(self) -> float:
        return self._now

    def time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        me = threading.get_ident()
        with self._changed:
            self._asleep[me] = wake = self._now + seconds
            self._pass()
            while self._now < wake:
                self._changed.wait()
            del self._asleep[me]

    def _pass(self) -> None:
        if self._asleep and len(self._asleep) >= self._working:
            self._now = max(self._now, min(self._asleep.values()))
            self._changed.notify_all()


class MemoryStore:
    """As ``torch.distributed``'s, in memory; dead ranks do not reach it."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._lock = threading.Lock()
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self._machine.living()
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._machine.living()
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        self._machine.living()
        with self._lock:
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(total).encode()
            return total

    def check(self, keys: Sequence[str]) -> bool:
        self._machine.living()
        return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> bool:
        self._machine.living()
        return self.values.pop(key, None) is not None


@dataclass(frozen=True)
class Outcome:
    """What became of a rank."""

    result: Any = None
    error: BaseException | None = None

    @property
    def killed(self) -> bool:
        return isinstance(self.error, Killed)

    @property
    def succeeded(self) -> bool:
        return self.error is None


class Crew:
    """So many ranks.

    Args:
        size: How many.
        machine: What they work on.
        clock: Their time.
    """

    def __init__(self, size: int, machine: Machine, clock: Clock) -> None:
        self._machine = machine
        self.clock = clock
        self.store = MemoryStore(machine)
        several = [Ranks(rank, size, self.store, "crew", timeout=TIMEOUT) for rank in range(size)]
        self.ranks = several if size > 1 else [Alone()]

    def do(self, task: Callable[[Ranks], Any]) -> list[Outcome]:
        """Let every rank do something; what became of each."""
        outcomes: list[Outcome] = [Outcome()] * len(self.ranks)

        def work(number: int) -> None:
            self._machine.rank = number
            try:
                outcomes[number] = Outcome(task(self.ranks[number]))
            except BaseException as error:
                outcomes[number] = Outcome(error=error)
            finally:
                self.clock.end()
                self._machine.rank = None

        self.clock.begin(len(self.ranks))
        threads = [threading.Thread(target=work, args=(r,)) for r in range(1, len(self.ranks))]
        for thread in threads:
            thread.start()
        work(0)
        for thread in threads:
            thread.join()
        return outcomes


def install(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the protocol live in the crew's time."""
    for module in (coordination, two_phase, claim):
        monkeypatch.setattr(module, "time", clock)
