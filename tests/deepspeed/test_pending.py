"""Gradients accumulated before a restore do not enter the step after it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests import forked

if TYPE_CHECKING:
    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed

JOBS: list[dict[str, Any]] = [
    {
        "id": f"{dtype}-zero{stage}-{optimizer}-{pending}{'-weights' if weights_only else ''}", "stage": stage,
        "dtype": dtype, "optimizer": optimizer, "pending": pending, "weights_only": weights_only,
    }
    for stage in (0, 1, 2, 3)
    for dtype, optimizer, pending, weights_only in (
        ("bf16", "adamw", 1, False), ("fp32", "adamw", 2, False), ("bf16", "fused", 2, False),
        ("bf16", "adamw", 0, False), ("bf16", "adamw", 1, True),
    )
]  # fmt: skip
JOBS += [{**job, "id": f"{job['id']}-accelerate", "accelerate": True} for job in JOBS if job["pending"] != 1]
"""Accelerate tells the engine of the boundaries."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("pending")
    forked.start("tests.deepspeed.pending", JOBS, directory)
    found: dict[str, Any] = json.loads((directory / "told.json").read_text())
    return found


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["id"])
def test_accumulated_gradients_are_dropped(job: dict[str, Any], told: dict[str, Any]) -> None:
    found = told[job["id"]]
    said = ["micro batches were accumulated since the last step: the load drops their gradients"]
    warned = ["a save between two micro batches leaves out the accumulated gradients, so that a resumed run differs"]
    assert found == {
        "untouched": True, "notes": said if job["pending"] else [], "steps": 2, "differing": [],
        "warned": warned if job["pending"] else [],
    }  # fmt: skip
