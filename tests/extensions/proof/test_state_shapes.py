"""States of optimizers in any shape that follows from the parameter's are proven."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import ckpttool
from tests.integrations.test_state_shapes import KINDS, _run, _train

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"blocks"}))
def test_every_restored_state_is_proven(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    saved, run = _run(kind, 1, dtype), _run(kind, 2, dtype)
    _train(saved, 4)
    ckpttool.CheckpointManager(tmp_path).save(saved[0], optimizer=saved[1], step=4)
    proof = ckpttool.load(run[0], tmp_path, optimizer=run[1], prove=True).proof
    assert str(proof).startswith("proven: ")
