"""The newest checkpoint of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ckpttool.saving.coordination import Alone
from ckpttool.storage import LOCAL, aside_name
from tests.saving.checkpoints import save_version

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.deepspeed


def test_lightning_resumes_from_no_checkpoint_that_was_being_removed(tmp_path: Path) -> None:
    from ckpttool.integrations.lightning import newest_checkpoint  # seconds, in each worker of the tests

    for number in (1, 2):
        save_version(LOCAL, str(tmp_path / f"step={number}.ckpt"), Alone(), "checkpoint", number)
    assert newest_checkpoint(tmp_path) == str(tmp_path / "step=2.ckpt")
    (tmp_path / "step=2.ckpt").rename(tmp_path / aside_name("step=2.ckpt"))
    assert newest_checkpoint(tmp_path) == str(tmp_path / "step=1.ckpt")
