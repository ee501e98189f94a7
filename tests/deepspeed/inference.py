"""Engines without an optimizer get the weights that an engine with one has saved."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from tests import forked


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
    """Train and save one engine, and load its weights into one that only computes; return what differs."""
    import torch
    from deepspeed.utils import safe_get_full_fp32_param

    import ckpttool
    from tests.deepspeed.optimizers import build, step

    first = build(job["saved"], job["dtype"], "two", "adamw")
    step(first, 2)
    ckpttool.CheckpointManager(root).save(first)
    truth = {name: safe_get_full_fp32_param(p).clone() for name, p in first.module.named_parameters()}
    first.destroy()
    second = _without_optimizer(job["stage"], job["dtype"])
    told: dict[str, Any] = {"resume": "", "differing": []}
    try:
        ckpttool.load(second, root)
    except ckpttool.CkptError as error:
        told["resume"] = str(error)
    ckpttool.load(second, root, weights_only=True)
    dtype = torch.bfloat16 if job["dtype"] == "bf16" else torch.float32
    for name, value in _whole(second).items():
        if value.dtype != dtype or not torch.equal(value, truth[name].to(dtype)):
            told["differing"].append(name)
    inputs = torch.ones(2, 6, dtype=dtype)
    told["outputs"] = [float(x) for x in second(inputs).float().flatten()]
    told["weights"] = {name: value.to(dtype).tolist() for name, value in truth.items()}
    second.destroy()
    return told


def _without_optimizer(stage: int, dtype: str) -> Any:
    import deepspeed
    import torch

    torch.manual_seed(7)
    layers = [torch.nn.Linear(6, 6) for _ in range(3)]
    net = torch.nn.Module()
    net.a, net.b, net.c = layers
    net.forward = lambda x: net.c(torch.tanh(net.b(torch.tanh(net.a(x)))))
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "steps_per_print": 10_000}
    if stage:
        config["zero_optimization"] = {"stage": stage, "stage3_param_persistence_threshold": 10}  # keeps the biases
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    return deepspeed.initialize(model=net, config=config)[0]


def _whole(engine: Any) -> dict[str, Any]:
    """Return the engine's whole parameters."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
