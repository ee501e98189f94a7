"""A failure at any operation: all ranks report it and the previous checkpoint stays, or the save succeeds."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from ckpttool.errors import CkptError
from tests import sampling
from tests.faults.disks import Fault
from tests.saving.checkpoints import debris
from tests.saving.scenarios import CASES, Killed, Save, Scenario, expected, recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.saving.scenarios import Bench

pytestmark = pytest.mark.slow


def failures(names: dict[int, list[str]]) -> Iterator[Fault]:
    for rank, done in sorted(names.items()):
        for number, name in enumerate(done):
            yield Fault(rank, number, "EIO")
            if name in {"create", "pwrite", "ftruncate", "fsync", "rename", "mkdir"}:
                yield Fault(rank, number, "ENOSPC")
            if name == "pwrite":
                yield Fault(rank, number, "short")


POINTS = 12
"""Points of failure that are tried of each case; each case tries others."""


@pytest.mark.parametrize(("scenario", "size"), CASES, ids=str)
def test_failed(scenario: Scenario, size: int, bench: Bench, crash_points: Callable[[int], None]) -> None:
    before = bench.prepared(scenario, size)
    names = recorded(bench, scenario, before, size)
    every = list(failures(names))
    disturbing = {"create", "pwrite", "ftruncate", "fsync", "rename", "mkdir"}
    assert len(every) == expected(names, lambda name: 1 + (name in disturbing) + (name == "pwrite"))
    tried = 0
    for fault in sampling.some(every, POINTS, key=f"{scenario.id} {size}"):
        base = bench.copy(before)
        rule = fault.rule()
        bench.machine.reset(rule)
        outcomes, done = bench.run(base, scenario.steps, size)
        assert rule.done, fault
        try:
            swept = not any(isinstance(step, Killed) for step in scenario.before)
            if swept and not all(o.succeeded for o in outcomes):
                assert [d for d in debris(f"{base}/root") if d.endswith(".partial")] == []
            found = bench.survives(base, scenario, done, size)
            if not all(o.succeeded for o in outcomes):
                errors = {str(o.error) for o in outcomes}
                assert all(isinstance(o.error, CkptError) for o in outcomes), outcomes
                assert len(errors) == 1, errors  # the same on all ranks
                assert base in errors.pop()
                numbers = [scenario.old, *(s.number for s in scenario.steps if isinstance(s, Save))]
                saves = sum(isinstance(s, Save) for s in scenario.steps[:done])
                assert found == numbers[saves], f"{found} is there, although it was said not to be"
        except (AssertionError, CkptError) as error:
            raise AssertionError(f"{fault} ({names[fault.rank][fault.number]}): {error}: {outcomes}") from error
        shutil.rmtree(base)
        tried += 1
    crash_points(tried)
