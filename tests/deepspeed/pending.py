"""Engines with an accumulated micro batch restore a checkpoint, and continue training."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

from tests import forked

ACCUMULATION = 3


def main(directory: Path) -> None:
    """Do all jobs on two ranks."""
    import deepspeed  # noqa: F401  once, for all that are forked

    jobs = forked.jobs_in(directory)
    forked.run_ranks(2, lambda: _rank(jobs, directory))


def _rank(jobs: list[dict[str, Any]], directory: Path) -> None:
    import torch
    from recipes import common

    common.start(seed=1)
    told = {}
    for job in jobs:
        forked.end_if_stuck()
        told[job["id"]] = _do(job, directory / "root")
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(directory / "root")
            (directory / "told.json").write_text(json.dumps(told))
        torch.distributed.barrier()
    common.leave()


def _do(job: dict[str, Any], root: Path) -> dict[str, Any]:
    """What is other than in a run that goes on without a restore, after as many steps."""
    from ckpttool import CheckpointManager
    from tests.deepspeed import optimizers
    from tests.deepspeed.optimizers import build, differing, held

    step = _step_as_accelerate if job.get("accelerate") else optimizers.step
    engines = [
        build(job["stage"], job["dtype"], "two", job["optimizer"], seed=seed, accumulation=ACCUMULATION)
        for seed in (0, 7)
    ]
    first, second = engines
    step(first, ACCUMULATION)
    manager = CheckpointManager(root)
    manager.save(first)
    step(first, 2 * ACCUMULATION)
    step(second, ACCUMULATION + job["pending"])
    before = held(second)
    told: dict[str, Any] = {"warned": _warnings_of_saves(first, second, root.parent / "warned")}
    manager.preview(second)
    told["untouched"] = differing(before, held(second)) == []
    manager.restore(second, weights_only=job["weights_only"])
    report = manager.restored
    assert report is not None
    told["notes"] = [note for note in report.notes if "accumulated" in note]
    counted = second.global_steps
    step(second, 2 * ACCUMULATION)
    told["steps"] = second.global_steps - counted
    told["differing"] = [] if job["weights_only"] else differing(held(first), held(second))
    for engine in engines:
        engine.destroy()
    return told


def _step_as_accelerate(engine: Any, count: int) -> None:
    """Train on micro batches from a step on, and tell the engine of the boundaries, as Accelerate does."""
    import torch

    for number in range(count):
        torch.manual_seed(5)
        x = torch.randn(2, 6).to(next(engine.module.parameters()).dtype)
        engine.set_gradient_accumulation_boundary(number % ACCUMULATION == ACCUMULATION - 1)
        engine.backward((engine(x).float() ** 2).sum())
        if engine.is_gradient_accumulation_boundary():
            engine.step()


def _warnings_of_saves(after_step: Any, other: Any, root: Path) -> list[str]:
    """What two saves of each engine say of gradients."""
    import torch

    from ckpttool import CheckpointManager

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ckpttool")
    logger.addHandler(handler)
    manager = CheckpointManager(root)
    for number in range(2):
        manager.save(after_step, tag=f"whole{number}")
        manager.save(other, tag=f"other{number}")
    logger.removeHandler(handler)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(root)
    torch.distributed.barrier()
    return [line.partition(":")[0] for line in lines if "gradients" in line]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
