"""Every example runs and does what it says. The blocks of README and of the documentation: ``tests/docs``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ckpttool
from ckpttool.storage import MANIFEST
from tests import sampling, scripts

ROOT = Path(__file__).resolve().parent.parent
STEPS = 18
"""Steps of examples that are killed after their first save, at step 5 or 6."""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory that sees the fixtures under the name the README uses."""
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _run(*arguments: str) -> str:
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_library_example_runs(workplace: Path) -> None:
    out = workplace / "out"
    printed = _run(str(ROOT / "examples" / "library.py"), "fixtures/checkpoints/zero3-dp3-bf16", str(out))
    assert "ZeRO-3 over 3 ranks" in printed
    assert (out / "model.safetensors").exists()


def test_the_demo_runs_and_finds_every_weight_equal(tmp_path: Path) -> None:
    printed = _run(str(ROOT / "examples" / "demo.py"), str(tmp_path / "out"))
    assert "20 of 20 equal, bit for bit" in printed


@pytest.mark.deepspeed
def test_the_train_loop_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    script, root = str(ROOT / "examples" / "train_loop.py"), str(tmp_path / "run")
    first, second = scripts.run(
        tmp_path / "logs", ["deepspeed"],
        (2, [script, root, "--steps", "4", "--save-every", "2"]),
        (3, [script, root, "--steps", "6", "--save-every", "2", "--stage", "3"]),
    )  # fmt: skip
    assert first.count("saved global_step") == 2
    assert "from ZeRO-2 over 2 ranks to ZeRO-3 over 3 ranks" in second
    assert "proven: 16 tensors on 3 ranks equal the state saved at step 4 (" in second
    assert "replayed step 5: loss " in second
    assert "step 6: loss" in second
    assert "step 2: loss" not in second
    entries = ckpttool.ls(root).entries
    assert [(e.name, e.whole, e.latest) for e in entries[-2:]] == [
        ("global_step4", True, False),
        ("global_step6", True, True),
    ]


@pytest.mark.deepspeed
def test_the_trainer_resumes_on_more_ranks_and_its_export_is_loaded_back(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "huggingface_trainer.py")
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    first, second = scripts.run(
        tmp_path / "logs", ["transformers.trainer", "transformers.models.llama.modeling_llama"],
        (2, [script, run, out, "--stage", "3", "--steps", "12"]),
        (3, [script, run, out, "--stage", "2", "--steps", "24"]),
    )  # fmt: skip
    assert "started at step 0" in first
    assert "resumed from step 12" in second
    losses = [float(found) for found in re.findall(r"while training ([\d.]+), loaded back ([\d.]+)", second)[0]]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert losses[0] < 2  # of 3.5 at first
    assert sorted(os.listdir(run)) == ["checkpoint-18", "checkpoint-24"]


@pytest.mark.deepspeed
def test_accelerate_resumes_on_more_ranks_and_its_weights_are_loaded_back(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "huggingface_accelerate.py")
    command = [script, str(tmp_path / "run"), str(tmp_path / "out")]
    first, second = scripts.run(
        tmp_path / "logs", ["accelerate"],
        (2, [*command, "--stage", "3", "--steps", "10"]),
        (3, [*command, "--stage", "2", "--steps", "20"]),
    )  # fmt: skip
    assert "trained from step 0 to 10" in first
    assert "trained from step 10 to 20" in second
    for printed in (first, second):
        assert "outputs of the plain model differ by 0.000000" in printed


def _killed_and_whole(directory: Path, example: str, strategy: str, imports: list[str], saved: str) -> list[str]:
    """Kill an example on two ranks after a save, resume it on three, and run it on two without an interruption.

    Last, DeepSpeed continues the resumed run. Return what the last three printed.
    """
    on_cpu = [str(ROOT / "tests" / "accelerate_on_cpu.py")] if strategy == "fsdp2" else []
    run, whole, on = (
        [*on_cpu, str(ROOT / example), str(directory / name), str(directory / "out"), "--strategy", used, "--fp32"]
        for name, used in (("run", strategy), ("whole", strategy), ("run", "deepspeed"))
    )
    _, *printed = scripts.run(
        directory / "logs", imports,
        (2, [*run, "--steps", "2000"]), (3, [*run, "--steps", f"{STEPS}"]), (2, [*whole, "--steps", f"{STEPS}"]),
        (2, [*on, "--steps", f"{STEPS + 6}"]),
        killed=f"{directory}/run/{saved}/{MANIFEST}",
    )  # fmt: skip
    return printed


@pytest.mark.deepspeed
@pytest.mark.parametrize("strategy", sampling.some(["fsdp2", "ddp"], 1))
def test_the_trainer_without_deepspeed_resumes_on_more_ranks_after_a_kill(tmp_path: Path, strategy: str) -> None:
    imports = ["transformers.trainer", "transformers.models.llama.modeling_llama"]
    resumed, _, continued = _killed_and_whole(
        tmp_path, "examples/huggingface_trainer.py", strategy, imports, "checkpoint-?"
    )
    found = re.search(r"resumed from step (\d+); loss while training ([\d.]+), loaded back ([\d.]+)", resumed)
    assert found
    assert int(found[1]) > 0
    assert found[2] == found[3]
    assert f"resumed from step {STEPS}" in continued
    losses, expected = (
        {entry["step"]: entry["loss"] for entry in json.loads(path.read_text())["log_history"] if "loss" in entry}
        for path in (tmp_path / name / f"checkpoint-{STEPS}" / "trainer_state.json" for name in ("run", "whole"))
    )
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.deepspeed
@pytest.mark.parametrize("strategy", sampling.some(["ddp", "fsdp2"], 1))
def test_accelerate_without_deepspeed_resumes_on_more_ranks_after_a_kill(tmp_path: Path, strategy: str) -> None:
    example, saved = "examples/huggingface_accelerate.py", "checkpoints/checkpoint_?"
    *printed, continued = _killed_and_whole(tmp_path, example, strategy, ["accelerate", "transformers"], saved)
    losses, expected = (
        {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\S+)", one)} for one in printed
    )
    found = re.search(rf"trained from step (\d+) to {STEPS}", printed[0])
    assert found
    assert int(found[1]) > 0
    assert [*losses] == [*range(int(found[1]) + 1, STEPS + 1)]
    assert losses == pytest.approx({step: expected[step] for step in losses}, rel=1e-5)
    assert f"trained from step {STEPS} to {STEPS + 6}" in continued
    for one in (*printed, continued):
        assert "outputs of the plain model differ by 0.000000" in one


@pytest.mark.deepspeed
def test_lightning_resumes_on_more_ranks_and_its_weights_are_loaded_back(tmp_path: Path) -> None:
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    command = [str(ROOT / "tests" / "lightning_on_cpu.py"), str(ROOT / "examples" / "lightning_deepspeed.py"), run, out]
    first, second = scripts.run(
        tmp_path / "logs", ["lightning.pytorch.strategies"],
        (2, [*command, "--stage", "3", "--epochs", "2"]),
        (3, [*command, "--stage", "2", "--epochs", "4"]),
    )  # fmt: skip
    assert "trained from the beginning to epoch 2" in first
    assert f"trained from {run}/epoch=1.ckpt to epoch 4" in second
    for printed in (first, second):
        assert "outputs of the plain model differ by 0.000000" in printed


@pytest.mark.deepspeed
def test_lightning_with_fsdp2_resumes_on_more_ranks_after_a_kill(tmp_path: Path) -> None:
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    command = [str(ROOT / "examples" / "lightning_fsdp2.py"), run, out]
    _, second = scripts.run(
        tmp_path / "logs", ["lightning.pytorch.strategies"],
        (2, [*command, "--epochs", "1000"]),
        (3, [*command, "--epochs", "16"]),
        killed=f"{run}/epoch=?.ckpt/{MANIFEST}",
    )  # fmt: skip
    assert re.search(rf"trained from {run}/epoch=\d\.ckpt to epoch 16", second)
    assert "outputs of the plain model differ by 0.000000" in second


def test_every_example_is_run() -> None:
    """Those of Ray: in tests/under_ray, on one cluster after the other."""
    under_ray = ROOT / "tests" / "under_ray"
    files = [Path(__file__), *(under_ray / f"test_{name}.py" for name in ("ray_train", "frameworks", "documented"))]
    here = "".join(path.read_text() for path in files)
    for path in (ROOT / "examples").glob("*.py"):
        assert f'"{path.name}"' in here or f"examples/{path.name}" in here, path.name


def test_the_changelog_names_this_version() -> None:
    from ckpttool import __version__

    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_project_speaks_of_itself_alone() -> None:
    """No path of a developer's machine in anything that is committed."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    here = os.path.dirname(ROOT) + "/"
    for name in tracked:
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".txt", ".yaml", ".json"} and path.exists():
            assert here not in path.read_text(encoding="utf-8"), name
