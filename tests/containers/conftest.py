from __future__ import annotations

import importlib.util
import warnings

import pytest


@pytest.fixture(scope="session", autouse=True)
def _quiet_import_of_deepspeed() -> None:
    if importlib.util.find_spec("deepspeed") is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed.runtime.fp16.loss_scaler  # noqa: F401 - torch.load would import it in the middle of a test
