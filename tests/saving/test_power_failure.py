"""Any state of a disk after a power failure: the old checkpoint or the new one, complete."""

from __future__ import annotations

import random
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from ckpttool.errors import CkptError
from tests import sampling
from tests.faults.disks import CHANGES
from tests.faults.power_failure import PowerFailure, build
from tests.saving.scenarios import SCENARIOS, Scenario, expected

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.saving.scenarios import Bench

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.id)
def test_power_failure(scenario: Scenario, bench: Bench, crash_points: Callable[[int], None]) -> None:
    size = 3
    before = bench.prepared(scenario, size)
    base = bench.copy(before)
    disk = PowerFailure(base)
    bench.machine.reset()
    random_numbers = random.Random(f"{scenario.id} {size}")  # noqa: S311
    ends: list[int] = []  # how long the journal was when each step had succeeded
    for step in scenario.steps:
        outcomes, _ = bench.run(base, [step], size)
        assert all(o.succeeded for o in outcomes)
        ends.append(len(bench.machine.journal))
    journal, names = bench.machine.journal, bench.machine.names
    seen: set[Any] = set()
    tried = sampling.some(range(len(journal) + 1), 26, key=scenario.id)
    for number in range(len(journal) + 1):
        if number:
            disk.apply(journal[number - 1])
        if number not in tried:
            continue
        done = sum(end <= number for end in ends)
        for tree in disk.states(random_numbers, some=2):
            key = (done, frozenset((k, None if v is None else (hash(v[0]), v[1])) for k, v in tree.items()))
            if key in seen:
                continue
            seen.add(key)
            broken = bench.new()
            build(tree, broken)
            try:
                bench.check(broken, scenario, done)
                if len(seen) % 5 == 0:
                    bench.go_on(broken, scenario, size)
            except (AssertionError, CkptError) as error:
                last = journal[number - 1] if number else None
                raise AssertionError(f"after {last and (last.rank, last.name, last.arguments[0])}: {error}") from error
            shutil.rmtree(broken)
    assert len(journal) == expected(names, lambda name: name in CHANGES)
    crash_points(len(seen))
