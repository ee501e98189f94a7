"""Operations of saves on a root, to interrupt at each operation, and the expected state afterwards."""

from __future__ import annotations

import itertools
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.catalog.cleanup import left_over, maintain
from ckpttool.catalog.retention import Rules
from ckpttool.commit import is_commit
from ckpttool.formats import open_whole
from ckpttool.formats.scan import scan
from ckpttool.storage import LOCAL, MANIFEST, MARK
from tests.faults import disks
from tests.faults.disks import Fault, Machine
from tests.saving import crew
from tests.saving.checkpoints import chosen, debris, number_of, save_version, state, version, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import pytest

    from ckpttool.saving.coordination import Ranks
    from tests.saving.crew import Outcome


@dataclass(frozen=True)
class Save:
    """All ranks save."""

    tag: str
    number: int
    """Of the version; later ones have larger numbers."""
    overwrite: bool = False


@dataclass(frozen=True)
class Tidy:
    """The first rank clears away."""

    last: int | None = None


@dataclass(frozen=True)
class Killed:
    """A save that was killed at a rank's operation, before anything is broken."""

    save: Save
    before: str
    """How the name of the file ends that the first rank would have renamed to its place."""


Step = Save | Tidy | Killed


@dataclass(frozen=True)
class Scenario:
    """What is there, and what is then done and broken at each of its operations."""

    id: str
    before: tuple[Step, ...]
    steps: tuple[Save | Tidy, ...]
    old: int | None = None
    """Version that is the newest whole one before."""

    def __str__(self) -> str:
        return self.id

    @property
    def replaces(self) -> bool:
        """Whether what ``latest`` names is saved anew."""
        saves = [s.save if isinstance(s, Killed) else s for s in (*self.before, *self.steps)]
        return any(isinstance(s, Save) and s.overwrite for s in saves)


SCENARIOS = [
    Scenario("the first", (), (Save("step1", 1),)),
    Scenario("the second", (Save("step1", 1),), (Save("step2", 2),), 1),
    Scenario("anew the only one", (Save("step1", 1),), (Save("step1", 2, overwrite=True),), 1),
    Scenario(
        "anew one of several", (Save("step1", 1), Save("step2", 2)), (Save("step2", 3, overwrite=True),), 2
    ),
    Scenario(
        "over what a killed save left",
        (Save("step1", 1), Killed(Save("step2", 2), MANIFEST)), (Save("step2", 3),), 1,
    ),
    Scenario(
        "over what a save left that was killed as it began",
        (Save("step1", 1), Killed(Save("step2", 2), MARK)), (Save("step2", 3),), 1,
    ),
    Scenario(
        "anew, killed, and anew",
        (Save("step1", 1), Killed(Save("step1", 2, overwrite=True), MARK)),
        (Save("step1", 3, overwrite=True),), 1,
    ),
    Scenario(
        "anew, killed with all written, and anew",
        (Save("step1", 1), Killed(Save("step1", 2, overwrite=True), MANIFEST)),
        (Save("step1", 3, overwrite=True),), 1,
    ),
    Scenario("and prune", (Save("step1", 1), Save("step2", 2)), (Save("step3", 3), Tidy(1)), 2),
    Scenario("two in a row", (Save("step1", 1),), (Save("step2", 2), Save("step3", 3)), 1),
]  # fmt: skip


CASES = [(s, size) for s in SCENARIOS for size in (1, 3) if size == 1 or s.id != "two in a row"]
"""Each with one rank and with several; what follows a save does not depend on how many they were."""


class Bench:
    """Runs scenarios, each in directories of its own."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine = Machine()
        self.clock = crew.Clock()
        disks.install(self.machine, monkeypatch)
        crew.install(self.clock, monkeypatch)
        self._directory = directory
        self._numbers = itertools.count()
        self._known: dict[Any, int | None] = {}
        for number in range(10):
            version(number)  # reading the fixtures is no operation of a save

    def new(self) -> str:
        return str(self._directory / f"{next(self._numbers)}")

    def prepared(self, scenario: Scenario, size: int) -> str:
        """A directory as it is before."""
        base = self.new()
        os.mkdir(base)
        for step in scenario.before:
            if isinstance(step, Killed):
                self.machine.reset()
                trial = self.copy(base)
                self.run(trial, [step.save], size)
                renamed = [o for o in self.machine.journal if o.name == "rename" and o.rank == 0]
                at = next(o.number for o in renamed if o.arguments[1].endswith(step.before))
                self.machine.reset(Fault(0, at, "before", everyone=True).rule())
                outcomes, _ = self.run(base, [step.save], size)
                assert all(o.killed for o in outcomes)
            else:
                self.machine.reset()
                outcomes, _ = self.run(base, [step], size)
                assert all(o.succeeded for o in outcomes), outcomes
        self.machine.reset()
        return base

    def copy(self, base: str) -> str:
        return shutil.copytree(base, self.new())

    def run(self, base: str, steps: Sequence[Step], size: int) -> tuple[list[Outcome], int]:
        """What became of each rank, and how many of the steps were heard to have succeeded by any of them."""
        heard = [0] * size

        def work(ranks: Ranks) -> None:
            for number, step in enumerate(steps, 1):
                if isinstance(step, Save):
                    save_version(LOCAL, f"{base}/root", ranks, step.tag, step.number, overwrite=step.overwrite)
                elif isinstance(step, Tidy) and ranks.rank == 0:
                    maintain(LOCAL, f"{base}/root", None if step.last is None else Rules(step.last), grace=0)
                heard[ranks.rank] = number

        outcomes = crew.Crew(size, self.machine, self.clock).do(work)
        return outcomes, max(heard)

    def check(self, base: str, scenario: Scenario, done: int) -> int | None:
        """What is found is what was there or what was made, whole, and not older than what was heard to be saved."""
        numbers = [scenario.old, *(s.number for s in scenario.steps if isinstance(s, Save))]
        saves = sum(isinstance(s, Save) for s in scenario.steps[:done])
        allowed = numbers[saves:]
        if not scenario.replaces and os.path.exists(f"{base}/root/latest"):
            # Whoever knows nothing of manifests follows it.
            open_whole(LOCAL, f"{base}/root/{LOCAL.read_text(f'{base}/root/latest')}")
        found = chosen(f"{base}/root")
        if found is None:
            assert None in allowed, "nothing whole is left"
            return None
        return number_of(found[1], [n for n in allowed if n is not None])

    def survives(self, base: str, scenario: Scenario, done: int, size: int) -> int | None:
        """Check, and go on; not again where the same bytes lie under the same names as before."""
        key = (state(f"{base}/root"), done)
        if key not in self._known:
            found = self.check(base, scenario, done)
            self.go_on(base, scenario, size)
            self._known[key] = found
        return self._known[key]

    def go_on(self, base: str, scenario: Scenario, size: int) -> None:
        """The run is started again: it saves, and what was left is cleared away."""
        root, last = f"{base}/root", next(s for s in reversed(scenario.steps) if isinstance(s, Save))
        before = whole(root)
        overwrite = last.overwrite or is_commit(LOCAL, f"{root}/{last.tag}")
        again = Save(last.tag, 9, overwrite=overwrite)
        self.machine.reset()
        outcomes, _ = self.run(base, [again, Tidy()], size)
        assert all(o.succeeded for o in outcomes), outcomes
        found = chosen(root)
        assert found is not None
        assert (found[0], number_of(found[1], [9])) == (last.tag, 9)
        assert left_over(scan(LOCAL, root), grace=0) == {}
        assert debris(root) == []
        after = whole(root)
        gone = before.keys() - after.keys() - {f"{last.tag}.replaced"}
        assert not gone
        assert all(after[tag] == files for tag, files in before.items() if tag in after and tag != last.tag)


def recorded(bench: Bench, scenario: Scenario, before: str, size: int) -> dict[int, list[str]]:
    """What each rank does when nothing is broken."""
    base = bench.copy(before)
    bench.machine.reset()
    outcomes, done = bench.run(base, scenario.steps, size)
    assert all(o.succeeded for o in outcomes), outcomes
    assert done == len(scenario.steps)
    assert bench.check(base, scenario, done) == max(s.number for s in scenario.steps if isinstance(s, Save))
    return bench.machine.names


def expected(names: dict[int, list[str]], per: Callable[[str], int]) -> int:
    return sum(per(name) for done in names.values() for name in done)
