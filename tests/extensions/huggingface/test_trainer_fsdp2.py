"""The Trainer with FSDP2 and a ``CkptCallback``: saves, resumes on other ranks, kills, limits and the best model."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

import ckpttool
from ckpttool.formats.chunk_index import CHUNK_INDEX
from ckpttool.formats.dcp import ACCELERATE_MODEL, ACCELERATE_OPTIMIZER
from ckpttool.model.names import adapter_name
from ckpttool.storage import MANIFEST, MARK
from tests import sampling
from tests.extensions.huggingface import trainer_runs
from tests.extensions.huggingface.trainer_runs import SAVED, STEPS
from tests.frameworks.jobs import Jobs

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed
KILLS = ((0, 3, True), (1, 3, False), (0, 9, True))
"""Rank, number of its write in the last save before which it is killed, and whether all ranks are."""
KILLED = sampling.some(range(len(KILLS)), 1, key="kills")
"""Indexes of the kills that are tried."""
BEST = {
    "load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 2, "eval_strategy": "steps",
    "eval_steps": 1, "lr_scheduler_type": "constant",
}  # fmt: skip


ADAPTERS = {
    "lora-again": "lora", "lora-by-trainer": "lora", "lora-from-trainer": "lora-without", "lora-on-3": "lora-plain",
    "lora-to-ddp": "lora-plain",
}  # fmt: skip
"""Runs of an adapter of PEFT that resume from a save of others."""


def _flip(folder: Path) -> None:
    """Change a bit of a tensor."""
    file = max((folder / "optimizer_0").glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    at = data.index(b"archive/data/0") + 200
    data[at] ^= 1
    file.write_bytes(data)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: TempPathFactory) -> dict[str, Any]:
    """The facts of all runs, by name."""
    directory = tmp_path_factory.mktemp("fsdp2")
    jobs = Jobs(trainer_runs, directory, lambda out: {"output_dir": str(out / "run"), "callback": {}, "fsdp2": True})

    def add(name: str, ranks: int, **values: Any) -> None:
        jobs.add(name, 0, ranks, **values)

    add("dropout", 2, dropout=0.5, callback={"async_save": True})
    add("plain", 2)
    add("without", 2, callback=None)
    add(
        "best", 2, steps=5, save_steps=1, learning_rate=0.3, arguments=BEST, evaluate=True,
        callback={"async_save": True, "export_every": 2}, save_model=str(directory / "best" / "weights"),
    )  # fmt: skip
    for n in KILLED:
        rank, number, everyone = KILLS[n]
        point = {"rank": rank, "number": number, "everyone": everyone, "step": STEPS}
        add(f"killed{n}", 2, kill=point, callback={"timeout": 5.0}, fails=True)
    add("lora", 2, dropout=0.5, peft=True, save_model=str(directory / "lora" / "weights"))
    add("lora-plain", 2, peft=True)
    add("lora-without", 2, dropout=0.5, peft=True, callback=None)
    add("full", 2, state_dicts="FULL_STATE_DICT", fails=True)
    found = jobs.run()
    for name, source in (
        ("again", "dropout"), ("on-3", "plain"), ("from-trainer", "without"), ("by-trainer", "plain"),
        *ADAPTERS.items(),
    ):  # fmt: skip
        folder = f"run/checkpoint-{SAVED}"
        shutil.copytree(directory / source / folder, directory / name / folder)
    add("again", 2, dropout=0.5, resume=True)
    add("on-3", 3, callback={"auto_resume": True})
    add("from-trainer", 3, resume=True)
    add("by-trainer", 2, resume=True, callback=None)
    add("lora-again", 2, dropout=0.5, peft=True, resume=True)
    add("lora-by-trainer", 2, dropout=0.5, peft=True, resume=True, callback=None)
    add("lora-from-trainer", 2, dropout=0.5, peft=True, resume=True)
    add("lora-on-3", 3, peft=True, resume=True)
    add("lora-to-ddp", 2, peft=True, resume=True, fsdp2=False, plain=True)
    shutil.copytree(directory / "plain" / "run", directory / "flipped" / "run")
    _flip(directory / "flipped" / "run" / f"checkpoint-{STEPS}")
    add("flipped", 2, resume=True)
    for n in KILLED:
        shutil.copytree(directory / f"killed{n}" / "run", directory / f"revived{n}" / "run")
        add(f"revived{n}", 2 + n % 2, resume=True)
    return found | jobs.run()


def _rest(facts: dict[str, Any]) -> list[float]:
    return [loss for step, loss in facts["losses"].items() if int(step) > SAVED]


def test_a_resume_has_the_losses_of_a_run_that_did_not_stop(runs: dict[str, Any]) -> None:
    assert _rest(runs["again"]) == _rest(runs["dropout"])
    assert _rest(runs["by-trainer"]) == _rest(runs["plain"]), "the Trainer alone"
    for name, source in (("on-3", "plain"), ("from-trainer", "without")):
        assert runs[name]["restored"].endswith(f"checkpoint-{SAVED}")
        assert _rest(runs[name]) == pytest.approx(_rest(runs[source]), rel=1e-5)


def test_an_adapter_is_resumed_as_a_whole_model_is(runs: dict[str, Any]) -> None:
    for name, source in ADAPTERS.items():
        same = "on-3" not in name and "ddp" not in name
        whole = _rest(runs[source])
        assert _rest(runs[name]) == (whole if same else pytest.approx(whole, rel=1e-5)), name


def test_save_model_writes_the_adapter(runs: dict[str, Any]) -> None:
    held = load_file(runs["lora"]["out"] / "weights" / "adapter_model.safetensors")
    truth = ckpttool.load_state_dict(runs["lora"]["out"] / "run" / f"checkpoint-{STEPS}")
    names = {found[1]: name for name in truth if (found := adapter_name(name))}
    assert held.keys() == names.keys()
    assert all(torch.equal(held[file], truth[name]) for file, name in names.items())


@pytest.mark.parametrize(("name", "alone"), [("plain", "without"), ("lora", "lora-without")], ids=["whole", "adapter"])
def test_a_folder_has_the_files_of_the_trainer(runs: dict[str, Any], name: str, alone: str) -> None:
    ours, theirs = (
        {str(p.relative_to(f)) for p in f.rglob("*") if p.is_file()}
        for f in (runs[one]["out"] / "run" / f"checkpoint-{SAVED}" for one in (name, alone))
    )
    assert not theirs - ours
    beside = {"adapter_config.json", "README.md"} if name == "lora" else {"config.json", "generation_config.json"}
    assert {file for file in ours - theirs if "rank_state" not in file} == {
        MANIFEST, "ckpttool_run_state.pt", "training_args.bin", *beside,
        f"{ACCELERATE_MODEL}/{CHUNK_INDEX}", f"{ACCELERATE_OPTIMIZER}/{CHUNK_INDEX}",
    }  # fmt: skip
    folder = runs[name]["out"] / "run" / f"checkpoint-{SAVED}"
    assert ckpttool.verify(folder, deep=True).sound
    assert ckpttool.inspect(folder).metrics["loss"] == runs[name]["losses"][str(SAVED)]


def test_exports_and_conversions_have_the_files_of_the_trainer(runs: dict[str, Any], tmp_path: Path) -> None:
    whole, adapter = (runs[name]["out"] / "run" / f"checkpoint-{SAVED}" for name in ("plain", "lora"))
    ckpttool.consolidate(whole, tmp_path / "weights", to="safetensors")
    ckpttool.consolidate(adapter, tmp_path / "adapter", to="safetensors", adapter_only=True)
    report = ckpttool.convert(whole, tmp_path / "zero", to="zero", stage=2, world_size=3, dtype="fp32")
    for out, source, names in (
        ("weights", whole, {"config.json", "generation_config.json"}),
        ("adapter", adapter, {"adapter_config.json", "README.md"}),
        ("zero", whole, {"config.json", "generation_config.json", "trainer_state.json", "scheduler.pt"}),
    ):
        for name in names:
            assert (tmp_path / out / name).read_bytes() == (source / name).read_bytes(), name
    assert not [note for note in report.notes if "other files" in note]


def test_limits_and_the_best_model_work_with_saves_in_the_background(runs: dict[str, Any]) -> None:
    facts = runs["best"]
    best = min(facts["evals"], key=lambda step: facts["evals"][step])
    assert facts["best"] == str(facts["out"] / "run" / f"checkpoint-{best}")
    assert facts["evaluated"] == facts["evals"][best]
    left = {p.name for p in (facts["out"] / "run").iterdir()}
    assert left == {f"checkpoint-{best}", "checkpoint-5" if best != "5" else "checkpoint-4"}


def test_save_model_writes_the_weights(runs: dict[str, Any]) -> None:
    from transformers import LlamaForCausalLM

    facts = runs["best"]
    held = LlamaForCausalLM.from_pretrained(facts["out"] / "weights").state_dict()
    truth = ckpttool.load_state_dict(facts["best"])
    assert all(torch.equal(held[name], truth[name]) for name in truth)
    assert sorted(p.name for p in (facts["out"] / "weights").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "training_args.bin",
    ]  # fmt: skip


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


def test_a_damaged_checkpoint_is_passed_over_and_named(runs: dict[str, Any]) -> None:
    facts = runs["flipped"]
    assert facts["restored"].endswith(f"checkpoint-{SAVED}")
    assert any(f"checkpoint-{STEPS}" in line and "trying the one before" in line for line in facts["told"])
    assert _rest(facts) == _rest(runs["plain"])
    root = facts["out"] / "run"
    assert (root / f"checkpoint-{STEPS}.damaged").is_dir(), "the save of its step moved it aside"
    assert not ckpttool.verify(root / f"checkpoint-{STEPS}", deep=True).findings


def test_full_state_dicts_are_refused(runs: dict[str, Any]) -> None:
    assert "is added to a Trainer with FSDP, but not with FSDP2 and sharded state dicts" in runs["full"]["error"]
