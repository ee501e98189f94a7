"""A program that forks ranks that save together; SIGKILL ends one or all of them. See test_processes."""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckpttool.errors import CkptError
from ckpttool.saving import coordination as ranks_module
from ckpttool.saving.coordination import Ranks
from ckpttool.saving.pulse import Pulse
from ckpttool.storage import LOCAL
from tests.faults import disks
from tests.faults.disks import Fault, Machine
from tests.saving.checkpoints import save_version

TIMEOUT = 4.0
"""Seconds that a rank without a pulse may lag."""
START = datetime.timedelta(minutes=1)


class _RealMachine(Machine):
    def kill(self, rank: int, *, everyone: bool = False) -> None:
        os.killpg(0, signal.SIGKILL) if everyone else os.kill(os.getpid(), signal.SIGKILL)


def _store(point: dict[str, Any], rank: int) -> Any:
    """Return the store of a point's ranks, once all of them have it: on busy cores some start seconds later."""
    store = _opened(point, rank)
    store.set(f"started {rank}", "")
    store.wait([f"started {other}" for other in range(point["size"])], START)
    return store


def _ranks(point: dict[str, Any], rank: int) -> Ranks:
    """Return the ranks of a point: with a pulse, by which the dead are found, where the store is a server."""
    store = _store(point, rank)
    pulse = None
    if point["store"] == "tcp":
        pulse = Pulse(store.clone(), rank, beat=1.0)
        pulse.start()
    timeout = TIMEOUT if pulse is None else 100 * TIMEOUT
    return Ranks(rank, point["size"], dist.PrefixStore("test", store), "ranks", timeout=timeout, pulse=pulse)


def _opened(point: dict[str, Any], rank: int) -> Any:
    if point["store"] == "file":
        return dist.FileStore(f"{point['base']}/store", point["size"])
    file = Path(point["base"]) / "port"
    if rank == 0:  # the kernel chooses a free port: one that is released for it could be taken by another process
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        file.with_suffix(".new").write_text(str(store.port))
        file.with_suffix(".new").rename(file)
        return store
    deadline = time.monotonic() + START.total_seconds()
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(file.read_text()), wait_for_workers=False, timeout=START)


def _work(point: dict[str, Any], rank: int) -> None:
    machine = _RealMachine()
    disks.install(machine, pytest.MonkeyPatch())
    said: dict[str, Any] = {}
    try:
        ranks = _ranks(point, rank)
        machine.rank = rank
        for number, (tag, version) in enumerate(point["saves"]):
            if number == len(point["saves"]) - 1:
                machine.reset(*([Fault(**point["fault"]).rule()] if point["fault"] else []))
            save_version(LOCAL, f"{point['base']}/root", ranks, tag, version)
        said["names"] = machine.names.get(rank)
    except CkptError as error:
        said["error"] = str(error)
    machine.rank = None
    with open(f"{point['base']}/said-{rank}.json", "w") as file:
        json.dump(said, file)


def main() -> None:
    """Run all points of a file at the same time."""
    with open(sys.argv[1]) as file:
        points = json.load(file)
    ranks_module.DECISION_SECONDS, ranks_module.ACKNOWLEDGE_SECONDS = 1.0, 0.5
    children = []
    for point in points:
        leader = 0
        for rank in range(point["size"]):
            child = os.fork()
            if not child:
                os.setpgid(0, leader)
                _work(point, rank)
                os._exit(0)
            os.setpgid(child, leader)
            leader = leader or child
            children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
