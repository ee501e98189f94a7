"""Law of saves and resumes on real engines: a restore gives the newest committed state of some engine."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckpttool import CheckpointManager
from ckpttool.saving import coordination, files
from tests import forked, sampling
from tests.deepspeed.engines import build, differing, held, refusal, step

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.deepspeed

COUNT = int(os.environ.get("CKPTTOOL_TEST_ENGINES", "3" if sampling.thorough() else "2"))
"""Histories; each has several lives, of so many ranks."""
FIRST = int(os.environ.get("CKPTTOOL_TEST_ENGINES_FIRST", "0"))
"""The number of the first: each is another."""
DOES = ("train", "train", "save", "save", "restore", "clock", "bad", "spoil", "full")


TIMEOUT, DECISION_SECONDS = 6.0, 4.0
"""Seconds that the others wait for a rank that is killed, and for what rank 0 decides then."""
COMMITTED = 3
"""Of the points of a save at which a rank may be killed, from this one on it is committed."""
STATES = ("fp32/", "exp_avg/", "exp_avg_sq/", "lr/")


def _history(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)  # noqa: S311  nothing is secret
    lives = [
        {
            "ranks": draw.choice([1, 2, 2, 3]), "stage": draw.choice([0, 1, 2, 3]), "background": draw.random() < 0.5,
            "groups": draw.choice(["two", "two", "two", "swapped", "reversed", "cut", "frozen a", "frozen b"]),
            "optimizer": draw.choice(["adamw", "adamw", "adamw", "momentum"]),
            "does": ["train", "save", *draw.choices(DOES, k=7)],
            "end": draw.choice(["", "exit", "kill"]), "victim": draw.randrange(3), "at": draw.randrange(5),
        }
        for _ in range(4)
    ]  # fmt: skip
    for life in lives:
        life["background"] = life["background"] or life["end"] == "exit"
    return {"id": f"history-{seed}", "lives": lives}


def _live(jobs: list[dict[str, Any]], directory: Path) -> None:
    """Live histories, those of one number of ranks and one life together.

    In each life so many ranks build an engine and do what was drawn, the same on all ranks; what each committed
    checkpoint must hold is noted beside it, from the live engine alone.
    """
    for number in range(max(len(job["lives"]) for job in jobs)):
        for ranks in (1, 2, 3):
            own = [
                (job["id"], job["lives"][number])
                for job in jobs
                if number < len(job["lives"]) and job["lives"][number]["ranks"] == ranks
            ]
            if together := [one for one in own if not one[1]["end"]]:
                forked.run_ranks(ranks, lambda own=together: _rank(own, directory))  # type: ignore[misc]
            for name, life in own:
                if life["end"]:
                    statuses = forked.statuses_of(
                        ranks,
                        lambda own=[(name, life)]: _rank(own, directory),  # type: ignore[misc]
                    )
                    assert statuses == [_status(life, rank) for rank in range(ranks)], (name, number, life, statuses)


def _status(life: dict[str, Any], rank: int) -> int:
    return -signal.SIGKILL if life["end"] == "kill" and rank == life["victim"] % life["ranks"] else 0


def _rank(lives: list[tuple[str, dict[str, Any]]], directory: Path) -> None:
    from recipes import common

    common.start(seed=3)
    end = ""
    for name, life in lives:
        forked.end_if_stuck(240)
        _Life(directory / name, life).live()
        end = life["end"]
    if end == "exit":  # what the interpreter does when the main module has ended
        threading._shutdown()  # type: ignore[attr-defined]
        if type(sys.stderr).__name__ == "_FailingStream":
            os._exit(120)
    elif not end:
        common.leave()


class _Life:
    def __init__(self, directory: Path, life: dict[str, Any]) -> None:
        self.directory, self.life, self.root = directory, life, directory / "root"
        self.rank, self.ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if self.rank == 0:
            directory.mkdir(exist_ok=True)
        torch.distributed.barrier()
        self.engine = build(life["stage"], "bf16", life["groups"], life["optimizer"], seed=7)
        self.manager: Any = CheckpointManager(self.root, async_save=life["background"], timeout=20)
        self.notes: dict[str, Any] = {}
        if (directory / "notes.pt").exists():
            self.notes = torch.load(directory / "notes.pt", weights_only=False)
        self.pending = ""

    def live(self) -> None:
        self.restore()
        for what in self.life["does"]:
            getattr(self, what)()
            torch.distributed.barrier()
        self.settled()
        if self.life["end"]:
            getattr(self, self.life["end"])()
            return
        self.write_down()
        torch.distributed.barrier()
        self.engine.destroy()

    def write_down(self) -> None:
        """Note for the lives after this one what must be found."""
        if self.rank == 0:
            torch.save(self.notes, self.directory / "notes.pt")
            with open(self.directory / "done", "a") as file:
                file.write(json.dumps([self.life["does"]]) + "\n")

    def untold(self) -> str:
        """Train until there is a step that was never saved; its tag."""
        self.train()
        while (tag := f"global_step{self.engine.global_steps}") in self.notes:
            self.train()
        return tag

    def exit(self) -> None:
        """The program ends while it saves in the background: from then on that must be found."""
        tag = self.untold()
        self.notes[tag] = self.note()
        write = files.write_files

        def later(*given: Any) -> Any:
            time.sleep(0.3)
            return write(*given)

        files.write_files = later  # type: ignore[assignment]
        self.manager.save(self.engine, client_state={"step": self.engine.global_steps})
        self.write_down()
        torch.distributed.barrier()

    def kill(self) -> None:
        """A rank is killed while it saves; the others hear of it in time, and what was committed is found."""
        tag, victim = self.untold(), self.life["victim"] % self.ranks
        at = self.life["at"] if victim == 0 else self.life["at"] % 2
        if at >= COMMITTED:
            self.notes[tag] = self.note()
        self.write_down()
        torch.distributed.barrier()
        if self.rank == victim:
            _die_at(self.manager._storage, at)
        began = time.monotonic()
        self.manager._ranks.timeout, coordination.DECISION_SECONDS = TIMEOUT, DECISION_SECONDS

        def write() -> None:
            self.manager.save(self.engine, client_state={"step": self.engine.global_steps})
            self.manager.wait()

        told = refusal(write)
        assert self.rank != victim
        assert told or at >= COMMITTED
        assert time.monotonic() - began < TIMEOUT + DECISION_SECONDS + 10

    def held(self) -> dict[str, Any]:
        return held(self.engine)

    def settled(self) -> None:
        """Wait for what is being saved: from then on it must be found."""
        self.manager.wait()
        self.pending = ""

    def newest(self) -> str:
        """The tag of the last commit that was not spoilt."""
        sound = [tag for tag, note in self.notes.items() if note["sound"]]
        return max(sound, key=lambda tag: self.notes[tag]["number"], default="")

    def train(self) -> None:
        step(self.engine, 1)

    def save(self) -> None:
        tag = f"global_step{self.engine.global_steps}"
        note = self.note()

        def write() -> None:
            self.manager.save(self.engine, client_state={"step": note["step"]})
            self.settled()

        if told := refusal(write):
            assert "is saved already" in told
            assert tag in self.notes
            return
        assert tag not in self.notes or not self.notes[tag]["sound"]  # a restore has skipped what was spoilt
        self.notes[tag] = note

    def note(self) -> dict[str, Any]:
        """What is to be found of a commit of now."""
        number = max((note["number"] for note in self.notes.values()), default=0) + 1
        note = {"held": self.held(), "step": self.engine.global_steps, "sound": True, "number": number}
        return note | {"optimizer": self.life["optimizer"], "groups": self.life["groups"], "stage": self.life["stage"]}

    def restore(self) -> None:
        """What is restored is the newest commit, bit for bit, or the engine is as it was; as was foretold."""
        self.settled()
        before, tag = self.held(), self.newest()
        told: list[str] = []
        found: list[Any] = []

        def restore(dry_run: bool) -> None:
            found.append(self.manager.restore(self.engine, dry_run=dry_run))

        for dry_run in (True, False):
            told.append(refusal(functools.partial(restore, dry_run)))
            told[-1] = "nothing" if not told[-1] and found[-1] is None else told[-1]
            if dry_run:
                assert differing(before, self.held()) == []
        assert told[0] == told[1], told
        now = self.held()
        if told[1]:
            assert differing(before, now) == []
            fits = tag and self.notes[tag]["optimizer"] == self.life["optimizer"]
            assert not fits or (self.notes[tag]["stage"] and not self.life["stage"]), told
            return
        note = self.notes[tag]
        assert found[-1] == {"step": note["step"]}, (found, tag)
        assert self.engine.global_steps == note["step"]
        odd = [k for k in differing(note["held"], now) if k.startswith(STATES)]
        if _frozen(note) != _frozen(self.life):  # the weights are matched by name, and so are moments that both have
            changed = {_frozen(note), _frozen(self.life)}
            odd = [k for k in odd if f"frozen {k.partition('/')[2][0]}" not in changed]
            assert not [k for k in differing(note["held"], now) if k.startswith("module/")]
        if self.life["groups"] != note["groups"]:
            odd = [k for k in odd if not k.startswith("lr/")]
        assert odd == [], (tag, odd)

    def clock(self) -> None:
        """What was saved last seems to be old, or everything else new."""
        if self.rank == 0 and self.root.exists():
            for above, _, names in os.walk(self.root):
                ahead = 1e7 if len(above) % 2 else -1e7
                for name in names:
                    os.utime(os.path.join(above, name), (time.time() + ahead,) * 2)

    def bad(self) -> None:
        """One rank asks for something else."""
        before = self.held()
        asked: list[Any] = [
            lambda: self.manager.save(self.engine, tag="bad", metrics={"x": None if self.rank == self.ranks - 1 else 1})
        ]
        if self.ranks > 1:
            asked.append(lambda: self.manager.restore(self.engine, weights_only=self.rank > 0))
        for function in asked:
            began = time.monotonic()
            assert refusal(function)
            assert time.monotonic() - began < 20
        assert differing(before, self.held()) == []

    def spoil(self) -> None:
        """The manifest of the newest is damaged: the one before it is taken."""
        tag = self.newest()
        if not tag:
            return
        if self.rank == 0:
            (self.root / tag / "ckpttool.json").write_bytes(b"\x00" * 64)
        self.notes[tag]["sound"] = False

    def full(self) -> None:
        """No room is left for a save."""
        storage: Any = self.manager._storage
        storage.free_bytes = lambda _: 10

        def write() -> None:
            self.manager.save(self.engine, tag="full")
            self.manager.wait()

        assert "are free" in refusal(write)
        del storage.free_bytes


def _frozen(life: dict[str, Any]) -> str:
    """Which parameters are not trained."""
    return str(life["groups"]) if life["groups"].startswith("frozen") else ""


def _die_at(storage: Any, at: int) -> None:
    """Let this process be killed before it writes its files, after that, or between two steps of the commit."""

    def dying(function: Any, *, before: bool, name: str = "") -> Any:
        def call(*given: Any) -> Any:
            chosen = str(given[0]).endswith(name)
            if chosen and before:
                os.kill(os.getpid(), signal.SIGKILL)
            done = function(*given)
            if chosen:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        return call

    if at < 2:
        files.write_files = dying(files.write_files, before=at == 0)
    elif at == 2:
        storage.put_new = dying(storage.put_new, before=True, name="ckpttool.json")
    elif at == COMMITTED:
        storage.put_new = dying(storage.put_new, before=False, name="ckpttool.json")
    else:
        storage.put = dying(storage.put, before=False, name="latest")


def test_histories(tmp_path: Path) -> None:
    jobs = [_history(seed) for seed in range(FIRST, FIRST + COUNT)]
    forked.call(_live, jobs, tmp_path)
    for job in jobs:
        done = (tmp_path / job["id"] / "done").read_text().splitlines()
        assert [json.loads(line)[0] for line in done] == [life["does"] for life in job["lives"]]
