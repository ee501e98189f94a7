"""The internals of Accelerate that ckpttool uses: a test fails, and names the part, if a release changes one."""

from __future__ import annotations

import pytest

import ckpttool
from tests.frameworks.pins import names as names_of
from tests.wording import refused

pytestmark = pytest.mark.deepspeed


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
        missing = names - names_of(getattr(Accelerator, method))
        assert not missing, f"Accelerator.{method} does not use {missing} any more"


def test_a_changed_method_of_accelerate_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import Accelerator

    from ckpttool.integrations.accelerate import prepare

    monkeypatch.setattr(Accelerator, "load_state", lambda self, folder: None)
    with refused(ckpttool.PlanError):
        prepare(None)
