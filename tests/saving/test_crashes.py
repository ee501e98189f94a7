"""Whatever dies, and whenever: what is found afterwards is the old checkpoint or the new one, whole."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from ckpttool.candidates import open_whole
from ckpttool.errors import CkptError
from ckpttool.manifest import is_commit
from ckpttool.retention import Rules
from ckpttool.saving.disk import Disk
from ckpttool.saving.ranks import RankError
from ckpttool.saving.upkeep import left_over, tidy
from ckpttool.storage import LOCAL, MANIFEST, MARK
from tests.saving import crew, disks
from tests.saving.checkpoints import chosen, debris, number_of, save_version, state, version, whole
from tests.saving.disks import CHANGES, Fault, Machine, PowerFailure, build

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ckpttool.saving.ranks import Ranks
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
                self.machine.reset(Fault(0, at, "before", everyone=True))
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
                    save_version(
                        Disk(), f"{base}/root", ranks, step.tag, step.number, overwrite=step.overwrite,
                        timeout=crew.TIMEOUT,
                    )  # fmt: skip
                elif isinstance(step, Tidy) and ranks.rank == 0:
                    tidy(Disk(), f"{base}/root", None if step.last is None else Rules(step.last), grace=0)
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
        assert left_over(Disk(), root, grace=0) == []
        assert debris(root) == []
        after = whole(root)
        gone = before.keys() - after.keys() - {f"{last.tag}.replaced"}
        assert not gone
        assert all(after[tag] == files for tag, files in before.items() if tag in after and tag != last.tag)


@pytest.fixture
def bench(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(directory, monkeypatch)


def recorded(bench: Bench, scenario: Scenario, before: str, size: int) -> dict[int, list[str]]:
    """What each rank does when nothing is broken."""
    base = bench.copy(before)
    bench.machine.reset()
    outcomes, done = bench.run(base, scenario.steps, size)
    assert all(o.succeeded for o in outcomes), outcomes
    assert done == len(scenario.steps)
    assert bench.check(base, scenario, done) == max(s.number for s in scenario.steps if isinstance(s, Save))
    return bench.machine.names


def kills(names: dict[int, list[str]], *, everyone: bool) -> Iterator[Fault]:
    for rank, done in sorted(names.items()):
        for number, name in enumerate(done):
            if name in CHANGES:
                # After one operation and before the next of the same rank is the same place: both, as others go on.
                for how in ("before", "amid", "after") if name == "pwrite" else ("before", "after"):
                    yield Fault(rank, number, how, everyone=everyone)


def failures(names: dict[int, list[str]]) -> Iterator[Fault]:
    for rank, done in sorted(names.items()):
        for number, name in enumerate(done):
            yield Fault(rank, number, "EIO")
            if name in {"create", "pwrite", "ftruncate", "fsync", "rename", "mkdir"}:
                yield Fault(rank, number, "ENOSPC")
            if name == "pwrite":
                yield Fault(rank, number, "short")


def expected(names: dict[int, list[str]], per: Callable[[str], int]) -> int:
    return sum(per(name) for done in names.values() for name in done)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.id)
def test_killed(scenario: Scenario, size: int, bench: Bench, crash_points: Callable[[int], None]) -> None:
    before = bench.prepared(scenario, size)
    names = recorded(bench, scenario, before, size)
    assert set(names) == set(range(size))
    tried = 0
    together = (False, True) if size > 2 else (False,)
    for everyone in together:
        for fault in kills(names, everyone=everyone):
            base = bench.copy(before)
            bench.machine.reset(fault)
            outcomes, done = bench.run(base, scenario.steps, size)
            assert bench.machine.struck, fault
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
    once = expected(names, lambda name: 0 if name not in CHANGES else 3 if name == "pwrite" else 2)
    assert tried == once * len(together)
    crash_points(tried)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.id)
def test_failed(scenario: Scenario, size: int, bench: Bench, crash_points: Callable[[int], None]) -> None:
    before = bench.prepared(scenario, size)
    names = recorded(bench, scenario, before, size)
    tried = 0
    for fault in failures(names):
        base = bench.copy(before)
        bench.machine.reset(fault)
        outcomes, done = bench.run(base, scenario.steps, size)
        assert bench.machine.struck, fault
        try:
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
    disturbing = {"create", "pwrite", "ftruncate", "fsync", "rename", "mkdir"}
    assert tried == expected(names, lambda name: 1 + (name in disturbing) + (name == "pwrite"))
    crash_points(tried)


@pytest.mark.parametrize("size", [3])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.id)
def test_power_failure(scenario: Scenario, size: int, bench: Bench, crash_points: Callable[[int], None]) -> None:
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
    for number in range(len(journal) + 1):
        if number:
            disk.apply(journal[number - 1])
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
