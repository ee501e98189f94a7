"""``verify`` accepts all of DeepSpeed's own saves, in many configurations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file

import ckpttool
from tests import sampling
from tests.many_configurations import ADAPTER_RUNS, RUNS, Run, train_all

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.deepspeed


TRAINED = [*sampling.some(RUNS, 28), *ADAPTER_RUNS]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("many")
    train_all(TRAINED, directory)
    return directory


@pytest.mark.parametrize("run", TRAINED, ids=lambda run: run.id)
def test_deepspeeds_saves_are_sound_and_give_their_values(run: Run, trained: Path) -> None:
    src = trained / run.id
    assert ckpttool.verify(src).findings == ()
    assert ckpttool.verify(src, deep=True).findings == ()
    truth = load_file(src / "truth.safetensors")
    weights = ckpttool.load_state_dict(src)
    masters = {key.removeprefix("fp32/"): value for key, value in truth.items() if key.startswith("fp32/")}
    masters = masters or {k.removeprefix("module/"): v.float() for k, v in truth.items() if k.startswith("module/")}
    assert masters
    for name, value in masters.items():
        assert weights[name].equal(value.reshape(weights[name].shape)), name
    checks = weights.checks()
    assert checks is not None
    assert checks.without == ()
