"""Of a root with other files in it, ckpttool takes the checkpoint that DeepSpeed takes."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from ckpttool import CheckpointManager
from tests.deepspeed.engines import build, logged, refusal, step
from tests.forked import on_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed


@on_ranks(1)
def _answers(directory: Path) -> dict[str, Any]:
    """Steps that DeepSpeed and ckpttool load from roots with rank files beside ``latest``, and their weights."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from safetensors.torch import load_file

    root, kept = directory / "root", directory / "kept"
    engine = build(2, "bf16", "two", "adamw")
    for count in (2, 4):
        step(engine, 2)
        engine.save_checkpoint(str(root))
        assert engine.global_steps == count
    for file in (root / "global_step2").glob("*.pt"):
        shutil.copy(file, root)
    found: dict[str, Any] = {}
    fresh = build(2, "bf16", "two", "adamw", seed=1)
    fresh.load_checkpoint(str(root))
    found["DeepSpeed"] = fresh.global_steps
    fresh = build(2, "bf16", "two", "adamw", seed=2)
    found["load"] = ckpttool.load(fresh, root, prove=True).step
    CheckpointManager(root).restore(fresh := build(2, "bf16", "two", "adamw", seed=3))
    found["restore"] = fresh.global_steps
    ckpttool.consolidate(root, directory / "weights", to="safetensors")
    ours, theirs = load_file(directory / "weights/model.safetensors"), get_fp32_state_dict_from_zero_checkpoint(root)
    found["zero_to_fp32"] = all(ours[name].equal(value) for name, value in theirs.items())

    shutil.copytree(root / "global_step4", kept / "global_step4")
    (kept / "latest").write_text("global_step4")
    for file in kept.rglob("*optim_states.pt"):
        file.unlink()
    fresh = build(2, "bf16", "two", "adamw", seed=4)
    found["whole"] = refusal(lambda: ckpttool.load(fresh, kept))
    ckpttool.load(fresh, kept, weights_only=True)
    found["weights"] = [
        all(p.equal(q) for p, q in zip(fresh.module.parameters(), engine.module.parameters(), strict=True))
    ]
    manager = CheckpointManager(directory / "committed")
    manager.save(engine)
    manager.wait()
    for file in (directory / "committed").rglob("*optim_states.pt"):
        file.unlink()
    for number, root_of in enumerate((kept, directory / "committed")):
        CheckpointManager(root_of).restore(
            fresh := build(2, "bf16", "two", "adamw", seed=7 + number), weights_only=True
        )
        ckpttool.consolidate(root_of, directory / f"module{number}", to="safetensors", weights_from="module")
        theirs = load_file(directory / f"module{number}/model.safetensors")
        live = dict(engine.module.named_parameters())
        found["weights"] += [
            all(p.equal(live[name]) for name, p in fresh.module.named_parameters()),
            all(value.bfloat16().equal(live[name].bfloat16()) for name, value in theirs.items() if name in live),
        ]
    found["committed"] = refusal(lambda: ckpttool.load(fresh, directory / "committed"))

    named = directory / "named"
    for tag, count in (("run2026", 0), ("last", 2)):
        step(engine, count)
        engine.save_checkpoint(str(named), tag, save_latest=False)
    CheckpointManager(named).restore(fresh := build(2, "bf16", "two", "adamw", seed=6))
    found["by recorded step"] = (fresh.global_steps, [entry.name for entry in ckpttool.ls(named).entries])

    (root / "latest").write_text("global_step9")
    fresh = build(2, "bf16", "two", "adamw", seed=5)
    found["both"] = refusal(lambda: ckpttool.load(fresh, root))
    with logged() as lines:
        CheckpointManager(root).restore(fresh)
    found["warned"] = [line for line in lines if "latest names" in line]
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: TempPathFactory) -> dict[str, Any]:
    return _answers(tmp_path_factory.mktemp("which"))[0]


@pytest.mark.parametrize("by", ["DeepSpeed", "load", "restore"])
def test_what_latest_names_is_loaded(answers: dict[str, Any], by: str) -> None:
    assert answers[by] == 4


def test_the_weights_are_those_of_zero_to_fp32(answers: dict[str, Any]) -> None:
    assert answers["zero_to_fp32"]


def test_the_model_is_loaded_without_the_files_of_the_optimizer(answers: dict[str, Any]) -> None:
    assert "holds no ZeRO optimizer files" in answers["whole"]
    assert "is missing, but the manifest lists it" in answers["committed"]
    assert answers["weights"] == [True] * 5


def test_without_latest_the_recorded_step_counts_not_the_number_in_a_name(answers: dict[str, Any]) -> None:
    assert answers["by recorded step"] == (6, ["run2026", "last"])


def test_where_nothing_decides_both_are_named(answers: dict[str, Any]) -> None:
    assert "but latest names 'global_step9', which is not there" in answers["both"]
    (warning,) = answers["warned"]
    assert warning.endswith("latest names 'global_step9', which is not there; resuming from global_step4")
