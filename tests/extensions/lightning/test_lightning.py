"""Lightning with ``CkptDeepSpeedStrategy``, on real engines: saves, resumes on other ranks, torn checkpoints."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckpttool
from tests import sampling
from tests.extensions.lightning import lightning_runs
from tests.extensions.lightning.lightning_runs import ROWS, SAVED, STEPS, WIDTH
from tests.frameworks.jobs import Jobs
from tests.frameworks.torn import tear

if TYPE_CHECKING:
    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed
SAME = sampling.some([3, 2], 1)
"""Stages of resumes on the same ranks."""
OTHERS = sampling.some([(2, 1, 3), (2, 3, 2), (3, 3, 3)], 1)
"""Resumes on other ranks: stage that saved on two ranks, ranks, stage that resumes."""
TESTED = sampling.some([(2, 3), (3, 2)], 1)
"""Tests of weights in bf16: stage that saved them, stage of the engine."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: TempPathFactory) -> dict[str, Any]:
    """The facts of all runs, by name."""
    directory = tmp_path_factory.mktemp("lightning")
    jobs = Jobs(lightning_runs, directory, lambda out: {"run": str(out / "run"), "saves": {}})
    add = jobs.add
    for stage in SAME:
        add(f"dropout{stage}", stage, 2, dropout=0.5, saves={"async_save": True})
    for stage in (2, 3):
        add(f"plain{stage}", stage, 2)
    add("one", 3, 2, keep=1, saves={"async_save": True})
    found = jobs.run()
    saved = {name: str(facts["out"] / "run" / f"step={SAVED}.ckpt") for name, facts in found.items()}
    for stage in SAME:
        add(f"again{stage}", stage, 2, dropout=0.5, load=saved[f"dropout{stage}"])
    add("by-lightning", 2, 2, load=saved["plain2"], saves=None)
    for source, ranks, stage in OTHERS:
        add(f"from{source}-to{stage}-dp{ranks}", stage, ranks, load=saved[f"plain{source}"])
    shutil.copytree(directory / "plain2" / "run", directory / "torn" / "run")
    tear(directory / "torn" / "run" / f"step={STEPS}.ckpt")
    add("torn", 2, 1, load="newest")
    add("refused", 2, 1, load=str(directory / "refused" / "run" / f"step={SAVED}.ckpt"), fails=True)
    shutil.copytree(directory / "plain2" / "run", directory / "refused" / "run")
    tear(directory / "refused" / "run" / f"step={SAVED}.ckpt")
    add("empty", 2, 1, load="newest")
    add("missing", 2, 1, load=str(directory / "nowhere.ckpt"), fails=True)
    for source, stage in TESTED:
        add(f"tested{source}-{stage}", stage, 2, load=saved[f"plain{source}"], precision="bf16-true", test=True)
    return found | jobs.run()


def _rest(facts: dict[str, Any]) -> dict[str, float]:
    return {step: loss for step, loss in facts["losses"].items() if int(step) > SAVED}


@pytest.mark.parametrize("stage", SAME)
def test_a_resume_on_the_same_ranks_has_the_losses_of_a_run_that_did_not_stop(runs: dict[str, Any], stage: int) -> None:
    resumed, whole = runs[f"again{stage}"], runs[f"dropout{stage}"]
    assert len(resumed["losses"]) == STEPS - SAVED
    assert resumed["losses"] == _rest(whole)
    assert resumed["rate"] == whole["rate"]


@pytest.mark.parametrize(("saved", "ranks", "stage"), OTHERS)
def test_a_resume_on_other_ranks_and_stages_goes_on(runs: dict[str, Any], saved: int, ranks: int, stage: int) -> None:
    resumed, whole = runs[f"from{saved}-to{stage}-dp{ranks}"], runs[f"plain{saved}"]
    assert list(resumed["losses"]) == list(_rest(whole))
    assert list(resumed["losses"].values()) == pytest.approx(list(_rest(whole).values()), rel=1e-5)


def test_lightning_resumes_from_a_commit_without_ckpttool(runs: dict[str, Any]) -> None:
    assert runs["by-lightning"]["losses"] == _rest(runs["plain2"])


def test_an_old_checkpoint_is_removed_after_the_new_one_is_committed(runs: dict[str, Any]) -> None:
    (kept,) = (runs["one"]["out"] / "run").iterdir()
    assert kept.name == f"step={STEPS}.ckpt"
    assert not ckpttool.verify(kept, deep=True).findings


def test_a_torn_checkpoint_is_passed_over_or_refused_by_name(runs: dict[str, Any]) -> None:
    torn = runs["torn"]
    assert torn["from"].endswith(f"step={SAVED}.ckpt")
    assert any(f"step={STEPS}.ckpt was not committed" in line for line in torn["told"])
    assert list(torn["losses"].values()) == pytest.approx(list(_rest(runs["plain2"]).values()), rel=1e-5)
    error = runs["refused"]["error"]
    assert f"step={SAVED}.ckpt" in error
    assert "newest_checkpoint" in error
    assert "\n" not in error
    assert runs["empty"]["from"] is None


@pytest.mark.parametrize(("saved", "stage"), TESTED)
def test_weights_are_tested_without_an_optimizer(runs: dict[str, Any], saved: int, stage: int) -> None:
    """Lightning then makes an engine that only computes."""
    weights = ckpttool.load_state_dict(runs[f"plain{saved}"]["out"] / "run" / f"step={SAVED}.ckpt")
    inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
    outputs = inputs
    for layer in (0, 2):
        outputs = outputs @ weights[f"net.{layer}.weight"].T + weights[f"net.{layer}.bias"]
    truth = (outputs - inputs.roll(1, 1)).square().mean()
    assert runs[f"tested{saved}-{stage}"]["tested"] == pytest.approx(float(truth), rel=0.01)


def test_a_missing_checkpoint_is_named(runs: dict[str, Any]) -> None:
    assert "nowhere.ckpt: does not exist" in runs["missing"]["error"]
