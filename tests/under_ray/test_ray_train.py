"""Runs of Ray Train that save through ckpttool: workers die, others resume, and Ray's own behaviour is unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from tests import sampling
from tests.under_ray import loops
from tests.under_ray.driver import ENVIRONMENT

if TYPE_CHECKING:
    from tests.under_ray.conftest import Trained

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"

pytestmark = [pytest.mark.deepspeed, pytest.mark.ray]

DEATHS = loops.DEATHS if sampling.thorough() else (loops.BETWEEN_FILES, loops.BEFORE_REPORT)
RAISING = ["unguarded", "exception"] if sampling.thorough() else ["unguarded"]
ENDINGS = ["return", *RAISING, "fails"] if sampling.thorough() else RAISING


RAY_RUNS: dict[str, tuple[Any, ...]] = {
    "deaths": ("deaths", DEATHS),
    "resume": ("resume",),
    "bucket": ("bucket",),
    "ending": ("ending", ENDINGS),
    "torch": ("torch",),
}
"""Runs on one cluster: see ``driver``."""
if sampling.thorough():
    RAY_RUNS["causal"] = (
        "example", "ray_causal_lm.py",
        ["--storage", "causal", "--workers", "1", "--epochs", "8"],
        ["--storage", "causal", "--workers", "2", "--epochs", "10", "--stage", "3", "--export", "out"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def done(trained: Trained) -> Path:
    """Results of the runs of this module."""
    return trained.of("deaths", "resume", "bucket")


def _facts(done: Path, name: str) -> Any:
    return json.loads((done / name).read_text())


# ------------------------------------------------------------------------------------------------- killed workers


def test_every_death_is_survived_with_the_newest_commit_bit_for_bit(done: Path) -> None:
    attempts = [_facts(done, f"attempt-{n}.json") for n in range(len(DEATHS) + 1)]
    assert attempts[0]["state"] is None
    expected = 0
    for where, after in zip(DEATHS, attempts[1:], strict=True):
        expected += 2 if where in loops.COMMITTED else 1
        assert (after["steps"], after["state"]) == (expected, {"step": expected}), where
        assert after["newest"] == expected, where
        assert after["equal"], where


def test_ray_alone_would_have_lost_some_of_it(done: Path) -> None:
    """Else the deaths above prove nothing."""
    attempts = [_facts(done, f"attempt-{n}.json") for n in range(len(DEATHS) + 1)]
    behind = [a for a in attempts[1:] if a["known"] is None or f"_{a['steps']:08d}_" not in a["known"]]
    assert behind


def test_ray_gets_every_commit_and_nothing_else(done: Path) -> None:
    run, told = done / "deaths", _facts(done, "deaths.json")
    commits = {path.parent.parent.name for path in run.glob("ckpttool_*/*/ckpttool.json")}
    names = [os.path.basename(path) for path, _ in told["best"]]
    assert sorted(names) == sorted(commits)
    assert names == sorted(names), "in the order of their steps"
    assert os.path.basename(told["newest"]) == names[-1]
    for path, metrics in told["best"]:
        step = metrics["of"]["step"]
        assert isinstance(step, int), "also of one that was reported after a worker's death"
        assert {name: metrics[name] for name in loops.OTHER_METRICS} == loops.OTHER_METRICS
        assert metrics["best"] is True
        assert f"_{step:08d}_" in path
        assert not ckpttool.verify(path, deep=True).findings
        assert (Path(path) / "latest").read_text() == f"global_step{step}"


def test_leftovers_of_killed_saves_are_not_checkpoints(done: Path) -> None:
    run = done / "deaths"
    whole = {path.parent.parent for path in run.glob("ckpttool_*/*/ckpttool.json")}
    torn = [path for path in run.glob("ckpttool_*") if path not in whole]
    assert len(torn) == len(set(DEATHS) - loops.COMMITTED)
    for path in torn:
        with pytest.raises(ckpttool.CkptError):
            ckpttool.inspect(path)
    assert {e.name for e in ckpttool.ls(run).entries if e.whole} == {path.name for path in whole}


def test_prune_leaves_what_ray_counts_on(done: Path) -> None:
    told = {os.path.basename(path) for path, _ in _facts(done, "deaths.json")["best"]}
    decisions = ckpttool.prune(done / "deaths", keep_last=1)
    assert {d.entry.name for d in decisions if "Ray Train's snapshot lists it" in d.reason} == told
    assert all((done / "deaths" / name).is_dir() for name in told)


# ------------------------------------------------------------------------------------------------- ending


def test_a_save_in_the_background_is_committed_and_reported_when_the_train_function_returns(done: Path) -> None:
    assert [metrics["loss"] for _, metrics in _facts(done, "others.json")["best"]] == [0.5, 0.25]


def test_a_save_that_fails_when_the_train_function_has_returned_fails_the_run(done: Path) -> None:
    facts = _facts(done, "others.json")
    assert "was not saved: " in facts["error"]
    assert facts["reported"] == [0.5]


@pytest.mark.thorough
def test_the_same_on_a_shared_disk(trained: Trained) -> None:
    done = trained.of("ending")
    newest = _facts(done, "ending-return.json")["newest"]
    assert os.path.basename(newest).startswith("ckpttool_00000001_")
    assert ckpttool.inspect(newest).client_state["step"] == 1
    assert "was not saved: " in _facts(done, "ending-fails.json")["error"]


@pytest.mark.parametrize("how", RAISING)
def test_a_save_in_the_background_is_committed_when_the_train_function_fails(trained: Trained, how: str) -> None:
    done = trained.of("ending")
    assert "the loop failed" in _facts(done, f"ending-{how}.json")["error"]
    (entry,) = ckpttool.ls(done / f"ending-{how}").entries
    assert (entry.whole, entry.reported) == (True, False)


# ------------------------------------------------------------------------------------------------- resuming


def test_any_number_of_workers_resumes_from_whatever_is_named(done: Path) -> None:
    found, saved = _facts(done, "resumed.json"), _facts(done, "documented.json")
    assert found["blank"] != saved
    for name in ("own run", "checkpoint", "path", "tag", "run"):
        assert found[name] == [{"step": 2}, saved], name


def test_a_given_checkpoint_that_is_not_there_is_an_error(done: Path) -> None:
    problem, held = _facts(done, "resumed.json")["missing"]
    assert problem.startswith(f"{done / 'nowhere'}: ")
    assert held == _facts(done, "documented.json")


def test_restore_in_mid_run_goes_back_and_tells_ray_nothing_twice(done: Path) -> None:
    found, told = _facts(done, "resumed.json"), _facts(done, "second.json")
    assert found["after"] == found["saved"]
    names = [os.path.basename(path) for path, _ in told["best"]]
    assert len(names) == len(set(names)) == 4
    assert [name.startswith("ckpttool_") for name in names] == [False, False, True, True]
    assert found["rank states"] == [{"rank": rank} for rank in range(3)]


def test_a_failure_on_one_worker_is_raised_on_all_and_not_reported(done: Path) -> None:
    found = _facts(done, "resumed.json")
    assert found["unlisted"] == ["the storage: cannot be reached; injected"] * 3
    assert len(set(found["unwritten"])) == 1
    assert "was not saved: rank 2: the storage: cannot be reached" in found["unwritten"][0]
    assert [metrics["loss"] for _, metrics in _facts(done, "second.json")["best"]][2:] == [0.25, 0.125]


def test_old_leftovers_of_killed_workers_are_removed(done: Path) -> None:
    told = {os.path.basename(path) for path, _ in _facts(done, "second.json")["best"]}
    assert {p.name for p in (done / "documented").iterdir() if p.is_dir()} == told


def test_documented_checkpoints_are_read_by_every_command(done: Path, tmp_path: Path) -> None:
    path = _facts(done, "first.json")["newest"]
    checkpoint = ckpttool.inspect(path)
    assert (checkpoint.stage, checkpoint.step, checkpoint.topology.world_size) == (3, 2, 2)
    assert not ckpttool.verify(path, deep=True).findings
    ckpttool.consolidate(path, tmp_path / "out", to="safetensors")
    assert (tmp_path / "out" / "model.safetensors").exists()
    entries = ckpttool.ls(done / "documented").entries
    assert [(e.whole, e.reported, e.step) for e in entries] == [(True, True, step) for step in (1, 2, 3, 4)]
    assert [e.metrics["loss"] for e in entries[2:]] == [0.25, 0.125]


# ------------------------------------------------------------------------------------------------- a bucket


def test_nothing_is_uploaded_twice(done: Path) -> None:
    facts = _facts(done, "bucket.json")
    own = [key for key in facts["puts"] if "/ckpttool_" in key and key.endswith(".pt")]
    assert len(own) == 4 * 2 * 2  # checkpoints, workers, files of each at stage 3
    assert len(own) == len(set(own))


def test_rays_retention_holds(done: Path) -> None:
    facts = _facts(done, "bucket.json")
    assert [metrics["loss"] for _, metrics in facts["best"]] == [2.0, 1.0]
    kept = {os.path.basename(path) for path in [facts["newest"], *(path for path, _ in facts["best"])]}
    there = {k.split("/")[2] for k in facts["sizes"] if k.count("/") > 2 and not k.endswith("/")}
    assert there == kept


def test_a_run_directory_with_markers_is_read_by_every_command(done: Path) -> None:
    facts = _facts(done, "bucket.json")
    assert any(key.endswith("/") and not size for key, size in facts["sizes"].items()), "pyarrow made some"
    kept = {os.path.basename(path) for path in [facts["newest"], *(path for path, _ in facts["best"])]}
    assert sorted(facts["listed"]) == [[name, True, True] for name in sorted(kept)]
    assert (facts["step"], facts["findings"]) == (4, [])
    assert (done / "consolidated" / "model.safetensors").exists()


def test_saves_in_the_background_resume_on_other_storages(done: Path) -> None:
    first, second, third = (_facts(done, f"{name}.json") for name in ("uri", "native", "wrapped"))
    assert first["restored"] is None
    assert second["restored"] == {"loss": 1.0}, "the best of the run before"
    assert third["restored"] == {"loss": 0.25}
    assert third["before"] == second["at end"]
    assert first["again"] == [{"loss": 2.5}, first["held"]], "the newest, though it is not the best"
    for facts in (second, third):
        assert "training waited" in facts["saved"]


# ------------------------------------------------------------------------------------------------- examples


def _example(name: str, *arguments: str) -> str:
    """What an example prints; RAY_ADDRESS lets it start a cluster of its own."""
    path = [str(EXAMPLES.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ, **ENVIRONMENT, "RAY_ADDRESS": "local", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(path),
    }  # fmt: skip
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.mark.thorough
def test_a_causal_model_is_trained_resumed_by_more_workers_exported_and_generates(trained: Trained) -> None:
    first, second = trained.printed("causal")
    assert "epoch 7 on 1 workers" in first
    assert "epoch 7 on 1 workers" in second
    assert "epoch 8 on 2 workers" in second
    assert "generated [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]" in second


@pytest.mark.thorough
def test_an_elastic_run_outlives_lost_nodes_and_grows_again(tmp_path: Path) -> None:
    printed = _example("ray_elastic.py", "--simulate", "--storage", str(tmp_path))
    told = [line.split("s  ")[1] for line in printed.splitlines() if "s  " in line]
    assert [t.split(" from ")[0] for t in told if "continue" in t] == [f"{n} workers continue" for n in (3, 2, 3, 2)]
    assert any("just in time" in t for t in told)
    assert told[-1].startswith("done: ckpttool_")


@pytest.mark.thorough
def test_a_llama_that_was_killed_is_exported_with_the_logits_of_the_engine(tmp_path: Path) -> None:
    printed = _example("ray_llama.py", str(tmp_path / "llama"), "--tiny", "--steps", "8")
    events = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert [(e["event"], e["step"]) for e in events] == [("start", 0), ("save", 4), ("start", 4), ("save", 8)]
    assert "equal the engine's, bit for bit" in printed


# ------------------------------------------------------------------------------------------------- runs of torch


def test_an_fsdp2_run_dies_and_goes_on_with_other_workers(trained: Trained) -> None:
    done = trained.of("torch")
    found = {path.stem: _facts(done, path.name) for path in done.glob("torch * * *.json")}
    first, second = found["torch first 0 1"], found["torch second 4 5"]
    assert (first["began"], first["proof"]) == (0, "")
    assert "metrics: have a tensor of torch as 'loss'" in first["tensor"]
    assert "torch second 4 7" in found
    again = [one for name, one in found.items() if name.startswith("torch first ") and one["began"]]
    for one in (*again[:1], second):
        assert one["proof"].startswith("proven: ")
        assert one["last"] == one["began"]
        assert one["lr"] == 1e-2 * 0.5 ** (one["began"] // 2)
    assert again
    entries = ckpttool.ls(done / "torch").entries
    newest = max(entries, key=lambda one: one.rank)
    assert (newest.step, newest.whole, newest.world_size) == (7, True, 3)
    assert not ckpttool.verify(newest.path, deep=True).findings
