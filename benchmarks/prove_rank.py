"""One rank of ``prove.py``: ``torchrun prove_rank.py STAGE PARAMETERS RUNS DATA``.

Prints, on the first rank, a line of JSON: the base of each comparison, and its values by contestant and quantity.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import ckpttool
from ckpttool import registry

WIDTH = 2048


def build(stage: int, parameters: int) -> Any:
    """Return an engine after one step."""
    torch.manual_seed(0)
    width = WIDTH if parameters > WIDTH * WIDTH else 64
    layers = max(1, parameters // (width * width))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    engine.backward(engine(torch.ones(1, width, dtype=torch.bfloat16)).float().sum())
    engine.step()
    return engine


def main() -> None:
    """Save with and without digests, and load with and without a proof."""
    stage, parameters, runs, data = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    engine = build(stage, parameters)
    extensions = registry.EXTENSIONS
    found: dict[str, tuple[str, dict[str, dict[str, list[float]]]]] = {}
    for kind in ("blocking", "background"):
        rows: dict[str, dict[str, list[float]]] = {
            f"{name} digests": {"wall": [], "cpu": []} for name in ("with", "without")
        }
        stalls: dict[str, dict[str, list[float]]] = {f"{name} digests": {"wall": []} for name in ("with", "without")}
        found[f"save, {kind}"] = ("without digests", rows)
        if kind == "background":
            found["stall of a save in the background"] = ("without digests", stalls)
        for n in range(runs + 1):
            for name in ("with", "without") if n % 2 else ("without", "with"):
                registry.EXTENSIONS = extensions if name == "with" else ()
                reports: list[Any] = []
                root = data / f"{kind} {name}"
                manager = ckpttool.CheckpointManager(
                    root, async_save=kind == "background", keep_last=1, on_save=reports.append
                )
                dist.barrier()
                used = time.process_time()
                manager.save(engine, tag=f"run{n}")
                manager.wait()
                used = time.process_time() - used
                dist.barrier()
                if n:
                    rows[f"{name} digests"]["wall"].append(reports[0].seconds)
                    rows[f"{name} digests"]["cpu"].append(used)
                    stalls[f"{name} digests"]["wall"].append(reports[0].stall_seconds)
    registry.EXTENSIONS = extensions
    rows = {"with a proof": {"wall": [], "cpu": []}, "without": {"wall": [], "cpu": []}}
    found["load"] = ("without", rows)
    for n in range(runs + 1):
        for name in rows:
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            ckpttool.load(engine, data / "blocking with", prove=name == "with a proof")
            used = time.process_time() - used
            dist.barrier()
            if n:
                rows[name]["cpu"].append(used)
                rows[name]["wall"].append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
