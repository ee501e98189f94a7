"""Accelerate under DDP, and in one process, with ``prepare``: saves, resumes, kills, and loads by Accelerate alone."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckpttool
from ckpttool.storage import MANIFEST, MARK
from tests import sampling
from tests.extensions.accelerate import accelerate_runs
from tests.extensions.accelerate.accelerate_runs import SAVED, STEPS
from tests.frameworks.jobs import Jobs

if TYPE_CHECKING:
    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed
EPOCH = 4
"""Steps of an epoch. Within one, Accelerate itself draws a random number again for its data loader."""
KILLS = sampling.some([2, 4, 7], 1, key="kills of Accelerate under DDP")
"""Writes of the first rank in the fifth save before which it is killed, all but once with the other rank."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: TempPathFactory) -> dict[str, Any]:
    """The facts of all runs, by name."""
    directory = tmp_path_factory.mktemp("ddp")
    jobs = Jobs(
        accelerate_runs, directory,
        lambda out: {"project": str(out), "folder": str(out / "step_{}"), "prepare": {}, "ddp": True},
    )  # fmt: skip

    def add(name: str, ranks: int, **values: Any) -> None:
        jobs.add(name, values.pop("stage", 0), ranks, **values)

    add("dropout", 2, dropout=0.5, prepare={"async_save": True})
    add("plain", 2)
    add("alone", 1, dropout=0.5)
    add("without-dropout", 2, prepare=None)
    add("epoch", 2, dropout=0.5, every=EPOCH)
    add("without", 2, dropout=0.5, prepare=None, every=EPOCH)
    add("automatic", 2, automatic=True, every=1, prepare={"async_save": True})
    add("one-folder", 2, folder=str(directory / "one-folder" / "checkpoint_0"), every=1)
    add("pickled", 2, safe=False, fails=True)
    for number in KILLS:
        kill = {"number": number, "everyone": number != 4, "rank": 0, "step": 4}
        add(f"killed{number}", 2, automatic=True, every=1, kill=kill, fails=True, prepare={"timeout": 5.0})
    found = jobs.run()
    saved, random = (str(directory / name / f"step_{SAVED}") for name in ("plain", "dropout"))
    add("again", 2, dropout=0.5, load=random)
    add("alone-again", 1, dropout=0.5, load=str(directory / "alone" / f"step_{SAVED}"))
    add("on-3", 3, load=saved)
    add("on-1", 1, load=saved)
    add("to-fsdp2", 2, load=saved, ddp=False, fsdp2=True)
    add("to-zero", 3, load=saved, ddp=False, stage=2)
    add("by-accelerate", 2, dropout=0.5, load=str(directory / "epoch" / f"step_{EPOCH}"), prepare=None)
    add("by-accelerate-on-3", 3, load=saved, prepare=None)
    add("from-accelerate", 2, dropout=0.5, load=str(directory / "without" / f"step_{EPOCH}"))
    add("from-accelerate-on-3", 3, load=str(directory / "without-dropout" / f"step_{SAVED}"))
    shutil.copytree(directory / "automatic", directory / "torn")
    (directory / "torn" / "checkpoints" / "checkpoint_5" / "optimizer.bin").unlink()
    add("torn", 3, automatic=True, load=None)
    for number in KILLS:
        shutil.copytree(directory / f"killed{number}", directory / f"revived{number}")
        add(f"revived{number}", 2, automatic=True, load=None, every=1)
    return found | jobs.run()


def _rest(facts: dict[str, Any], key: str = "losses", after: int = SAVED) -> dict[str, float]:
    return {step: value for step, value in facts[key].items() if int(step) > after}


def test_a_resume_has_the_losses_of_a_run_that_did_not_stop(runs: dict[str, Any]) -> None:
    for key in ("losses", "rates"):
        assert len(runs["again"][key]) == STEPS - SAVED
        for name, whole in (("again", "dropout"), ("alone-again", "alone")):
            assert runs[name][key] == _rest(runs[whole], key), name
        for name, whole in (("by-accelerate", "epoch"), ("from-accelerate", "without")):
            assert runs[name][key] == _rest(runs[whole], key, after=EPOCH), name
        for name in ("on-3", "on-1", "to-fsdp2", "to-zero", "from-accelerate-on-3"):
            assert runs[name]["resumed"] == SAVED
            assert list(runs[name][key].values()) == pytest.approx([*_rest(runs["plain"], key).values()], rel=1e-5), (
                name
            )
    there = [*_rest(runs["plain"]).values()][:1]
    assert [*runs["by-accelerate-on-3"]["losses"].values()][:1] == pytest.approx(there, rel=1e-5)


def test_a_folder_has_the_files_of_accelerate(runs: dict[str, Any]) -> None:
    from safetensors.torch import load_file

    folder, alone = (runs[name]["out"] / f"step_{SAVED}" for name in ("plain", "without-dropout"))
    ours, theirs = ({p.name for p in f.iterdir()} for f in (folder, alone))
    assert not theirs - ours
    assert {name for name in ours - theirs if "rank_state" not in name} == {MANIFEST, "ckpttool_run_state.pt"}
    held, known = (load_file(f / "model.safetensors") for f in (folder, alone))
    assert held.keys() == known.keys()
    assert all(torch.equal(held[name], known[name]) for name in known)
    assert ckpttool.verify(folder, deep=True).sound
    assert ckpttool.inspect(folder).step == SAVED
    (folder / "scheduler.bin").write_bytes(b"")
    assert not ckpttool.verify(folder).sound, "the files of Accelerate are part of the commit"


def test_named_folders_are_limited_and_a_torn_one_is_passed_over(runs: dict[str, Any]) -> None:
    root = runs["automatic"]["out"] / "checkpoints"
    assert {p.name for p in root.iterdir()} == {"checkpoint_4", "checkpoint_5"}
    assert [(e.name, e.step, e.whole) for e in ckpttool.ls(root).entries] == [
        ("checkpoint_4", 5, True),
        ("checkpoint_5", 6, True),
    ]
    resumed = runs["torn"]
    assert (resumed["resumed"], resumed["iteration"]) == (5, 5)
    assert _rest(resumed, after=5) == pytest.approx(_rest(runs["automatic"], after=5), rel=1e-5)


def test_a_folder_that_is_used_again_is_replaced_as_a_whole(runs: dict[str, Any]) -> None:
    folder = runs["one-folder"]["out"] / "checkpoint_0"
    assert not ckpttool.verify(folder, deep=True).findings
    assert ckpttool.inspect(folder).step == STEPS


@pytest.mark.parametrize("number", KILLS)
def test_a_killed_save_is_passed_over_and_the_run_goes_on(runs: dict[str, Any], number: int) -> None:
    killed, revived = runs[f"killed{number}"], runs[f"revived{number}"]
    assert -9 in killed["statuses"]
    assert revived["resumed"] in {4, 5}, "the save before, or the killed one if it was complete"
    assert _rest(revived, after=5) == _rest(runs["automatic"], after=5)
    root = revived["out"] / "checkpoints"
    assert not [*root.rglob(MARK)]
    assert all(entry.whole for entry in ckpttool.ls(root).entries)
    assert {p.name for p in root.iterdir()} == {"checkpoint_4", "checkpoint_5"}


def test_weights_of_torch_save_are_refused(runs: dict[str, Any]) -> None:
    assert "safe_serialization: is False, but the weights are saved as safetensors" in runs["pickled"]["error"]
