"""What ckpttool relies on inside the frameworks: a release that changes it fails here, with the name of the part."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import ckpttool
from tests.wording import refused

pytestmark = pytest.mark.deepspeed


def _names(function: Any) -> set[str]:
    """The global names, attributes and keywords that a function uses, also in nested ones."""
    code = [inspect.unwrap(function).__code__]
    found: set[str] = set()
    while code:
        one = code.pop()
        found |= {*one.co_names, *one.co_varnames}
        for constant in one.co_consts:
            if inspect.iscode(constant):
                code.append(constant)
            elif isinstance(constant, tuple):
                found |= {name for name in constant if isinstance(name, str)}
    return found


TRAINER: dict[str | tuple[str, ...], set[str]] = {
    "train": {"get_last_checkpoint", "_inner_training_loop"},
    ("_prepare_for_training", "_inner_training_loop"): {
        "deepspeed_load_checkpoint", "_load_optimizer_and_scheduler", "model_wrapped",
    },
    "_load_best_model": {"deepspeed_load_checkpoint", "best_model_checkpoint"},
    "_save_checkpoint": {
        "save_model", "_internal_call", "_get_output_dir", "best_global_step", "_save_optimizer_and_scheduler",
        "_save_rng_state", "_push_from_checkpoint", "save_to_json",
    },
    "_save_optimizer_and_scheduler": {"save_checkpoint", "exclude_frozen_parameters", "model_wrapped"},
    ("_run_epoch", "_inner_training_loop"): {"_load_rng_state"},
    "save_model": {"_save", "save_checkpoint", "get_state_dict"},
    "push_to_hub": {"save_model"},
}  # fmt: skip
"""By method of the Trainer: what it must use. Of two methods, the second one is that of transformers 4.57."""


@pytest.mark.parametrize("methods", list(TRAINER), ids=str)
def test_the_trainer_calls_what_ckpttool_takes_over(methods: str | tuple[str, ...]) -> None:
    import transformers

    names = [methods] if isinstance(methods, str) else methods
    method = next(name for name in names if hasattr(transformers.Trainer, name))
    missing = TRAINER[methods] - _names(getattr(transformers.Trainer, method))
    assert not missing, f"transformers {transformers.__version__}: Trainer.{method} does not use {missing} any more"


def test_a_changed_method_of_the_trainer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    from ckpttool.integrations import huggingface

    huggingface.check_trainer()
    monkeypatch.setattr(transformers.Trainer, "_save", lambda self, folder: None)
    with refused(ckpttool.PlanError):
        huggingface.check_trainer()


def test_accelerate_calls_what_ckpttool_takes_over() -> None:
    from accelerate import Accelerator

    for method, names in {
        "save_state": {
            "save_checkpoint",
            "_models",
            "automatic_checkpoint_naming",
            "save_accelerator_state",
            "iteration",
        },
        "load_state": {"load_checkpoint", "_models", "load_accelerator_state", "load_custom_state"},
    }.items():
        missing = names - _names(getattr(Accelerator, method))
        assert not missing, f"Accelerator.{method} does not use {missing} any more"


def test_a_changed_method_of_accelerate_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import Accelerator

    from ckpttool.integrations.accelerate import prepare

    monkeypatch.setattr(Accelerator, "load_state", lambda self, folder: None)
    with refused(ckpttool.PlanError):
        prepare(None)


def test_a_changed_method_of_lightning_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.strategies import DeepSpeedStrategy

    from ckpttool.integrations import lightning

    lightning.check_strategy()
    assert {"save_checkpoint", "exclude_frozen_parameters", "broadcast"} <= _names(DeepSpeedStrategy.save_checkpoint)
    assert {"load_checkpoint", "strict_loading"} <= _names(DeepSpeedStrategy.load_checkpoint)
    monkeypatch.setattr(DeepSpeedStrategy, "remove_checkpoint", lambda self, path, now: None)
    with refused(ckpttool.PlanError):
        lightning.check_strategy()


def test_a_strategy_of_lightning_that_saves_one_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    from ckpttool.integrations import lightning

    class Strategy(lightning.CkptSaves, DDPStrategy):
        """Not for DeepSpeed."""

    with refused(ckpttool.PlanError):
        Strategy()
    with refused(ckpttool.ArgumentError):
        lightning.CkptModelParallelStrategy(save_distributed_checkpoint=False)
    assert {"_save_distributed_checkpoint", "broadcast"} <= _names(ModelParallelStrategy.save_checkpoint)
    monkeypatch.setattr(ModelParallelStrategy, "load_checkpoint", lambda self, path: None)
    with refused(ckpttool.PlanError):
        lightning.CkptModelParallelStrategy()


def test_a_trainer_without_the_callback_or_without_deepspeed_is_told_apart() -> None:
    from ckpttool.integrations.huggingface import CkptCallback

    with refused(ckpttool.PlanError):
        CkptCallback(export_every=0)
    with refused(ckpttool.PlanError):
        CkptCallback(export_dtype="int8")  # type: ignore[arg-type]
