"""Train loops with dropout, ``random`` and ``numpy.random`` that save each rank's own state, and resume from it."""

from __future__ import annotations

import itertools
import random
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from tests import forked

WIDTH = 8
TRAINED = 2
"""Steps before the save;"""
FOLLOWING = 3
"""and behind it, of which each loss of each rank is compared."""
TRACKED = "model-parallel-rng"


def main(directory: Path) -> None:
    """Do all jobs; those of one number of ranks share their processes."""
    import deepspeed  # noqa: F401  once, for all that are forked

    jobs = sorted(forked.jobs_in(directory), key=lambda job: (job["turn"], job["world_size"]))
    for (_, world_size), group in itertools.groupby(jobs, lambda job: (job["turn"], job["world_size"])):
        own = list(group)
        forked.run_ranks(world_size, lambda own=own: _rank(own, directory))  # type: ignore[misc]


def _rank(jobs: list[dict[str, Any]], directory: Path) -> None:
    import torch
    from recipes import common

    common.start(seed=1)
    rank = torch.distributed.get_rank()
    for job in jobs:
        forked.end_if_stuck()
        (directory / job["id"]).mkdir(exist_ok=True)
        facts = {"save": _save, "resume": _resume, "convert": _convert, "refuse": _refuse, "script": _script}[
            job["do"]
        ](job, directory)
        torch.save(facts, directory / job["id"] / f"facts-{rank}.pt")
        torch.distributed.barrier()
    common.leave()


def _script(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Run the script that DeepSpeed leaves beside a checkpoint."""
    root = job["root"]
    with mock.patch.object(sys, "argv", ["zero_to_fp32.py", root, str(directory / job["id"] / "out"), "-t", "tag"]):
        runpy.run_path(f"{root}/zero_to_fp32.py", run_name="__main__")
    return {}


def build(job: dict[str, Any], seed: int) -> Any:
    """A small net with dropout under DeepSpeed; with ``checkpointing``, its middle runs twice, partly tracked."""
    import deepspeed
    import torch
    from deepspeed.runtime.activation_checkpointing import checkpointing

    tracker = checkpointing.get_cuda_rng_tracker()
    tracker.reset()
    again = job.get("checkpointing", False)

    class Net(torch.nn.Module):  # type: ignore[misc]  # torch is not followed
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.drop = torch.nn.Dropout(0.5)

        def block(self, x: Any) -> Any:
            x = self.drop(torch.tanh(self.middle(x)))
            if not again:
                return x
            with tracker.fork(TRACKED):
                return self.drop(x)

        def forward(self, x: Any) -> Any:
            x = self.drop(self.first(x))
            x = checkpointing.checkpoint(self.block, x) if again else self.block(x)
            return self.last(x)

    if again:
        checkpointing.configure(None)
        tracker.add(TRACKED, 1000 + seed + torch.distributed.get_rank())
    torch.manual_seed(seed)
    net = Net()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": job["stage"]}, "steps_per_print": 10_000,
        "zero_allow_untested_optimizer": True, **job.get("config", {}),
    }  # fmt: skip
    return deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=0.01), config=config)[0]


def seed_all(seed: int) -> None:
    """Seed this rank's generators; each rank's differ."""
    import numpy as np
    import torch

    own = 100 * seed + torch.distributed.get_rank()
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)
    random.gauss(0, 1)  # leaves the second number of the pair


def step(engine: Any) -> float:
    """Train on data from all generators; return the loss of this rank."""
    import numpy as np
    import torch

    x = torch.rand(2, WIDTH) * random.gauss(1, 0.1) + torch.from_numpy(np.random.rand(2, WIDTH)).float()
    loss = (engine(x) - x.roll(1, 1)).square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def _save(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    import torch

    import ckpttool

    rank = torch.distributed.get_rank()
    facts: dict[str, Any] = {}
    for saves in (False, True):
        engine = build(job, seed=5)
        seed_all(5)
        for _ in range(TRAINED):
            step(engine)
        if saves:
            manager = ckpttool.CheckpointManager(job["root"], async_save=job["background"])
            mine = {"rng": ckpttool.rng_state(), "rank": rank, "position": torch.arange(4) + rank, "seen": [rank]}
            manager.save(engine, tag="tag", client_state={"step": TRAINED}, rank_state=mine)
            mine["position"] += 1000  # after the call: not part of the save
            mine["seen"].append("later")
            mine["rng"]["torch"].zero_()
        facts["losses" if saves else "losses without a save"] = [step(engine) for _ in range(FOLLOWING)]
        if saves:
            manager.wait()
        engine.destroy()
    return facts


def _resume(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    import torch

    import ckpttool

    engine = build(job, seed=77)
    seed_all(77)
    before, clipping = ckpttool.rng_state(), getattr(engine.optimizer, "clip_grad", None)
    manager = ckpttool.CheckpointManager(job["root"])
    try:
        state = manager.restore(engine, tag="tag")
    except ckpttool.CkptError as error:
        weights = torch.cat([p.detach().flatten() for p in engine.module.parameters()])
        return {"error": str(error), "steps": engine.global_steps, "weights": weights}
    restored = manager.restored
    assert restored is not None
    preview = manager.preview(engine)
    assert preview is not None
    facts: dict[str, Any] = {
        "client_state": state, "rank_state": restored.rank_state, "rank_states": list(restored.rank_states),
        "report": str(restored), "preview": (preview.rank_state, len(preview.rank_states)), "before": before,
        "clipping": (clipping, getattr(engine.optimizer, "clip_grad", None)),
    }  # fmt: skip
    if restored.rank_states:
        facts["rng"] = restored.rng_state()
        facts["again"] = restored.rng_state()
        facts["shared"] = restored.rng_state(shared=["python"])
        ckpttool.set_rng_state(facts["rng"])
        facts["set"] = ckpttool.rng_state()
    else:
        facts["rng"] = restored.rng_state()
    facts["losses"] = [step(engine) for _ in range(FOLLOWING)]
    if "onward" in job:  # a save of the resumed run, for the next resume
        ckpttool.CheckpointManager(job["onward"]).save(engine, tag="tag", rank_state={"rng": ckpttool.rng_state()})
    manager.restore(engine, tag="tag", weights_only=True)
    restored = manager.restored
    facts["weights only"] = restored is not None and (restored.rank_state, len(restored.rank_states))
    if job.get("native"):  # DeepSpeed itself loads what is there
        facts["native"] = engine.load_checkpoint(job["root"], tag="tag")[1]["step"]
    engine.destroy()
    return facts


def _convert(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    import ckpttool

    return {"notes": ckpttool.convert(job["source"], job["root"], **job["options"]).notes}


def _refuse(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """What saves of rank states that do not fit say on each rank."""
    import collections
    import logging

    import torch

    import ckpttool

    rank = torch.distributed.get_rank()
    engine = build(job, seed=5)
    manager = ckpttool.CheckpointManager(job["root"], timeout=60)

    def told(**arguments: Any) -> str:
        try:
            manager.save(engine, tag="tag", overwrite=True, **arguments)
        except ckpttool.CkptError as error:
            return str(error)
        return ""

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpttool").addHandler(handler)
    facts: dict[str, Any] = {
        "one without": told(rank_state={"a": 1} if rank == 0 else None),
        "unpicklable": told(rank_state={"a": (lambda: 0) if rank == 1 else 0}),
        "left": sorted(p.name for p in Path(job["root"]).glob("*")),
    }
    own = collections.UserDict(a=1) if rank == 1 else {"a": 1}
    facts["of an unknown class"] = told(rank_state=own)
    facts["warnings"] = [line for line in lines if "restore needs" in line]
    try:
        manager.restore(engine, tag="tag")
    except ckpttool.CkptError as error:
        facts["restored"] = str(error)
    trusting = ckpttool.CheckpointManager(job["root"], allow=["collections.UserDict"])
    trusting.restore(engine, tag="tag")
    assert trusting.restored is not None
    facts["trusted"] = dict(trusting.restored.rank_state)
    logging.getLogger("ckpttool").removeHandler(handler)
    engine.destroy()
    return facts


if __name__ == "__main__":
    main(Path(sys.argv[1]))
