"""One rank of ``torch_runs.py``: ``torchrun torch_runs_rank.py KIND PARAMETERS RUNS DATA``.

Prints, on the first rank, a line of JSON: the base of each comparison, and its values by contestant and quantity.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import ckpttool
from ckpttool import registry

if TYPE_CHECKING:
    from collections.abc import Callable

    Way = Callable[[Path], Callable[[], object] | None]

WIDTH = 2048


def build(kind: str, parameters: int) -> tuple[Any, Any]:
    """Return a model and its optimizer after one step."""
    torch.manual_seed(0)
    width = WIDTH if parameters > WIDTH * WIDTH else 64
    layers = max(1, parameters // (width * width))
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    if kind == "fsdp":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class Contest:
    """Contestants that take turns.

    Args:
        data: A directory for their files.
        runs: Counted runs.
    """

    def __init__(self, data: Path, runs: int) -> None:
        self._data = data
        self._runs = runs
        self.found: dict[str, tuple[str, dict[str, dict[str, list[float]]]]] = {}

    def take(self, title: str, base: str, ways: dict[str, Way]) -> None:
        """Time each way, in turn; the function that one returns is called afterwards, and not counted."""
        rows: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in ways}
        for run in range(self._runs + 1):
            for name in reversed(ways) if run % 2 else ways:
                out = self._data / f"{title} {name}".replace(" ", "-")
                if dist.get_rank() == 0:
                    shutil.rmtree(out, ignore_errors=True)
                dist.barrier()
                began, used = time.perf_counter(), time.process_time()
                after = ways[name](out)
                used = time.process_time() - used
                dist.barrier()
                taken = time.perf_counter() - began
                if after is not None:
                    after()
                dist.barrier()
                if run:
                    rows[name]["wall"].append(taken)
                    rows[name]["cpu"].append(used)
        self.found[title] = base, rows


def main() -> None:
    """Save and load in turn."""
    kind, parameters, runs, data = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    dist.init_process_group("gloo")
    own = dist.new_group(backend="gloo")  # torch saves in a thread, whose collectives meet no others there
    model, optimizer = build(kind, parameters)
    inner = model.module if kind == "ddp" else model
    extensions = registry.EXTENSIONS

    def ours(out: Path, *, digested: bool = True) -> None:
        registry.EXTENSIONS = extensions if digested else ()
        ckpttool.CheckpointManager(out).save(model, optimizer=optimizer, step=1)
        registry.EXTENSIONS = extensions

    def state() -> dict[str, Any]:
        weights, states = get_state_dict(inner, optimizer)
        return {"model": weights, "optim": states}

    def of_torch(out: Path) -> None:
        dcp.save(state(), checkpoint_id=out)

    kept = ckpttool.CheckpointManager(data / "kept", async_save=True, keep_last=1)
    steps = iter(range(10**6))

    def in_background(_: Path) -> Callable[[], object]:
        kept.save(model, optimizer=optimizer, step=next(steps))
        return kept.wait

    def of_torch_in_background(out: Path) -> Callable[[], object]:
        saving: Any = dcp.async_save(state(), checkpoint_id=out, process_group=own)
        return lambda: saving.result()

    def load(source: Path, _: Path, *, staged: bool = True) -> None:
        ckpttool.load(model, source, optimizer=optimizer, staged=staged)

    def load_with_torch(source: Path, _: Path) -> None:
        found = state()
        dcp.load(found, checkpoint_id=source)
        set_state_dict(inner, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])

    def without_states(way: Way, out: Path) -> None:
        optimizer.state.clear()  # as after a restart
        way(out)

    contest = Contest(data, runs)
    saves: dict[str, Way] = {
        "manager.save": ours,
        "without digests": partial(ours, digested=False),
        "dcp.save": of_torch,
    }
    contest.take("blocking save", "dcp.save", saves)
    stalls: dict[str, Way] = {"manager.save": in_background, "dcp.async_save": of_torch_in_background}
    contest.take("stall in the background", "dcp.async_save", stalls)
    ours(data / "ours")
    of_torch(data / "torch")
    loads: dict[str, Way] = {
        "ckpttool.load": partial(load, data / "ours" / "step-1"),
        "staged=False": partial(load, data / "ours" / "step-1", staged=False),
        "dcp.load": partial(load_with_torch, data / "torch"),
    }
    contest.take("load", "dcp.load", loads)
    new: dict[str, Way] = {name: partial(without_states, way) for name, way in loads.items()}
    contest.take("load into a new optimizer", "dcp.load", new)
    if dist.get_rank() == 0:
        print(json.dumps(contest.found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
