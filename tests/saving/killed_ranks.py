"""A program that forks ranks that save together; SIGKILL ends one or all of them. See test_processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from typing import Any

import pytest
import torch.distributed as dist

from ckpttool.errors import CkptError
from ckpttool.saving import coordination as ranks_module
from ckpttool.saving.coordination import Ranks
from ckpttool.storage import LOCAL
from tests.faults import disks
from tests.faults.disks import Fault, Machine
from tests.saving.checkpoints import save_version

TIMEOUT = 4.0


class _RealMachine(Machine):
    def kill(self, rank: int, *, everyone: bool = False) -> None:
        os.killpg(0, signal.SIGKILL) if everyone else os.kill(os.getpid(), signal.SIGKILL)


def _store(point: dict[str, Any], rank: int) -> Any:
    if point["store"] == "file":
        return dist.FileStore(f"{point['base']}/store", point["size"])
    return dist.TCPStore("127.0.0.1", point["port"], is_master=rank == 0, wait_for_workers=False)


def _work(point: dict[str, Any], rank: int) -> None:
    machine = _RealMachine()
    disks.install(machine, pytest.MonkeyPatch())
    said: dict[str, Any] = {}
    try:
        ranks = Ranks(rank, point["size"], dist.PrefixStore("test", _store(point, rank)), "ranks", timeout=TIMEOUT)
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


def _free_ports(count: int) -> list[int]:
    """Return different ports: one that is released at once may be given twice."""
    with contextlib.ExitStack() as probes:
        sockets = [probes.enter_context(socket.socket()) for _ in range(count)]
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in sockets]


def main() -> None:
    """Run all points of a file at the same time."""
    with open(sys.argv[1]) as file:
        points = json.load(file)
    ranks_module.DECISION_SECONDS, ranks_module.ACKNOWLEDGE_SECONDS = 1.0, 0.5
    children = []
    for point, port in zip(points, _free_ports(len(points)), strict=True):
        point["port"] = port
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
