"""Checkpoints of a trainer in a directory of Ray Train: pins and leftovers lie two or more levels below the entry."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import ckpttool as api
from ckpttool.catalog.entries import TRAINER_STATE
from ckpttool.commit.marks import identity
from ckpttool.saving.coordination import Alone
from ckpttool.storage import LOCAL, MARK, THINNING
from tests.cli.command import ckpttool
from tests.rooms import present
from tests.saving.checkpoints import save_version
from tests.truth import source
from tests.wording import refused

INNER = {"checkpoint": "zero2-dp2-bf16-trainer", "checkpoint.ckpt": "zero2-dp2-bf16-lightning"}
"""Subdirectories that Ray's callbacks make, and a checkpoint that the trainer of each saved."""


@pytest.fixture(params=INNER)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Three checkpoints of a Ray Train run."""
    for number in range(3):
        shutil.copytree(source(INNER[request.param]), tmp_path / "run" / f"checkpoint_{number:06}" / request.param)
    return tmp_path / "run"


@pytest.mark.parametrize("thin", [None, *["bf16"] * present("thinning")])
def test_a_pinned_checkpoint_stays_whole(run: Path, thin: str | None) -> None:
    pin = api.pin(run / "checkpoint_000000", why="the paper")
    assert str(pin) == f"{pin.path}: pinned by {pin.who}: the paper"
    before = sorted(p for p in (run / "checkpoint_000000").rglob("*"))
    assert "pinned by" in ckpttool("ls", run).stdout.splitlines()[1]
    given: dict[str, Any] = {} if thin is None else {"thin": thin}
    decisions = api.prune(run, keep_last=1, **given)
    assert [(d.keep, d.thin) for d in decisions] == [(True, None), (thin is not None, thin), (True, None)]
    assert sorted(p for p in (run / "checkpoint_000000").rglob("*")) == before
    assert api.unpin(run / "checkpoint_000000").why == "the paper"
    assert api.ls(run).entries[0].pin is None


@pytest.mark.linux
@pytest.mark.skipif(not present("thinning"), reason="the extension that thins checkpoints was removed")
def test_leftovers_of_a_killed_thinning_are_cleared_away(run: Path) -> None:
    location = Path(api.inspect(run / "checkpoint_000000").location)
    (location / "model.safetensors").write_text("half")
    mark = {"key": "x", "files": ["model.safetensors"], "old": [], **identity(), "process": 1, "began": ""}
    (location / THINNING).write_text(json.dumps(mark))
    api.prune(run, keep_last=3)
    assert not {"model.safetensors", THINNING} & set(os.listdir(location))


def test_an_unfinished_save_is_recognized(run: Path) -> None:
    location = Path(api.inspect(run / "checkpoint_000000").location)
    for path in location.parent.glob("*.safetensors"):
        path.unlink()
    (location / MARK).write_text(json.dumps({"key": "save x", "files": [], **identity(), "process": os.getppid()}))
    assert api.ls(run).entries[0].torn == "uncommitted"


# ------------------------------------------------------------------------------------------------- a trainer's best


def _trainer_run(root: Path, names: list[str], inner: str = "", best: str | None = "/old/out/checkpoint-3") -> None:
    for name in names:
        shutil.copytree(Path(source("zero2-dp2-bf16-trainer")), root / name / inner)
    (root / names[-1] / inner / TRAINER_STATE).write_text(json.dumps({"best_model_checkpoint": best}))


@pytest.mark.parametrize("thin", [None, *["bf16"] * present("thinning")])
def test_the_trainers_best_stays(thin: str | None, tmp_path: Path) -> None:
    _trainer_run(tmp_path, ["checkpoint-3", "checkpoint-6", "checkpoint-9"])
    given: dict[str, Any] = {} if thin is None else {"thin": thin}
    decisions = api.prune(tmp_path, keep_last=1, **given)
    assert (decisions[0].keep, decisions[0].thin, decisions[0].reason) == (True, None, "the trainer's best")
    assert (decisions[1].keep, decisions[1].thin) == (thin is not None, thin)
    assert [e.name for e in api.ls(tmp_path).entries if e.best] == ["checkpoint-3"]


@pytest.mark.parametrize("of_model", [True, False])
def test_the_trainers_best_stays_beside_a_newer_checkpoint_of_no_trainer(of_model: bool, tmp_path: Path) -> None:
    """A last save of the model by DeepSpeed alone, or a critic, in the output of a Trainer."""
    torch = pytest.importorskip("torch")
    _trainer_run(tmp_path, ["checkpoint-3", "checkpoint-6", "checkpoint-9"])
    if of_model:
        shutil.copytree(next((tmp_path / "checkpoint-9").glob("global_step*")), tmp_path / "global_step30")
        state = tmp_path / "global_step30/mp_rank_00_model_states.pt"
        torch.save({**torch.load(state, weights_only=False), "global_steps": 30}, state)
    else:
        save_version(LOCAL, str(tmp_path), Alone(), "global_step30", 30)
    decisions = {one.entry.name: one for one in api.prune(tmp_path, keep_last=1)}
    assert (decisions["checkpoint-3"].keep, decisions["checkpoint-3"].reason) == (True, "the trainer's best")
    assert not decisions["checkpoint-6"].keep


def test_the_state_in_the_output_folder_counts_too(tmp_path: Path) -> None:
    _trainer_run(tmp_path, ["checkpoint-3", "checkpoint-6", "checkpoint-9"], best=None)
    (tmp_path / TRAINER_STATE).write_text(json.dumps({"best_model_checkpoint": "out/checkpoint-6/"}))
    assert [d.keep for d in api.prune(tmp_path, keep_last=1)] == [False, True, True]


def test_under_ray_the_best_is_found_by_its_step(tmp_path: Path) -> None:
    _trainer_run(tmp_path, ["checkpoint_000000", "checkpoint_000001"], "checkpoint")
    assert [d.keep for d in api.prune(tmp_path, keep_last=1)] == [True, True]


def test_a_state_that_cannot_be_read_stops_prune(tmp_path: Path) -> None:
    _trainer_run(tmp_path, ["checkpoint-3", "checkpoint-6"])
    (tmp_path / "checkpoint-6" / TRAINER_STATE).write_text("{")
    with refused(api.CkptError):
        api.prune(tmp_path, keep_last=1)
    (tmp_path / "checkpoint-6" / TRAINER_STATE).unlink()
    assert [d.keep for d in api.prune(tmp_path, keep_last=1)] == [True, True]  # it may be cut off
    (tmp_path / "checkpoint-3" / TRAINER_STATE).unlink()
    assert [d.keep for d in api.prune(tmp_path, keep_last=1)] == [False, True]


def test_the_best_of_lightning_stays(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="a file of torch is changed")
    for name in ("epoch=0-step=1.ckpt", "epoch=0-step=2.ckpt", "epoch=0-step=3.ckpt"):
        shutil.copytree(source("zero2-dp2-bf16-lightning"), tmp_path / name)
        for path in (tmp_path / name).rglob("*model_states.pt"):
            state = torch.load(path, weights_only=False)
            state["callbacks"] = {"ModelCheckpoint": {"best_model_path": "/old/epoch=0-step=1.ckpt"}}
            torch.save(state, path)
    assert [d.keep for d in api.prune(tmp_path, keep_last=1)] == [True, False, True]
