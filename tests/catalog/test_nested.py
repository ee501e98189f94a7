"""Checkpoints of a trainer in a directory of Ray Train: pins and leftovers lie two or more levels below the entry."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import ckpttool as api
from ckpttool.commit.marks import identity
from ckpttool.storage import MARK, THINNING
from tests.cli.command import ckpttool
from tests.truth import source

INNER = {"checkpoint": "zero2-dp2-bf16-trainer", "checkpoint.ckpt": "zero2-dp2-bf16-lightning"}
"""Subdirectories that Ray's callbacks make, and a checkpoint that the trainer of each saved."""


@pytest.fixture(params=INNER)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Three checkpoints of a Ray Train run."""
    for number in range(3):
        shutil.copytree(source(INNER[request.param]), tmp_path / "run" / f"checkpoint_{number:06}" / request.param)
    return tmp_path / "run"


@pytest.mark.parametrize("thin", [None, "bf16"])
def test_a_pinned_checkpoint_stays_whole(run: Path, thin: str | None) -> None:
    api.pin(run / "checkpoint_000000", why="the paper")
    before = sorted(p for p in (run / "checkpoint_000000").rglob("*"))
    assert "pinned by" in ckpttool("ls", run).stdout.splitlines()[1]
    decisions = api.prune(run, keep_last=1, thin=thin)
    assert [(d.keep, d.thin) for d in decisions] == [(True, None), (thin is not None, thin), (True, None)]
    assert sorted(p for p in (run / "checkpoint_000000").rglob("*")) == before
    assert api.unpin(run / "checkpoint_000000").why == "the paper"
    assert api.ls(run).entries[0].pin is None


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
