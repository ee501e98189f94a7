"""A run whose newest checkpoint is torn trains past the step of that checkpoint."""

from __future__ import annotations

import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from ckpttool import CheckpointManager
from tests.deepspeed.engines import build, logged, refusal, step
from tests.forked import on_ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.deepspeed


@on_ranks(1)
def _train_past(directory: Path) -> dict[str, Any]:
    root = directory / "root"
    engine = build(2, "bf16", "two", "adamw")
    for _ in range(2):
        step(engine, 2)
        engine.save_checkpoint(str(root))
    next((root / "global_step4").glob("*optim_states.pt")).unlink()
    found: dict[str, Any] = {}
    for life in (1, 2):  # the second finds a checkpoint of ours that is damaged
        with CheckpointManager(root) as manager, logged() as lines:
            manager.restore(engine := build(2, "bf16", "two", "adamw", seed=life))
            found[f"restored {life}"] = engine.global_steps
            step(engine, 2)
            found[f"refused {life}"] = refusal(partial(manager.save, engine))
            found[f"said {life}"] = [line for line in lines if "is saved as" in line]
        _flip(root, "global_step4")
    found["left"] = sorted(path.name for path in root.iterdir() if path.is_dir())
    fresh = build(2, "bf16", "two", "adamw", seed=5)
    fresh.load_checkpoint(str(root), tag="global_step2")
    found["DeepSpeed"] = fresh.global_steps
    return found


def _flip(root: Path, tag: str) -> None:
    file = next((root / tag).glob("*optim_states.pt"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@on_ranks(1)
def _later_starts(directory: Path) -> dict[str, Any]:
    """What is left where a run went back, saved other steps, and was started again before the damaged step."""
    root = directory / "root"
    engine = build(2, "bf16", "two", "adamw")

    def saved(engine: Any, to: int, **options: Any) -> list[str]:
        with CheckpointManager(root, **options) as manager:
            manager.restore(engine)
            restored = engine.global_steps
            step(engine, to - restored)
            manager.save(engine)
        return [str(restored), *sorted(path.name for path in root.iterdir() if path.is_dir())]

    with CheckpointManager(root) as manager:
        for _ in range(2):
            step(engine, 2)
            manager.save(engine)
    _flip(root, "global_step4")
    found = {"first": saved(build(2, "bf16", "two", "adamw", seed=1), 3, keep_last=2)}
    found["second"] = saved(build(2, "bf16", "two", "adamw", seed=2), 4, keep_last=2)

    forked = directory / "forked"
    with CheckpointManager(forked) as manager:
        engine = build(2, "bf16", "two", "adamw")
        for _ in range(5):
            step(engine, 1)
            manager.save(engine)
    shutil.copytree(forked / "global_step5", forked / "mine")
    with CheckpointManager(forked, keep_last=2) as manager:
        manager.restore(engine, tag="global_step3")
        step(engine, 3)
        manager.save(engine)
    found["forked"] = sorted(path.name for path in forked.iterdir() if path.is_dir())
    return found


def test_a_later_start_passes_the_damaged_step_and_no_rotation_counts_it(tmp_path: Path) -> None:
    (found,) = _later_starts(tmp_path)
    # What the run was trained from is counted, the damaged one is not.
    assert found["first"] == ["2", "global_step2", "global_step3", "global_step4"]
    assert found["second"] == ["3", "global_step3", "global_step4", "global_step4.damaged"]


def test_rotation_counts_what_a_run_went_back_to_and_no_copy_of_a_user(tmp_path: Path) -> None:
    (found,) = _later_starts(tmp_path)
    assert found["forked"] == ["global_step3", "global_step6", "mine"]


def test_the_save_of_the_torn_step_succeeds(tmp_path: Path) -> None:
    (found,) = _train_past(tmp_path)
    assert [found["restored 1"], found["restored 2"], found["DeepSpeed"]] == [2, 2, 2]
    assert [found["refused 1"], found["refused 2"]] == ["", ""]
    assert found["left"] == ["global_step2", "global_step4", "global_step4.damaged", "global_step4.damaged.damaged"]
    (first,), (second,) = found["said 1"], found["said 2"]
    assert first.startswith("step 4 is saved as global_step4; the checkpoint there is now ")
    assert "cannot be restored: " in second
