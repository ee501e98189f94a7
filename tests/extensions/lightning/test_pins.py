"""The internals of Lightning that ckpttool uses: a test fails, and names the part, if a release changes one."""

from __future__ import annotations

import pytest

import ckpttool
from tests.frameworks.pins import names as names_of
from tests.wording import refused

pytestmark = pytest.mark.deepspeed


def test_a_changed_method_of_lightning_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.strategies import DeepSpeedStrategy

    from ckpttool.extensions.lightning import api as lightning

    lightning.check_strategy()
    assert {"save_checkpoint", "exclude_frozen_parameters", "broadcast"} <= names_of(DeepSpeedStrategy.save_checkpoint)
    assert {"load_checkpoint", "strict_loading"} <= names_of(DeepSpeedStrategy.load_checkpoint)
    monkeypatch.setattr(DeepSpeedStrategy, "remove_checkpoint", lambda self, path, now: None)
    with refused(ckpttool.PlanError):
        lightning.check_strategy()


def test_a_strategy_of_lightning_that_saves_one_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    from ckpttool.extensions.lightning import api as lightning

    class Strategy(lightning.CkptSaves, DDPStrategy):
        """Not for DeepSpeed."""

    with refused(ckpttool.PlanError):
        Strategy()
    with refused(ckpttool.ArgumentError):
        lightning.CkptModelParallelStrategy(save_distributed_checkpoint=False)
    assert {"_save_distributed_checkpoint", "broadcast"} <= names_of(ModelParallelStrategy.save_checkpoint)
    monkeypatch.setattr(ModelParallelStrategy, "load_checkpoint", lambda self, path: None)
    with refused(ckpttool.PlanError):
        lightning.CkptModelParallelStrategy()
