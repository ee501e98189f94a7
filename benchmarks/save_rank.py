"""One rank of ``save.py``: a train loop that saves in different ways, and tells how long each took."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import shutil
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed as dist

import ckpttool
from ckpttool.saving import outgoing

if TYPE_CHECKING:
    from collections.abc import Callable

THROTTLE = 100e6
"""Bytes per second of the slow target, over all ranks."""
WIDTH = 1024
QUIET_STEPS = 5
"""Steps between two saves, about as many as are made during one."""
numbers = itertools.count()


def build(stage: int, parameters: int) -> Any:
    """An engine of so many parameters."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(parameters // (WIDTH * WIDTH))]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    model = torch.nn.Sequential(*layers)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=torch.optim.AdamW(model.parameters()))
    return engine


def step(engine: Any) -> None:
    """Train a little."""
    loss = engine(torch.ones(4, WIDTH, dtype=torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    engine.step()


def timed(function: Callable[[], Any]) -> float:
    """Seconds until all ranks have done it."""
    dist.barrier()
    began = time.perf_counter()
    function()
    dist.barrier()
    return time.perf_counter() - began


def median_of(ways: dict[str, Callable[[], Any]], runs: int, clear: Callable[[], None]) -> dict[str, float]:
    """Each way in turn, after one to warm up."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(runs + 1):
        for name, function in ways.items():
            if dist.get_rank() == 0:
                clear()
                os.sync()
            seconds = timed(function)
            if run:
                taken[name].append(seconds)
    return {name: statistics.median(values) for name, values in taken.items()}


def mean(values: list[float]) -> tuple[float, float]:
    """The mean, and its standard error."""
    return statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))


def sync_tree(path: Path) -> None:
    """Let the files of a directory reach the disk."""
    for file in path.rglob("*.pt"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def throttle(place: Any) -> None:
    """Let a place take no more than THROTTLE bytes a second."""
    write = place.write

    def slow(directory: str, files: Any) -> Any:
        began = time.perf_counter()
        written = write(directory, files)
        due = sum(f.nbytes for f in files) * dist.get_world_size() / THROTTLE
        time.sleep(max(0.0, due - (time.perf_counter() - began)))
        return written

    place.write = slow


def say(text: str) -> None:
    """Print on the first rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def main(given: dict[str, Any], data: Path) -> None:
    """Measure everything."""
    engine = build(given["stage"], given["parameters"])
    for _ in range(3):
        step(engine)
    reports: list[ckpttool.SaveReport] = []

    def clear() -> None:
        shutil.rmtree(data, ignore_errors=True)
        data.mkdir(parents=True)

    say("::")
    blocking = ckpttool.CheckpointManager(data / "ours", on_save=reports.append)

    def native() -> None:
        engine.save_checkpoint(str(data / "native"), tag=f"n{next(numbers)}")

    def native_synced() -> None:
        native()
        dist.barrier()
        if dist.get_rank() == 0:
            sync_tree(data / "native")

    def ours() -> None:
        blocking.save(engine, tag=f"t{next(numbers)}")

    def unhashed() -> None:
        crc32, outgoing.crc32 = outgoing.crc32, lambda *_: 0
        try:
            ours()
        finally:
            outgoing.crc32 = crc32

    ways = {
        "engine.save_checkpoint": native,
        "engine.save_checkpoint and fsync": native_synced,
        "manager.save": ours,
        "manager.save, without hashing": unhashed,
    }
    taken = median_of(ways, given["runs"], clear)
    nbytes = torch.tensor([reports[-1].nbytes])
    dist.all_reduce(nbytes)
    say(f"synchronous, {nbytes.item() / 1e6:,.0f} MB of all ranks")
    for name, seconds in taken.items():
        say(f"  {name:36}{seconds:8.3f} s  {seconds / taken['manager.save']:6.2f}x of manager.save")

    own = reports[-1].nbytes
    source, target = (torch.zeros(own, dtype=torch.uint8) for _ in range(2))
    target.copy_(source)
    asynchronous = ckpttool.CheckpointManager(data / "async", on_save=reports.append, async_save=True)

    def background() -> None:
        asynchronous.save(engine, tag=f"t{next(numbers)}")

    stalls, copies = [], []
    for run in range(given["runs"] + 2):
        if dist.get_rank() == 0:
            clear()
        seconds = timed(background)
        asynchronous.wait()
        copied = timed(partial(target.copy_, source))
        if run > 1:
            stalls.append(seconds)
            copies.append(copied)
    stall, copy = statistics.median(stalls), statistics.median(copies)
    say(f"asynchronous: stall {stall:.3f} s, one copy of the same bytes {copy:.3f} s: {stall / copy:.2f}x")

    slow = ckpttool.CheckpointManager(data / "slow", on_save=reports.append)
    throttle(slow._place)
    if dist.get_rank() == 0:
        clear()
    seconds = timed(lambda: slow.save(engine, tag=f"t{next(numbers)}"))
    say(f"blocking, to {THROTTLE / 1e6:.0f} MB/s: {seconds:.2f} s, {seconds / stall:.0f}x the stall")

    throttle(asynchronous._place)
    quiet: list[float] = []
    busy: list[float] = []
    for _ in range(given["rounds"]):
        # Before and after: what drifts with time falls on both.
        quiet += [timed(lambda: step(engine)) for _ in range(QUIET_STEPS)]
        background()
        while asynchronous._thread is not None and asynchronous._thread.is_alive() and len(busy) < 200:
            busy.append(timed(lambda: step(engine)))
            alive = torch.tensor([int(asynchronous._thread.is_alive())])
            dist.all_reduce(alive, op=dist.ReduceOp.MIN)
            if not alive.item():
                break
        asynchronous.wait()
    quiet += [timed(lambda: step(engine)) for _ in range(QUIET_STEPS)]
    (a, error), (b, error_busy) = mean(quiet), mean(busy)
    say(
        f"a step: {a:.3f} s ({len(quiet)} steps), while a save runs {b:.3f} s ({len(busy)}): {100 * (b / a - 1):+.1f} %"
    )
    say(f"  standard error of that: {100 * math.hypot(error, error_busy) / a:.1f} %")
    say(f"  medians: {statistics.median(quiet):.3f} s and {statistics.median(busy):.3f} s")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
