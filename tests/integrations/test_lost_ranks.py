"""A rank of a live run that is stopped or dies: the others learn it from its pulse, long before the timeout."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckpttool
from ckpttool.errors import CkptError
from ckpttool.integrations.torch.collectives import ranks_of_process_group
from ckpttool.saving import coordination
from ckpttool.saving.coordination import RankError
from tests.forked import call, statuses_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.deepspeed, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

BEAT = 1.0
"""Seconds between two beats."""
RANKS = 3


class _Rank:
    """A rank of a live run.

    Args:
        kind: "engine" or "torch".
        directory: The directory of the files of this test.
    """

    def __init__(self, kind: str, directory: Path) -> None:
        self.rank, self.directory = int(os.environ["RANK"]), directory
        self.told: list[str] = []
        ranks_of_process_group("the first call decides the beat", beat=BEAT)
        torch.manual_seed(3)
        self.model: Any = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(self.model.parameters())
        self.optimizer: dict[str, Any] = {"optimizer": optimizer}
        if kind == "engine":
            from deepspeed import initialize

            config = {
                "train_micro_batch_size_per_gpu": 2,
                "zero_optimization": {"stage": 2},
                "zero_allow_untested_optimizer": True,
            }
            self.model = initialize(model=self.model, optimizer=optimizer, config=config)[0]
            self.optimizer = {}
        self.manager = ckpttool.CheckpointManager(directory / "root")

    def save(self, step: int) -> None:
        """Save, and note the error and whether it came soon."""
        if self.optimizer:
            self._noted(lambda: self.manager.save(self.model, step=step, **self.optimizer))
        else:
            self.model.global_steps = step
            self._noted(lambda: self.manager.save(self.model))

    def restore(self) -> None:
        """Restore, and note the error and whether it came soon."""
        self._noted(lambda: self.manager.restore(self.model, **self.optimizer))

    def _noted(self, task: Any) -> None:
        began = time.monotonic()
        try:
            task()
            self.told.append("done")
        except RankError as error:
            self.told.append(str(error))
        assert time.monotonic() - began < 60
        (self.directory / f"{self.rank}.json").write_text(json.dumps(self.told))


def _live(kind: str, directory: Path) -> None:
    torch.distributed.init_process_group("gloo")
    one = _Rank(kind, directory)
    one.save(1)
    pid = directory / "pid"
    if one.rank == 2:
        pid.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    one.save(2)
    if one.rank == 0:
        os.kill(int(pid.read_text()), signal.SIGCONT)
    one.save(3)
    if one.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    one.save(4)
    one.restore()


def _run(kind: str, directory: Path) -> list[int]:
    return statuses_of(RANKS, lambda: _live(kind, directory))


@pytest.mark.parametrize("kind", ["torch", "engine"])
def test_a_rank_that_is_stopped_or_dies_is_named_within_beats(kind: str, tmp_path: Path) -> None:
    assert call(_run, kind, tmp_path) == [0, 0, -signal.SIGKILL]
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    hint = "its process has ended or is stopped: see the log of rank 2"
    lost = f"rank 2 gave no sign of life for 4 s; {hint}"
    for rank in range(RANKS):
        first, stopped, again, *dead = told[rank]
        assert (first, again) == ("done", "done")
        assert stopped.endswith(lost)
        assert [one.endswith(lost) for one in dead] == ([] if rank == 2 else [True, True])
    assert ckpttool.inspect(tmp_path / "root").step == 3


def _call_and_end(directory: Path, name: str) -> None:
    """Make one call, after which the first rank ends at once; the other one reads its decisions late."""
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    manager = ckpttool.CheckpointManager(directory / "root")
    calls: dict[str, Any] = {
        "save": lambda: manager.save(model, optimizer=optimizer, step=1),
        "restore": lambda: manager.restore(model, optimizer=optimizer),
        "load": lambda: ckpttool.load(model, directory / "root", optimizer=optimizer),
        "prove": lambda: ckpttool.prove(model, directory / "root", optimizer=optimizer),
        "live_digest": lambda: ckpttool.live_digest(model, optimizer=optimizer),
        "load of nothing": lambda: ckpttool.load(model, directory / "none", optimizer=optimizer),
    }
    wait = coordination._wait

    def wait_late(condition: Callable[[], bool], end: float) -> bool:
        time.sleep(0.2)
        return wait(condition, end)

    if os.environ["RANK"] != "0":
        coordination._wait = wait_late
    with pytest.raises(CkptError, match="does not exist") if "nothing" in name else contextlib.nullcontext():
        calls[name]()
    os._exit(0)  # with the store of the ranks, if this is the first one


def _calls_that_end(directory: Path) -> dict[str, list[int]]:
    names = ("save", "restore", "load", "prove", "live_digest", "load of nothing")
    return {name: statuses_of(2, partial(_call_and_end, directory, name)) for name in names}


def test_the_first_rank_may_end_right_after_a_call(tmp_path: Path) -> None:
    assert {name: status for name, status in call(_calls_that_end, tmp_path).items() if status != [0, 0]} == {}
