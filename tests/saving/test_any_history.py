"""Saves, crashes, failures, removals and manual changes in any order, against a model of the expected state."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ckpttool.catalog.cleanup import maintain
from ckpttool.catalog.restore_order import candidates, contradiction
from ckpttool.catalog.retention import Rules
from ckpttool.errors import CkptError
from ckpttool.storage import LOCAL, MANIFEST, MARK
from tests.faults import disks
from tests.faults.disks import Fault, Machine
from tests.saving import crew
from tests.saving.checkpoints import chosen, debris, save_version, version, whole
from tests.saving.conftest import MEMORY

pytestmark = pytest.mark.slow

TAGS = ["step1", "step2", "step3"]
tags = st.sampled_from(TAGS)
sizes = st.integers(1, 3)


class History(RuleBasedStateMachine):
    """One root, and what has become of it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = tempfile.mkdtemp(prefix="ckpttool-tests-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None)
        self.root = f"{self.base}/root"
        self.patch = pytest.MonkeyPatch()
        self.machine, self.clock = Machine(), crew.Clock()
        disks.install(self.machine, self.patch)
        crew.install(self.clock, self.patch)
        for number in range(8):
            version(number)
        self.sound: dict[str, int] = {}
        """Tags that must be whole, and which version each is."""
        self.unsure: dict[str, set[int]] = {}
        """Tags that may be whole, and which versions they may be."""
        self.rotten = False
        """Whether a checkpoint that looks whole may not be."""
        self.number = 0
        self.newest: str | None = None
        """Tag of the last save that succeeded and was not touched since."""

    def teardown(self) -> None:
        self.patch.undo()
        shutil.rmtree(self.base)

    def _save(self, tag: str, size: int, *, overwrite: bool, fault: Fault | None) -> list[crew.Outcome]:
        self.number = self.number % 7 + 1
        self.machine.reset(*([fault.rule()] if fault is not None else []))
        number = self.number
        outcomes = crew.Crew(size, self.machine, self.clock).do(
            lambda ranks: save_version(LOCAL, self.root, ranks, tag, number, overwrite=overwrite)
        )
        self.machine.reset()
        return outcomes

    @initialize()
    def begin(self) -> None:
        """An empty root is no special case."""
        assert chosen(self.root) is None

    @rule(tag=tags, size=sizes, overwrite=st.booleans())
    def save(self, tag: str, size: int, overwrite: bool) -> None:
        was_there = tag in self.sound
        outcomes = self._save(tag, size, overwrite=overwrite, fault=None)
        if all(o.succeeded for o in outcomes):
            assert overwrite or not was_there
            self._committed(tag)
        else:
            assert not overwrite
            assert tag in self.sound or tag in self.unsure
            assert {type(o.error).__name__ for o in outcomes} == {"StorageError"}

    def _committed(self, tag: str) -> None:
        self.sound[tag] = self.number
        self.unsure.pop(tag, None)
        self.unsure.pop(f"{tag}.replaced", None)
        self.sound.pop(f"{tag}.replaced", None)
        self.newest = tag

    @rule(
        tag=tags, size=sizes, overwrite=st.booleans(), at=st.integers(0, 70), rank=st.integers(0, 2),
        how=st.sampled_from(["before", "amid", "after", "EIO", "ENOSPC"]), everyone=st.booleans(),
    )  # fmt: skip
    def broken_save(self, tag: str, size: int, overwrite: bool, at: int, rank: int, how: str, everyone: bool) -> None:
        before = dict(self.sound)
        how = "before" if how == "amid" else how
        outcomes = self._save(tag, size, overwrite=overwrite, fault=Fault(rank % size, at, how, everyone=everyone))
        if any(o.succeeded for o in outcomes):
            self._committed(tag)
            return
        aside = f"{tag}.replaced"
        if aside in before and tag not in before:  # which a failed save brings back under its own name
            here = whole(self.root)
            if aside not in here and here.get(tag) == version(before[aside]):
                self.sound[tag] = self.sound.pop(aside)
                self.unsure.pop(tag, None)
        if aside in self.unsure and not os.path.exists(f"{self.root}/{aside}") and os.path.exists(f"{self.root}/{tag}"):
            self.unsure[tag] = self.unsure.pop(aside)  # brought back, damaged as it is
        if not any(o.killed for o in outcomes):
            return  # it was said that nothing was committed: all is as it was
        if tag in before and overwrite:
            # It is there under its own name or beside, or the new one is.
            old = self.sound.pop(tag)
            here = whole(self.root)
            found = [t for t in (tag, f"{tag}.replaced") if here.get(t) in (version(old), version(self.number))]
            assert found, "neither the old nor the new one is there"
            for name in found:
                self.sound[name] = old if here[name] == version(old) else self.number
            if tag in found and os.path.exists(f"{self.root}/{tag}/{MANIFEST}"):
                self.sound.pop(aside, None)  # what was set aside for a commit may go
        elif tag not in before:
            self.unsure.setdefault(tag, set()).add(self.number)
            here = whole(self.root)
            if tag in here and here[tag] == version(self.number):
                self.sound[tag] = self.number
                self.unsure.pop(tag)
                if os.path.exists(f"{self.root}/{tag}/{MANIFEST}"):  # then what was set aside for it may go
                    self.sound.pop(f"{tag}.replaced", None)
        self.newest = None

    @rule(last=st.integers(1, 3))
    def prune(self, last: int) -> None:
        here, found = whole(self.root), chosen(self.root)
        commits = {t for t in here if os.path.exists(f"{self.root}/{t}/{MANIFEST}")}
        maintain(LOCAL, self.root, Rules(last), grace=0)
        after = whole(self.root)
        # Whatever goes, what would be restored stays, unless it was only set aside for one that is there now.
        if found is not None and not found[0].endswith(".replaced") and not self.rotten:
            again = chosen(self.root)
            assert again is not None
            assert found[1] in after.values()
        assert after.keys() <= here.keys()
        self.sound = {tag: number for tag, number in self.sound.items() if tag in after}
        if not self.rotten:
            assert len(after) >= min(last, len(commits), 1)

    @rule()
    def tidy(self) -> None:
        before = whole(self.root)
        maintain(LOCAL, self.root, None, grace=0)
        after = whole(self.root)
        gone = before.keys() - after.keys()
        assert all(tag.endswith(".replaced") and tag.removesuffix(".replaced") in after for tag in gone), gone
        for tag in gone:
            self.sound.pop(tag, None)
        assert [d for d in debris(self.root) if MARK in d or d.endswith(".removed")] == []

    @precondition(lambda self: self.sound)
    @rule(data=st.data())
    def somebody_sets_latest(self, data: Any) -> None:
        tag = data.draw(st.sampled_from(sorted(self.sound)))
        with open(f"{self.root}/latest", "w") as file:
            file.write(tag)
        late = max(os.stat(f"{above}/{n}").st_mtime_ns for above, _, names in os.walk(self.root) for n in names)
        os.utime(f"{self.root}/latest", ns=(late, late))
        found = chosen(self.root)
        assert found is not None
        if found[0] != tag:  # as if the save on top of it had been killed before it wrote latest: that is told
            assert os.path.exists(f"{self.root}/{found[0]}/{MARK}")
            assert contradiction(LOCAL, self.root, candidates(LOCAL, self.root)).startswith(f"latest names {tag}, but ")
        self.newest = None

    @precondition(lambda self: self.sound)
    @rule(data=st.data())
    def somebody_removes_one(self, data: Any) -> None:
        tag = data.draw(st.sampled_from(sorted(self.sound)))
        shutil.rmtree(f"{self.root}/{tag}")
        del self.sound[tag]
        self.newest = None

    @precondition(lambda self: self.sound)
    @rule(data=st.data(), cut=st.booleans())
    def somebody_damages_one(self, data: Any, cut: bool) -> None:
        tag = data.draw(st.sampled_from(sorted(self.sound)))
        path = f"{self.root}/{tag}/{data.draw(st.sampled_from(sorted(version(1))))}"
        if cut:
            os.truncate(path, os.path.getsize(path) // 2)
        else:
            at = data.draw(st.integers(0, os.path.getsize(path) - 1))
            with open(path, "r+b") as file:
                byte = os.pread(file.fileno(), 1, at)
                os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), at)
            self.rotten = True  # retention reads no tensors
        assert tag not in whole(self.root)
        self.unsure[tag] = set()
        del self.sound[tag]
        self.newest = None

    @invariant()
    def what_must_be_whole_is(self) -> None:
        here = whole(self.root)
        for tag, number in self.sound.items():
            assert tag in here, f"{tag} is lost"
            assert here[tag] == version(number), f"{tag} is another"
        for tag in here.keys() - self.sound.keys():
            assert any(here[tag] == version(n) for n in range(1, 8)), f"{tag} is a mixture"

    @invariant()
    def what_was_saved_last_is_found(self) -> None:
        if self.newest is not None and self.newest in self.sound:
            try:
                found = chosen(self.root)
            except CkptError:
                found = None
            assert found is not None
            assert found[0] == self.newest
            assert LOCAL.read_text(f"{self.root}/latest") == self.newest


thorough = settings.get_current_profile_name() == "thorough"
TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=400 if thorough else 20, stateful_step_count=15, deadline=None)
