"""One rank of ``restore.py``: ``torchrun restore_rank.py ROOT STAGE SCALE WAY RUNS``, where WAY is listed below.

Prints, on the first rank, a line of JSON: the seconds of the first load or save and of later ones, all ranks together,
and the largest growth of one rank's memory in bytes in the first and in the last one.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from make_checkpoint import SIZES, Model
from measure import DATA, FREE_MEMORY

import ckpttool

WAYS = ("native", "ckpttool", "weights", "universal", "save")
"""``engine.load_checkpoint``; ``ckpttool.load``; the same with ``weights_only``; ``load_universal``; ``manager.save``
after a load."""

NUMBERS = itertools.count()


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _load(engine: Any, root: str, way: str) -> None:
    if way in {"native", "universal"}:
        path, _ = engine.load_checkpoint(root)
        assert path is not None
    elif way == "save":
        ckpttool.CheckpointManager(DATA / "out").save(engine, tag=f"t{next(NUMBERS)}")
    else:
        ckpttool.load(engine, root, weights_only=way == "weights")


def main() -> None:
    """Build an engine and load into it, again and again."""
    root, stage, scale, way, runs = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
    hidden, vocabulary, layers = SIZES[scale]
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    torch.manual_seed(1)
    model = Model(hidden, vocabulary, layers)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": way == "universal"},
        "steps_per_print": 1000,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if way == "save":
        ckpttool.load(engine, root)
    if torch.distributed.get_rank() == 0:
        FREE_MEMORY.release()
    seconds, extra = [], []
    for _ in range(runs + 1):
        torch.distributed.barrier()
        before = _memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        began = time.perf_counter()
        _load(engine, root, way)
        torch.distributed.barrier()
        seconds.append(time.perf_counter() - began)
        extra.append(_memory("VmHWM") - before)
    told: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(told, extra)  # the moments have no memory yet in the first load
    if torch.distributed.get_rank() == 0:
        figures = {
            "first": seconds[0],
            "again": seconds[1:],
            "extra": max(of_rank[0] for of_rank in told),
            "extra_again": max(of_rank[-1] for of_rank in told),
        }
        print(json.dumps(figures))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
