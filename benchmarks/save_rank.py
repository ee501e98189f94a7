"""One rank of ``save.py``: a train loop that saves in different ways, and reports the time of each."""

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
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import mock

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from measure import keep

import ckpttool
from ckpttool.integrations.live import host_memory
from ckpttool.saving import files
from ckpttool.saving import files as rank_files

if TYPE_CHECKING:
    from collections.abc import Callable

THROTTLE = 100e6
"""Bytes per second of the slow target, over all ranks."""
QUIET_STEPS = 5
"""Steps between two saves, about as many as are made during one."""
numbers = itertools.count()


def build(stage: int, parameters: int, width: int) -> Any:
    """An engine with a number of parameters, in square layers of a width."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    layers = [torch.nn.Linear(width, width) for _ in range(max(1, parameters // (width * width)))]
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
    width = engine.module[0].in_features
    loss = engine(torch.ones(4, width, dtype=torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    engine.step()


def timed(function: Callable[[], Any]) -> float:
    """Seconds until all ranks have done it."""
    dist.barrier()
    began = time.perf_counter()
    function()
    dist.barrier()
    return time.perf_counter() - began


def alternated(ways: dict[str, Callable[[], Any]], runs: int, clear: Callable[[], None]) -> dict[str, list[float]]:
    """Seconds of each way, in turn, after one run to warm up; every second round in the reverse order."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(runs + 1):
        for name, function in list(ways.items())[:: -1 if run % 2 else 1]:
            clear()
            seconds = timed(function)
            if run:
                taken[name].append(seconds)
    return taken


def mean(values: list[float]) -> tuple[float, float]:
    """The mean, and its standard error."""
    return statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))


def copied_by(save: Callable[[], Any]) -> list[Any]:
    """The tensors of the engine that an asynchronous save copies."""
    sources: list[Any] = []
    copy = host_memory._copy

    def noted(target: Any, source: Any) -> None:
        sources.append(source.numpy())
        copy(target, source)

    host_memory._copy = noted
    try:
        save()
    finally:
        host_memory._copy = copy
    return sources


def copy_all(sources: list[Any], target: Any) -> None:
    """Copy them, by the C library's memcpy."""
    at = 0
    for source in sources:
        np.copyto(target[at : at + source.nbytes], source)
        at += source.nbytes


def sync_tree(path: Path) -> None:
    """Sync the files of a directory."""
    for file in path.rglob("*.pt"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def throttle() -> None:
    """Limit saves to THROTTLE bytes a second."""
    write = rank_files.write_files

    def slow(storage: Any, directory: str, files: Any, *others: Any) -> Any:
        began = time.perf_counter()
        written = write(storage, directory, files, *others)
        due = sum(f.nbytes for f in files) * dist.get_world_size() / THROTTLE
        time.sleep(max(0.0, due - (time.perf_counter() - began)))
        return written

    rank_files.write_files = slow  # type: ignore[assignment]


def say(text: str) -> None:
    """Print on the first rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def saves_everywhere(manager: ckpttool.CheckpointManager) -> bool:
    """Whether a background save runs on every rank: each step is a collective, which all ranks must enter."""
    saving = torch.tensor([int(manager.saving)])
    dist.all_reduce(saving, op=dist.ReduceOp.MIN)
    return bool(saving.item())


def say_steps(quiet: list[float], busy: list[float]) -> None:
    """Print the seconds of a step without and with a concurrent save."""
    (a, error), (b, error_busy) = mean(quiet), mean(busy)
    say(
        f"a step: {a:.3f} s ({len(quiet)} steps), while a save runs {b:.3f} s ({len(busy)}): {100 * (b / a - 1):+.1f} %"
    )
    say(f"  standard error of that: {100 * math.hypot(error, error_busy) / a:.1f} %")
    say(f"  medians: {statistics.median(quiet):.3f} s and {statistics.median(busy):.3f} s")


def end() -> NoReturn:
    """End the process when all ranks have come here."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def main(given: dict[str, Any], data: Path) -> None:
    """Measure everything."""
    engine = build(given["stage"], given["parameters"], given["width"])
    for _ in range(3):
        step(engine)
    reports: list[ckpttool.SaveReport] = []

    def clear() -> None:
        if dist.get_rank():
            return
        os.sync()
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

    def no_checksum(*_: object) -> int:
        return 0

    def unhashed() -> None:
        with mock.patch.object(files, "crc32", no_checksum):
            ours()

    ways = {
        "engine.save_checkpoint": native,
        "engine.save_checkpoint and fsync": native_synced,
        "manager.save": ours,
        "manager.save, without hashing": unhashed,
    }
    runs = alternated(ways, given["runs"], clear)
    taken = {name: statistics.median(values) for name, values in runs.items()}
    what = f"zero{given['stage']}, {dist.get_world_size()} ranks, {given['parameters'] // 10**6}M"
    if dist.get_rank() == 0:
        keep(f"{what}, blocking", "manager.save", {name: {"wall": values} for name, values in runs.items()})
    nbytes = torch.tensor([reports[-1].nbytes])
    dist.all_reduce(nbytes)
    say(f"synchronous, {nbytes.item() / 1e6:,.0f} MB of all ranks")
    for name, seconds in taken.items():
        say(f"  {name:36}{seconds:8.3f} s  {seconds / taken['manager.save']:6.2f}x of manager.save")

    if given["blocking"]:
        end()
    asynchronous = ckpttool.CheckpointManager(data / "async", on_save=reports.append, async_save=True)

    def background() -> None:
        asynchronous.save(engine, tag=f"t{next(numbers)}")

    sources = copied_by(background)
    asynchronous.wait()
    target = np.ones(sum(s.nbytes for s in sources), np.uint8)

    def settle() -> None:
        asynchronous.wait()
        clear()

    ways = {"stall": background, "copy": partial(copy_all, sources, target)}
    runs = alternated(ways, given["runs"] + 1, settle)
    stall, copy = statistics.median(runs["stall"]), statistics.median(runs["copy"])
    if dist.get_rank() == 0:
        keep(f"{what}, background", "copy", {name: {"wall": values} for name, values in runs.items()})
    say(f"asynchronous, {target.nbytes / 1e6:,.0f} MB of a rank: the loop stands still for {stall:.3f} s")
    say(f"  {stall / copy:.2f}x of one copy of the same tensors, {copy:.3f} s")
    settle()

    slow = ckpttool.CheckpointManager(data / "slow", on_save=reports.append)
    throttle()
    seconds = timed(lambda: slow.save(engine, tag=f"t{next(numbers)}"))
    say(f"blocking, to {THROTTLE / 1e6:.0f} MB/s: {seconds:.2f} s, {seconds / stall:.0f}x the stall")

    background()
    began, used = time.perf_counter(), time.process_time()
    asynchronous.wait()
    took, used = time.perf_counter() - began, time.process_time() - used
    say(f"in the background, to as much: {took:.2f} s, in which {used:.2f} s of a processor are used by each rank")
    say(f"  that is {100 * used / took:.1f} % of one, the loss of a step if all processors are busy")
    quiet: list[float] = []
    busy: list[float] = []
    for _ in range(given["rounds"]):
        # Before and after, so that drift over time affects both.
        quiet += [timed(lambda: step(engine)) for _ in range(QUIET_STEPS)]
        background()
        while saves_everywhere(asynchronous):
            busy.append(timed(lambda: step(engine)))
        asynchronous.wait()
    quiet += [timed(lambda: step(engine)) for _ in range(QUIET_STEPS)]
    if len(busy) < 2:
        say("too few steps ran during a save: take more parameters")
    else:
        say_steps(quiet, busy)
    end()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
