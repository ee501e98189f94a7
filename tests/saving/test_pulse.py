from __future__ import annotations

import itertools
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from ckpttool.errors import StorageError
from ckpttool.saving import coordination, two_phase
from ckpttool.saving.coordination import Alone, Ranks, StoppedError
from ckpttool.saving.files import PlainFile
from ckpttool.saving.pulse import MISSED, Pulse, Watch
from ckpttool.saving.two_phase import Request
from ckpttool.storage import LOCAL
from tests.faults.disks import Machine
from tests.saving import crew

if TYPE_CHECKING:
    from collections.abc import Callable


class _Beats:
    """The counters of other ranks."""

    def __init__(self, **of_ranks: list[int]) -> None:
        self._of_ranks = {f"pulse/{name[1:]}": iter(beats) for name, beats in of_ranks.items()}

    def add(self, key: str, amount: int) -> int:
        return next(self._of_ranks[key])


def _lost(monkeypatch: pytest.MonkeyPatch, store: _Beats, ranks: list[int], looks: int) -> list[int]:
    clock = itertools.count(100, 10)
    monkeypatch.setattr(time, "monotonic", lambda: 90.0)
    watch = Watch(Pulse(store, 0, beat=10), lambda: ranks)
    assert watch.seconds == 10 * MISSED
    found: list[int] = []
    for _ in range(looks):
        now = next(clock)
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        found = watch.lost()
    return found


def test_a_rank_is_lost_after_some_looks_without_a_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, dead, never = [*range(5, 20)], [7] * 15, [0] * 15
    for looks in range(1, MISSED + 1):
        assert _lost(monkeypatch, _Beats(r1=alive, r2=dead, r3=never), [1, 2, 3], looks) == []
    assert _lost(monkeypatch, _Beats(r1=alive, r2=dead, r3=never), [1, 2, 3], MISSED + 1) == [2]
    stopped = [3, 4, 4, 4, 4, 5, 5, 5, 5, 5, 5]
    assert _lost(monkeypatch, _Beats(r1=stopped), [1], 9) == []
    assert _lost(monkeypatch, _Beats(r1=stopped), [1], 10) == [1]


def test_a_look_is_a_beat_after_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 50.0)
    watch = Watch(Pulse(_Beats(r1=[7, 7]), 0, beat=10), lambda: [1])
    for _ in range(2 * MISSED):
        assert watch.lost() == []


def test_without_a_pulse_no_rank_is_lost() -> None:
    watch = Watch(None, lambda: pytest.fail("no rank is asked for"))
    assert watch.lost() == []


class _Counting:
    def __init__(self, ends_after: int) -> None:
        self.left = ends_after
        self.ended = threading.Event()

    def add(self, key: str, amount: int) -> int:
        assert (key, amount) == ("pulse/4", 1)
        self.left -= 1
        if self.left < 0:
            self.ended.set()
            raise RuntimeError("the connection was closed")
        return 1


def test_the_thread_ends_with_the_store() -> None:
    store = _Counting(3)
    own = Pulse(store, 4, beat=0.01)
    own.start()
    assert store.ended.wait(30)
    own.stop()
    assert store.left == -1


def test_the_thread_ends_when_the_store_is_not_used_any_more() -> None:
    used = iter([True, True, False])
    store = _Counting(5)
    own = Pulse(store, 4, beat=0.01, current=lambda: next(used))
    own.start()
    own._thread.join(30)
    assert store.left == 3


# ------------------------------------------------------------------------------------------------------- a failed rank


class _Slow:
    """A payload whose read takes time."""

    nbytes = 1

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done

    def read(self, start: int, end: int) -> memoryview:
        time.sleep(0.1)
        self._done()
        return memoryview(b"x")[start:end]


class _Failing:
    """A payload that cannot be read."""

    nbytes = 1

    def read(self, start: int, end: int) -> memoryview:
        raise StorageError("the device", "input/output error", "check the disk")


FILES = 100


@pytest.mark.parametrize("failing", [0, 1])
def test_ranks_that_write_stop_when_another_one_has_failed(failing: int, tmp_path: Any) -> None:
    root = str(tmp_path / "root")
    written: list[str] = []

    def save(ranks: Ranks) -> None:
        names = [f"{ranks.rank}-{number}" for number in range(FILES)]
        if ranks.rank == failing:
            files = [PlainFile(names[0], _Failing())]
        else:
            files = [PlainFile(name, _Slow(lambda: written.append("one"))) for name in names]
        two_phase.save(LOCAL, root, ranks, Request("step1", 1, 2), files)

    ranks = crew.Crew(3, Machine(), crew.Clock())  # in real time: the clock knows one thread of each rank
    outcomes = ranks.do(save)
    assert {str(outcome.error) for outcome in outcomes} == {
        f"{root}/step1: was not saved: rank {failing}: the device: input/output error; check the disk; "
        "nothing was committed"
    }
    assert 2 <= len(written) < FILES
    assert os.listdir(root) == []
    assert [outcome.result for outcome in ranks.do(lambda ranks: ranks.exchange("next", lambda: 1, sum))] == [3, 3, 3]


def test_a_rank_that_works_looks_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = crew.Clock()
    crew.install(clock, monkeypatch)
    store = crew.MemoryStore(Machine())
    first, second = (Ranks(rank, 2, store, "crew", timeout=0.1) for rank in range(2))
    first.check_others()
    with pytest.raises(coordination.RankError, match="rank 1 was not heard of in time"):
        first.exchange("save", lambda: 1, sum)
    second.check_others()
    clock._now += coordination.LOOK_SECONDS
    with pytest.raises(StoppedError, match="stopped, because another rank has failed"):
        second.check_others()
    Alone().check_others()
