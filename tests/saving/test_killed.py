"""A death at any operation: a restore finds the old checkpoint or the new one, complete."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from ckpttool.errors import CkptError
from ckpttool.saving.coordination import RankError
from tests import sampling
from tests.faults.disks import CHANGES, Fault
from tests.saving.scenarios import CASES, Scenario, expected, recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.saving.scenarios import Bench

pytestmark = pytest.mark.slow


def kills(names: dict[int, list[str]], *, everyone: bool) -> Iterator[Fault]:
    for rank, done in sorted(names.items()):
        for number, name in enumerate(done):
            if name in CHANGES:
                # After one operation and before the next of the same rank is the same place: both, as others go on.
                for how in ("before", "amid", "after") if name == "pwrite" else ("before", "after"):
                    yield Fault(rank, number, how, everyone=everyone)


POINTS = 12
"""Points of failure that are tried of each case; each case tries others."""


@pytest.mark.parametrize(("scenario", "size"), CASES, ids=str)
def test_killed(scenario: Scenario, size: int, bench: Bench, crash_points: Callable[[int], None]) -> None:
    before = bench.prepared(scenario, size)
    names = recorded(bench, scenario, before, size)
    assert set(names) == set(range(size))
    tried = 0
    together = (False, True) if size > 2 else (False,)
    for everyone in together:
        every = list(kills(names, everyone=everyone))
        assert len(every) == expected(names, lambda name: 0 if name not in CHANGES else 3 if name == "pwrite" else 2)
        points = POINTS // len(together)
        for fault in sampling.some(every, points, key=f"{scenario.id} {size} {everyone}"):
            base = bench.copy(before)
            rule = fault.rule()
            bench.machine.reset(rule)
            outcomes, done = bench.run(base, scenario.steps, size)
            assert rule.done, fault
            assert outcomes[fault.rank].killed, fault
            for rank, outcome in enumerate(outcomes):
                if outcome.killed or outcome.succeeded:
                    assert not outcome.killed or everyone or rank == fault.rank
                    continue
                assert isinstance(outcome.error, RankError), (fault, outcome)
                assert f"rank {fault.rank} was not heard of" in str(outcome.error), (fault, outcome)
            try:
                bench.survives(base, scenario, done, size)
            except (AssertionError, CkptError) as error:
                raise AssertionError(f"{fault} ({names[fault.rank][fault.number]}): {error}") from error
            shutil.rmtree(base)
            tried += 1
    crash_points(tried)
