"""The folder that ``load_state`` reads has the weights that Accelerate itself and the commands read."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from tests.forked import on_ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.deepspeed


@on_ranks(1)
def _of_accelerate(directory: Path) -> dict[str, list[bool]]:
    """Whether Accelerate, ckpttool in its place, and the commands load the same weights from each path of a project.

    The files of the first checkpoint's ranks are also beside ``latest`` of the second.
    """
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration

    from ckpttool.integrations.accelerate import prepare

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        project_config=ProjectConfiguration(str(directory), automatic_checkpoint_naming=True),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    model = torch.nn.Linear(4, 3)
    engine, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    saved = []
    for _ in range(2):
        accelerator.backward(engine(torch.ones(1, 4)).sum())
        optimizer.step()
        accelerator.save_state()
        saved.append(model.weight.detach().clone())
    folders = [directory / "checkpoints" / f"checkpoint_{number}" for number in (0, 1)]
    for file in (folders[0] / "pytorch_model").glob("*.pt"):
        shutil.copy(file, folders[1])

    def loaded(folder: Path | None) -> Any:
        accelerator.load_state(*([] if folder is None else [str(folder)]))
        return model.weight.detach().clone()

    asked = [None, *folders]
    theirs = [loaded(folder) for folder in asked]
    prepare(accelerator)
    ours = [loaded(folder) for folder in asked]
    read = [ckpttool.load_state_dict(folder or folders[1])["weight"] for folder in asked]
    same = [a.equal(b) and a.equal(c) for a, b, c in zip(theirs, ours, read, strict=True)]
    return {"same": same, "expected": [a.equal(b) for a, b in zip(theirs, [saved[1], *saved], strict=True)]}


def test_ranks_files_beside_latest_change_nothing_for_accelerate(tmp_path: Path) -> None:
    assert _of_accelerate(tmp_path)[0] == {"same": [True] * 3, "expected": [True] * 3}
