"""A run whose newest checkpoint is torn trains past the step of that checkpoint."""

from __future__ import annotations

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
        file = next((root / "global_step4").glob("*optim_states.pt"))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    found["left"] = sorted(path.name for path in root.iterdir() if path.is_dir())
    fresh = build(2, "bf16", "two", "adamw", seed=5)
    fresh.load_checkpoint(str(root), tag="global_step2")
    found["DeepSpeed"] = fresh.global_steps
    return found


def test_the_save_of_the_torn_step_succeeds(tmp_path: Path) -> None:
    (found,) = _train_past(tmp_path)
    assert [found["restored 1"], found["restored 2"], found["DeepSpeed"]] == [2, 2, 2]
    assert [found["refused 1"], found["refused 2"]] == ["", ""]
    assert found["left"] == ["global_step2", "global_step4", "global_step4.damaged", "global_step4.damaged.damaged"]
    (first,), (second,) = found["said 1"], found["said 2"]
    assert first.startswith("step 4 is saved as global_step4; the checkpoint there is now ")
    assert "cannot be restored: " in second
