"""The Trainer under DDP, and in one process, with a ``CkptCallback``: saves, resumes, kills, limits, the best model."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ckpttool
from ckpttool.errors import CkptError
from ckpttool.storage import MANIFEST, MARK
from tests import sampling
from tests.extensions.huggingface import trainer_runs
from tests.extensions.huggingface.trainer_runs import SAVED, STEPS
from tests.frameworks.jobs import Jobs
from tests.storage import server

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed
KILLS = ((0, 2, True), (1, 1, False), (0, 9, True))
"""Rank, number of its write in the last save before which it is killed, and whether all ranks are."""
KILLED = sampling.some(range(len(KILLS)), 1, key="kills of DDP")
"""Indexes of the kills that are tried."""
BEST = {
    "load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 2, "eval_strategy": "steps",
    "eval_steps": 1, "lr_scheduler_type": "constant",
}  # fmt: skip


def _flip(file: Path) -> None:
    """Change a bit of a tensor."""
    data = bytearray(file.read_bytes())
    data[-200] ^= 1
    file.write_bytes(data)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: TempPathFactory) -> dict[str, Any]:
    """The facts of all runs, by name."""
    directory = tmp_path_factory.mktemp("ddp")
    with server.running() as endpoint:
        server.client(endpoint).create_bucket(Bucket="runs")
        return _run(directory, {"root": "s3://runs/ddp", "storage_options": {"endpoint_url": endpoint}})


def _run(directory: Path, bucket: dict[str, Any]) -> dict[str, Any]:
    jobs = Jobs(trainer_runs, directory, lambda out: {"output_dir": str(out / "run"), "callback": {}, "plain": True})

    def add(name: str, ranks: int, **values: Any) -> None:
        jobs.add(name, values.pop("stage", 0), ranks, **values)

    add("dropout", 2, dropout=0.5, callback={"async_save": True})
    add("alone", 1, dropout=0.5)
    add("plain", 2)
    add("without", 2, dropout=0.5, callback=None)
    add(
        "best",
        2,
        steps=5,
        save_steps=1,
        learning_rate=0.3,
        arguments=BEST,
        callback={"async_save": True},
        evaluate=True,
    )
    add(
        "bucket",
        2,
        steps=4,
        save_steps=1,
        learning_rate=0.3,
        arguments=BEST,
        callback={**bucket, "async_save": True},
        evaluate=True,
        environment=server.ENVIRONMENT,
    )
    add("export", 2, diverge=True, callback={"export_every": SAVED})
    add("tied", 2, dropout=0.5, tied=True, callback=None)
    add("fsdp2", 2, plain=False, fsdp2=True)
    add("zero", 2, plain=False, stage=2)
    add("factored", 2, dropout=0.5, arguments={"optim": "adafactor"})
    add("cast", 2, callback={"export_every": 1, "export_dtype": "bf16"}, fails=True)
    add("lora", 2, dropout=0.5, peft=True)
    add("two-adapters", 2, peft=2, fails=True)
    add("lora-without", 2, dropout=0.5, peft=True, callback=None)
    for n in KILLED:
        rank, number, everyone = KILLS[n]
        point = {"rank": rank, "number": number, "everyone": everyone, "step": STEPS}
        add(f"killed{n}", 2, kill=point, callback={"timeout": 5.0}, fails=True)
    found = jobs.run()
    for name, source in RESUMED.items():
        folder = f"run/checkpoint-{SAVED}"
        shutil.copytree(directory / source / folder, directory / name / folder)
    shutil.copytree(directory / "without" / "run", directory / "unnamed" / "run")
    add("again", 2, dropout=0.5, resume=True)
    add("alone-again", 1, dropout=0.5, resume=True)
    add("on-3", 3, callback={"auto_resume": True})
    add("to-fsdp2", 2, fsdp2=True, resume=True)
    add("from-fsdp2", 2, resume=True)
    add("from-zero", 3, resume=True)
    add("to-zero", 2, plain=False, stage=2, resume=True)
    add("by-trainer", 2, dropout=0.5, resume=True, callback=None)
    add("from-trainer", 2, dropout=0.5, resume=True)
    add(
        "from-bucket",
        1,
        learning_rate=0.3,
        callback={**bucket, "auto_resume": True},
        environment=server.ENVIRONMENT,
        output_dir=str(directory / "bucket" / "run"),
        arguments={**BEST, "load_best_model_at_end": False},
    )
    add("from-tied", 2, dropout=0.5, tied=True, resume=True)
    add("unnamed", 2, plain=False, resume=True, fails=True)
    add("factored-again", 2, dropout=0.5, arguments={"optim": "adafactor"}, resume=True)
    add("lora-again", 2, dropout=0.5, peft=True, resume=True)
    add("lora-by-trainer", 2, dropout=0.5, peft=True, resume=True, callback=None)
    add("lora-from-trainer", 2, dropout=0.5, peft=True, resume=True)
    shutil.copytree(directory / "plain" / "run", directory / "flipped" / "run")
    _flip(directory / "flipped" / "run" / f"checkpoint-{STEPS}" / "model.safetensors")
    shutil.copytree(directory / "without" / "run", directory / "cut" / "run")
    cut = directory / "cut" / "run" / f"checkpoint-{STEPS}" / "optimizer.pt"
    cut.write_bytes(cut.read_bytes()[:-1000])
    add("cut", 2, dropout=0.5, resume=True)
    for name, lost in (("torn", "optimizer.pt"), ("unreadable", "trainer_state.json")):
        shutil.copytree(directory / "without" / "run", directory / name / "run")
        (directory / name / "run" / f"checkpoint-{STEPS}" / lost).unlink()
        add(name, 2, dropout=0.5, resume=True)
    (directory / "unreadable" / "run" / f"checkpoint-{STEPS}" / "trainer_state.json").write_text("{")
    add("flipped", 2, resume=True)
    for n in KILLED:
        shutil.copytree(directory / f"killed{n}" / "run", directory / f"revived{n}" / "run")
        add(f"revived{n}", 2 + n % 2, resume=True)
    return found | jobs.run()


RESUMED = {
    "again": "dropout", "alone-again": "alone", "on-3": "plain", "to-fsdp2": "plain", "to-zero": "plain",
    "from-fsdp2": "fsdp2", "from-zero": "zero", "by-trainer": "dropout", "from-trainer": "without", "from-tied": "tied",
    "factored-again": "factored",
    "lora-again": "lora", "lora-by-trainer": "lora", "lora-from-trainer": "lora-without",
}  # fmt: skip
"""Runs that resume from a save of others."""
ON_OTHERS = ("on-3", "to-fsdp2", "to-zero", "from-fsdp2", "from-zero")
"""Those on other ranks, or under another framework."""


def _rest(facts: dict[str, Any]) -> list[float]:
    return [loss for step, loss in facts["losses"].items() if int(step) > SAVED]


def test_a_resume_has_the_losses_of_a_run_that_did_not_stop(runs: dict[str, Any]) -> None:
    for name in RESUMED.keys() - {*ON_OTHERS}:
        assert _rest(runs[name]) == _rest(runs[RESUMED[name]]), name
    for name in ON_OTHERS:
        assert f"checkpoint-{SAVED}" in runs[name]["restored"]
        assert _rest(runs[name]) == pytest.approx(_rest(runs[RESUMED[name]]), rel=1e-5), name


@pytest.mark.parametrize(("name", "alone"), [("plain", "without"), ("lora", "lora-without")], ids=["whole", "adapter"])
def test_a_folder_has_the_files_of_the_trainer(runs: dict[str, Any], name: str, alone: str) -> None:
    ours, theirs = (
        {p.name for p in (runs[one]["out"] / "run" / f"checkpoint-{SAVED}").iterdir()} for one in (name, alone)
    )
    assert not theirs - ours
    assert {file for file in ours - theirs if "rank_state" not in file} == {MANIFEST, "ckpttool_run_state.pt"}
    folder = runs[name]["out"] / "run" / f"checkpoint-{SAVED}"
    assert ckpttool.verify(folder, deep=True).sound
    assert ckpttool.inspect(folder).metrics["loss"] == runs[name]["losses"][str(SAVED)]


def test_the_files_are_those_of_the_trainer(runs: dict[str, Any]) -> None:
    from safetensors.torch import load_file

    for name, alone, file in (
        ("dropout", "without", "model.safetensors"), ("lora", "lora-without", "adapter_model.safetensors"),
    ):  # fmt: skip
        ours, theirs = (runs[one]["out"] / "run" / f"checkpoint-{SAVED}" for one in (name, alone))
        held, expected = load_file(ours / file), load_file(theirs / file)
        assert held.keys() == expected.keys()
        assert all(torch.equal(held[key], expected[key]) for key in held)
        states, known = (torch.load(one / "optimizer.pt") for one in (ours, theirs))
        assert states["param_groups"] == known["param_groups"]
        assert states["state"].keys() == known["state"].keys()
        for number, of_one in known["state"].items():
            assert all(torch.equal(states["state"][number][key], of_one[key]) for key in of_one)


def test_limits_and_the_best_model_work_with_saves_in_the_background(runs: dict[str, Any]) -> None:
    facts = runs["best"]
    best = min(facts["evals"], key=lambda step: facts["evals"][step])
    assert facts["best"] == str(facts["out"] / "run" / f"checkpoint-{best}")
    assert facts["evaluated"] == facts["evals"][best]
    left = {p.name for p in (facts["out"] / "run").iterdir()}
    assert left == {f"checkpoint-{best}", "checkpoint-5" if best != "5" else "checkpoint-4"}


def test_a_bucket_holds_the_run_and_its_best_model(runs: dict[str, Any]) -> None:
    facts, resumed = runs["bucket"], runs["from-bucket"]
    best = min(facts["evals"], key=lambda step: facts["evals"][step])
    assert facts["evaluated"] == facts["evals"][best]
    assert resumed["restored"] == "s3://runs/ddp/checkpoint-4"
    assert [*resumed["losses"]] == ["1", "2", "3", "4", "5", "6"]


def test_replicas_that_differ_are_named_and_an_export_changes_no_commit(runs: dict[str, Any]) -> None:
    assert any("weights of lm_head.weight differs between ranks 0 and 1" in line for line in runs["export"]["told"])
    folder = runs["export"]["out"] / "run" / f"checkpoint-{STEPS}"
    assert ckpttool.verify(folder, deep=True).sound
    written, committed = ((folder / name).stat().st_mtime_ns for name in ("model.safetensors", MANIFEST))
    assert written <= committed, "the weights of a commit were replaced"


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "ckpttool_run_state.pt"])
def test_a_commit_that_lacks_a_file_is_not_opened(runs: dict[str, Any], tmp_path: Path, name: str) -> None:
    folder = tmp_path / f"checkpoint-{SAVED}"
    shutil.copytree(runs["plain"]["out"] / "run" / folder.name, folder)
    (folder / name).unlink()
    with pytest.raises(CkptError, match=f"{name}: is missing, but the manifest lists it"):
        ckpttool.inspect(folder)
    assert not ckpttool.verify(folder).sound


def test_what_cannot_be_saved_or_restored_is_refused_by_name(runs: dict[str, Any]) -> None:
    assert "export_to: is missing" in runs["cast"]["error"]
    assert "the adapters of PEFT: are 2, but the save would have one alone" in runs["two-adapters"]["error"]
    assert not (runs["two-adapters"]["out"] / "run" / f"checkpoint-{SAVED}").exists()
    assert "does not record the trained parameters" in runs["unnamed"]["error"]


@pytest.mark.parametrize("n", KILLED)
def test_a_run_killed_in_a_save_goes_on_from_the_save_before(runs: dict[str, Any], n: int) -> None:
    killed, revived = runs[f"killed{n}"], runs[f"revived{n}"]
    assert -9 in killed["statuses"]
    assert revived["restored"].endswith(f"checkpoint-{SAVED}")
    assert _rest(revived) == pytest.approx(_rest(runs["plain"]), rel=1e-5)
    root = revived["out"] / "run"
    assert not [*root.rglob(MARK)]
    assert [(one.name, one.whole) for one in ckpttool.ls(root).entries] == [
        (f"checkpoint-{SAVED}", True),
        (f"checkpoint-{STEPS}", True),
    ]
    assert not ckpttool.verify(root / f"checkpoint-{STEPS}", deep=True).findings


@pytest.mark.parametrize(
    ("name", "source"), [("flipped", "plain"), ("cut", "without"), ("torn", "without"), ("unreadable", "without")]
)
def test_a_damaged_checkpoint_is_passed_over_and_named(runs: dict[str, Any], name: str, source: str) -> None:
    facts = runs[name]
    assert facts["restored"].endswith(f"checkpoint-{SAVED}")
    assert any(f"checkpoint-{STEPS}" in line and "trying the one before" in line for line in facts["told"])
    assert _rest(facts) == _rest(runs[source])
    assert (facts["out"] / "run" / f"checkpoint-{STEPS}.damaged").is_dir(), "the save of its step moved it aside"
