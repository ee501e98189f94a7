"""Gradients accumulated before a restore do not enter the step after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ckpttool import CheckpointManager
from tests import sampling
from tests.deepspeed import engines
from tests.forked import each_on_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed

ACCUMULATION = 3
JOBS: list[dict[str, Any]] = sampling.pairs(
    {
        "id": f"{dtype}-zero{stage}-{optimizer}-{pending}{'-weights' * weights_only}{'-accelerate' * accelerate}",
        "stage": stage, "world_size": 2, "dtype": dtype, "optimizer": optimizer, "pending": pending,
        "weights_only": weights_only, "accelerate": accelerate,
    }
    for stage in (0, 1, 2, 3)
    for dtype, optimizer, pending, weights_only in (
        ("bf16", "adamw", 1, False), ("fp32", "adamw", 2, False), ("bf16", "fused", 2, False),
        ("bf16", "adamw", 0, False), ("bf16", "adamw", 1, True),
    )
    for accelerate in (False, True)
    if not (accelerate and pending == 1)
)  # fmt: skip
"""Accelerate tells the engine of the boundaries."""


def _restore(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """What is other than in a run that goes on without a restore, after as many steps."""
    root, step = directory / job["id"], _step_as_accelerate if job["accelerate"] else engines.step
    first, second = (
        engines.build(job["stage"], job["dtype"], "two", job["optimizer"], seed=seed, accumulation=ACCUMULATION)
        for seed in (0, 7)
    )
    step(first, ACCUMULATION)
    manager = CheckpointManager(root / "root")
    manager.save(first)
    step(first, 2 * ACCUMULATION)
    step(second, ACCUMULATION + job["pending"])
    before = engines.held(second)
    told: dict[str, Any] = {"warned": _warnings_of_saves(first, second, root / "warned")}
    manager.restore(second, dry_run=True)
    told["untouched"] = engines.differing(before, engines.held(second)) == []
    manager.restore(second, weights_only=job["weights_only"])
    report = manager.restored
    assert report is not None
    told["notes"] = [note for note in report.notes if "accumulated" in note]
    counted = second.global_steps
    step(second, 2 * ACCUMULATION)
    told["steps"] = second.global_steps - counted
    told["differing"] = [] if job["weights_only"] else engines.differing(engines.held(first), engines.held(second))
    first.destroy()
    second.destroy()
    return told


def _step_as_accelerate(engine: Any, count: int) -> None:
    """Train on micro batches from a step on, and tell the engine of the boundaries, as Accelerate does."""
    for number in range(count):
        torch.manual_seed(5)
        x = torch.randn(2, 6).to(next(engine.module.parameters()).dtype)
        engine.set_gradient_accumulation_boundary(number % ACCUMULATION == ACCUMULATION - 1)
        engine.backward((engine(x).float() ** 2).sum())
        if engine.is_gradient_accumulation_boundary():
            engine.step()


def _warnings_of_saves(after_step: Any, other: Any, root: Path) -> list[str]:
    """What two saves of each engine say of gradients."""
    with engines.logged() as lines:
        for name, engine in {"whole": after_step, "other": other}.items():
            manager = CheckpointManager(root / name)
            for number in range(2):
                manager.save(engine, tag=f"{name}{number}")
    return [line.partition(":")[0] for line in lines if "gradients" in line]


@pytest.fixture(scope="module")
def told(tmp_path_factory: TempPathFactory) -> dict[str, Any]:
    """By job, what its first rank tells."""
    found = each_on_ranks(_restore, JOBS, tmp_path_factory.mktemp("pending"))
    return {name: ranks[0] for name, ranks in found.items()}


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["id"])
def test_accumulated_gradients_are_dropped(job: dict[str, Any], told: dict[str, Any]) -> None:
    found = told[job["id"]]
    said = ["micro batches were accumulated since the last step: the load drops their gradients"]
    warned = ["a save between two micro batches leaves out the accumulated gradients, so that a resumed run differs"]
    assert found == {
        "untouched": True, "notes": said if job["pending"] else [], "steps": 2, "differing": [],
        "warned": warned if job["pending"] else [],
    }  # fmt: skip
