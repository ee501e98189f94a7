"""Accelerate with ``prepare``, on real engines: saves, resumes on other ranks, kills, folders that are used again."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from ckpttool.storage import MANIFEST
from tests import sampling
from tests.extensions.accelerate import accelerate_runs
from tests.extensions.accelerate.accelerate_runs import SAVED, STEPS
from tests.frameworks.jobs import Jobs
from tests.frameworks.torn import tear

if TYPE_CHECKING:
    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed
SAME = sampling.some([3, 2], 1)
"""Stages of resumes on the same ranks."""
OTHERS = sampling.some([(2, 1, 3), (2, 3, 2), (3, 3, 3)], 1)
"""Resumes on other ranks: stage that saved on two ranks, ranks, stage that resumes."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: TempPathFactory) -> dict[str, Any]:
    """The facts of all runs, by name."""
    directory = tmp_path_factory.mktemp("accelerate")
    jobs = Jobs(
        accelerate_runs, directory,
        lambda out: {"project": str(out), "folder": str(out / "step_{}"), "prepare": {}},
    )  # fmt: skip
    add = jobs.add
    for stage in SAME:
        add(f"dropout{stage}", stage, 2, dropout=0.5, prepare={"async_save": True})
    for stage in (2, 3):
        add(f"plain{stage}", stage, 2)
    add("without", 2, 2, prepare=None)
    add("automatic", 2, 2, automatic=True, every=1, prepare={"async_save": True})
    add("one-folder", 3, 2, folder=str(directory / "one-folder" / "checkpoint_0"), every=1)
    again = {"number": 22, "everyone": True, "rank": 0, "step": 0}  # within the second save
    add(
        "killed", 2, 2, folder=str(directory / "killed" / "checkpoint_0"), every=1, kill=again, fails=True,
        prepare={"timeout": 5.0},
    )  # fmt: skip
    found = jobs.run()
    for stage in SAME:
        add(f"again{stage}", stage, 2, dropout=0.5, load=str(directory / f"dropout{stage}" / f"step_{SAVED}"))
    for saved, ranks, stage in OTHERS:
        add(f"from{saved}-to{stage}-dp{ranks}", stage, ranks, load=str(directory / f"plain{saved}" / f"step_{SAVED}"))
    for ranks in (1, 2, 3):
        add(f"unseeded{ranks}", 2, ranks, load=str(directory / "plain2" / f"step_{SAVED}"), unseeded=True)
    add("from-accelerate", 3, 1, load=str(directory / "without" / f"step_{SAVED}"))
    add("by-accelerate", 2, 2, load=str(directory / "plain2" / f"step_{SAVED}"), prepare=None)
    shutil.copytree(directory / "automatic", directory / "automatic-again")
    tear(directory / "automatic-again" / "checkpoints" / "checkpoint_5")
    add("automatic-again", 2, 1, automatic=True, load=None)
    add("revived", 3, 1, load=str(directory / "killed" / "checkpoint_0"))
    add("twice", 2, 1, twice=True, fails=True)
    add("accumulated", 2, 1, accumulation=2)  # the save comes after the third micro batch
    add("accumulated-well", 2, 1, accumulation=3, every=4)  # at the end of the epoch, which is a step
    add("accumulated-often", 2, 1, accumulation=3, every=1)
    add("nothing", 2, 1, load=str(directory / "nowhere"), fails=True)
    return found | jobs.run()


def _rest(facts: dict[str, Any], key: str = "losses", after: int = SAVED) -> dict[str, float]:
    return {step: value for step, value in facts[key].items() if int(step) > after}


@pytest.mark.parametrize("stage", SAME)
def test_a_resume_on_the_same_ranks_has_the_losses_of_a_run_that_did_not_stop(runs: dict[str, Any], stage: int) -> None:
    resumed, whole = runs[f"again{stage}"], runs[f"dropout{stage}"]
    assert len(resumed["losses"]) == STEPS - SAVED
    assert resumed["losses"] == _rest(whole)
    assert resumed["rates"] == _rest(whole, "rates")


@pytest.mark.parametrize(("saved", "ranks", "stage"), OTHERS)
def test_a_resume_on_other_ranks_and_stages_goes_on(runs: dict[str, Any], saved: int, ranks: int, stage: int) -> None:
    resumed, whole = runs[f"from{saved}-to{stage}-dp{ranks}"], runs[f"plain{saved}"]
    assert resumed["resumed"] == SAVED
    for key in ("losses", "rates"):
        assert list(resumed[key].values()) == pytest.approx(list(_rest(whole, key).values()), rel=1e-5)


def test_a_loader_whose_order_is_not_saved_is_named(runs: dict[str, Any]) -> None:
    for ranks in (1, 2, 3):
        assert any("use_seedable_sampler=True" in line for line in runs[f"unseeded{ranks}"]["told"])
    for name in ("by-accelerate", *(f"from{saved}-to{stage}-dp{ranks}" for saved, ranks, stage in OTHERS)):
        assert not any("use_seedable_sampler" in line for line in runs[name]["told"])


def test_accelerate_and_ckpttool_read_what_the_other_saved(runs: dict[str, Any]) -> None:
    assert runs["by-accelerate"]["losses"] == _rest(runs["plain2"])
    resumed, whole = runs["from-accelerate"], runs["without"]
    assert list(resumed["losses"].values()) == pytest.approx(list(_rest(whole).values()), rel=1e-5)


def test_a_folder_has_the_files_of_accelerate(runs: dict[str, Any]) -> None:
    ours, theirs = (
        {str(p.relative_to(f)) for p in f.rglob("*") if p.is_file()}
        for f in (runs[name]["out"] / f"step_{SAVED}" for name in ("plain2", "without"))
    )
    assert not theirs - ours
    added = {name.rpartition("/")[2] for name in ours - theirs}
    assert added == {MANIFEST, "ckpttool_rank_state_00000.pt", "ckpttool_rank_state_00001.pt"}


def test_named_folders_are_limited_and_a_torn_one_is_passed_over(runs: dict[str, Any]) -> None:
    kept = {p.name for p in (runs["automatic"]["out"] / "checkpoints").iterdir()}
    assert kept == {"checkpoint_4", "checkpoint_5"}
    resumed = runs["automatic-again"]
    assert (resumed["resumed"], resumed["iteration"]) == (5, 5)
    assert _rest(resumed, after=5) == pytest.approx(_rest(runs["automatic"], after=5), rel=1e-5)


def test_a_folder_that_is_used_again_is_replaced_as_a_whole(runs: dict[str, Any]) -> None:
    folder = runs["one-folder"]["out"] / "checkpoint_0"
    assert not ckpttool.verify(folder, deep=True).findings
    assert ckpttool.inspect(folder).step == STEPS
    assert -9 in runs["killed"]["statuses"]
    revived = runs["revived"]
    assert revived["resumed"] >= 1
    whole = _rest(runs["plain2"], after=revived["resumed"])
    assert list(revived["losses"].values()) == pytest.approx(list(whole.values()), rel=1e-5)


def test_an_error_is_one_line(runs: dict[str, Any]) -> None:
    error = runs["nothing"]["error"]
    assert "nowhere does not exist" in error.replace(":", "")
    assert "\n" not in error


def test_a_second_prepare_is_refused(runs: dict[str, Any]) -> None:
    assert "Accelerator: was prepared before" in runs["twice"]["error"]


def test_a_save_between_two_micro_batches_warns_once(runs: dict[str, Any]) -> None:
    said = {
        name: len([line for line in runs[name]["told"] if "between two micro batches" in line])
        for name in ("accumulated", "accumulated-often", "accumulated-well", "plain2")
    }
    assert said == {"accumulated": 1, "accumulated-often": 1, "accumulated-well": 0, "plain2": 0}
