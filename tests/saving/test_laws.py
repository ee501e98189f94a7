"""The law of saves: a restore finds the last commit complete, and nothing else."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from ckpttool.commit import marks
from ckpttool.errors import CkptError
from ckpttool.saving import background, claim
from ckpttool.saving.coordination import Alone, RankError
from ckpttool.saving.files import write_files
from ckpttool.storage import LOCAL, MANIFEST
from tests.saving import crew
from tests.saving.checkpoints import Intercepted, save_version, whole
from tests.saving.test_any_history import History, sizes, tags

if TYPE_CHECKING:
    from tests.faults.disks import Fault

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("CKPTTOOL_TEST_HISTORIES", "15"))
"""10,000 were run once."""
PHASES = tuple(phase for phase in Phase if EXAMPLES <= 1000 or phase not in {Phase.shrink, Phase.explain})  # takes long


class Law(History):
    """What the history of one root may hold besides saves, crashes and prunes."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = False
        """Whether the program ends while it saves in the background."""
        self.failed: list[bool] = []
        self.patch.setattr(background, "_fail_process", lambda: self.failed.append(True))

    def _save(self, tag: str, size: int, *, overwrite: bool, fault: Fault | None) -> list[crew.Outcome]:
        if not self.ends:
            return super()._save(tag, size, overwrite=overwrite, fault=fault)
        outcomes: list[crew.Outcome] = []

        def save() -> CkptError | None:
            begun.wait(30)
            outcomes.extend(super(Law, self)._save(tag, size, overwrite=overwrite, fault=fault))
            if outcomes[0].error is not None and not isinstance(outcomes[0].error, CkptError):
                raise outcomes[0].error  # as if the rank had been killed
            return outcomes[0].error

        begun, own = threading.Event(), background.Background()
        self.failed.clear()
        own.start(save)
        begun.set()
        background._end()  # what the interpreter calls when the main thread has ended
        assert not own.running
        assert len(outcomes) == size
        assert bool(self.failed) == (not outcomes[0].succeeded)
        return outcomes

    @rule(tag=tags, size=sizes, overwrite=st.booleans())
    def program_ends_while_it_saves(self, tag: str, size: int, overwrite: bool) -> None:
        self.ends = True
        self.save(tag, size, overwrite)
        self.ends = False

    @rule(
        tag=tags, size=sizes, overwrite=st.booleans(), at=st.integers(0, 70), rank=st.integers(0, 2),
        how=st.sampled_from(["before", "after", "EIO", "ENOSPC"]), everyone=st.booleans(),
    )  # fmt: skip
    def program_ends_while_a_save_breaks(
        self, tag: str, size: int, overwrite: bool, at: int, rank: int, how: str, everyone: bool
    ) -> None:
        self.ends = True
        self.broken_save(tag, size, overwrite, at, rank, how, everyone)
        self.ends = False

    @rule(data=st.data(), days=st.sampled_from([-1000, -1, 1, 1000]))
    def clock_jumps(self, data: Any, days: int) -> None:
        """All that one save has written seems to be of another time, or ``latest`` does."""
        names = sorted(os.listdir(self.root)) if os.path.isdir(self.root) else []
        if not names:
            return
        path = f"{self.root}/{data.draw(st.sampled_from(names))}"
        then = time.time() + 86400 * days
        for above, _, files in os.walk(path):
            for name in files:
                os.utime(f"{above}/{name}", (then, then))
        os.utime(path, (then, then))

    @rule(tag=tags, size=st.integers(2, 3), overwrite=st.booleans())
    def one_rank_asks_for_something_else(self, tag: str, size: int, overwrite: bool) -> None:
        before = whole(self.root)
        self.machine.reset()

        def begin(ranks: Any) -> None:
            asked = {"tag": tag if ranks.rank else f"{tag} of another", "overwrite": overwrite}
            ranks.together(self.root, lambda: None, asked)

        outcomes = crew.Crew(size, self.machine, self.clock).do(begin)
        assert all(isinstance(o.error, RankError) and "rank 1 has" in str(o.error) for o in outcomes)
        assert whole(self.root) == before

    @rule(size=st.integers(2, 3), rank=st.integers(0, 2), late=st.booleans())
    def one_rank_is_late_or_fails(self, size: int, rank: int, late: bool) -> None:
        self.machine.reset()
        rank %= size
        began = self.clock.monotonic()

        def begin(ranks: Any) -> None:
            def check() -> None:
                if ranks.rank == rank and not late:
                    raise ValueError("not ready")

            if ranks.rank == rank and late:
                self.clock.sleep(3 * crew.TIMEOUT)
            ranks.together(self.root, check)

        outcomes = crew.Crew(size, self.machine, self.clock).do(begin)
        if rank or not late:  # for the first, who decides, the others wait longer
            assert all(f"rank {rank}" in str(o.error) or "not ready" in str(o.error) for o in outcomes)
        limit = 3 * crew.TIMEOUT + claim.SEEN_WITHIN if late else crew.TIMEOUT
        assert self.clock.monotonic() - began <= limit

    @rule(tag=tags, when=st.sampled_from(["before", "after"]), overwrite=st.booleans())
    def another_run_takes_over(self, tag: str, when: str, overwrite: bool) -> None:
        """A run that was thought dead goes on when another has saved the same."""
        if tag in self.sound or tag in self.unsure:
            return
        first, second = self.number % 7 + 1, (self.number + 1) % 7 + 1
        self.number = second
        self.machine.reset()

        def other() -> None:
            marks.ALIVE.clear()
            save_version(LOCAL, self.root, Alone(), tag, second, overwrite=overwrite)

        def interrupted(storage: Any, directory: str, files: Any, *checks: Any) -> Any:
            if when == "before":
                other()
            sums = write_files(storage, directory, files, *checks)
            if when == "after":
                other()
            return sums

        place: Any = Intercepted(LOCAL, interrupted)
        try:
            save_version(place, self.root, Alone(), tag, first, overwrite=overwrite)
        except CkptError as error:
            told = str(error)
        else:
            told = ""
        assert "taken over" in told or "exists already" in told
        self.sound[tag] = second
        self.sound.pop(f"{tag}.replaced", None)
        self.unsure.pop(f"{tag}.replaced", None)
        self.newest = tag

    @precondition(lambda self: self.sound)
    @rule(data=st.data(), cut=st.booleans())
    def manifest_cannot_be_read(self, data: Any, cut: bool) -> None:
        tag = data.draw(st.sampled_from(sorted(self.sound)))
        path = f"{self.root}/{tag}/{MANIFEST}"
        if not os.path.exists(path):
            return
        if cut:
            os.truncate(path, os.path.getsize(path) // 2)
        else:
            with open(path, "wb") as file:
                file.write(b"\x00" * 100)
        assert tag not in whole(self.root)
        self.unsure[tag] = set()
        del self.sound[tag]
        self.newest = None

    @rule(size=sizes)
    def restarted_on_other_ranks(self, size: int) -> None:
        """Saves anew what was found, under the next name that is free."""
        free = [t for t in ("step1", "step2", "step3") if not os.path.exists(f"{self.root}/{t}")]
        if free:
            self.save(free[0], size, False)


TestLaw = Law.TestCase
TestLaw.settings = settings(max_examples=EXAMPLES, stateful_step_count=12, deadline=None, phases=PHASES)
