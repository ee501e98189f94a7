"""Weights of a training engine, loaded into engines without an optimizer: ZeRO-3 and none, fp32 and bf16."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests import forked

if TYPE_CHECKING:
    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed

JOBS: list[dict[str, Any]] = [
    {"id": f"{dtype}-zero{saved}-to{stage}", "saved": saved, "stage": stage, "dtype": dtype}
    for saved, stage in ((2, 3), (3, 3), (3, 0))
    for dtype in ("fp32", "bf16")
]


@pytest.fixture(scope="module")
def told(tmp_path_factory: TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("inference")
    forked.start("tests.deepspeed.inference", JOBS, directory)
    found: dict[str, Any] = json.loads((directory / "told.json").read_text())
    return found


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["id"])
def test_an_engine_without_an_optimizer_gets_the_weights(job: dict[str, Any], told: dict[str, Any]) -> None:
    found = told[job["id"]]
    assert found["differing"] == []
    values = np.ones((2, 6))
    for layer in "abc":
        values = values @ np.array(found["weights"][f"{layer}.weight"]).T + found["weights"][f"{layer}.bias"]
        values = np.tanh(values) if layer != "c" else values
    assert found["outputs"] == pytest.approx(values.flatten(), abs=1e-5 if job["dtype"] == "fp32" else 2e-2)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["id"])
def test_a_resume_without_an_optimizer_is_refused(job: dict[str, Any], told: dict[str, Any]) -> None:
    said = told[job["id"]]["resume"]
    assert "weights_only=True" in said
    assert "\n" not in said
