"""The internals of Transformers that ckpttool uses: a test fails, and names the part, if a release changes one."""

from __future__ import annotations

import pytest

import ckpttool
from tests.frameworks.pins import names as names_of
from tests.wording import refused

pytestmark = pytest.mark.deepspeed


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
    missing = TRAINER[methods] - names_of(getattr(transformers.Trainer, method))
    assert not missing, f"transformers {transformers.__version__}: Trainer.{method} does not use {missing} any more"


def test_a_changed_method_of_the_trainer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    from ckpttool.extensions.huggingface import api as huggingface

    huggingface.check_trainer()
    monkeypatch.setattr(transformers.Trainer, "_save", lambda self, folder: None)
    with refused(ckpttool.PlanError):
        huggingface.check_trainer()


def test_a_trainer_without_the_callback_or_without_deepspeed_is_told_apart() -> None:
    from ckpttool.integrations.huggingface import CkptCallback

    with refused(ckpttool.PlanError):
        CkptCallback(export_every=0)
    with refused(ckpttool.PlanError):
        CkptCallback(export_dtype="int8")  # type: ignore[arg-type]
