"""Parameters on NVMe, which need libaio with its header; needs no pytest.

    PYTHONPATH=.:fixtures .venv/bin/python tests/versions/nvme.py DIRECTORY

Two ranks train with parameters and optimizer on disks of their own, and save with ``CheckpointManager``. Two ranks and
one with both on the CPU restore: all tensors are, bit for bit, those of the live engine, and training continues. An
engine with parameters on NVMe is refused, before it changes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

STEPS = 3
WEIGHTS = {"embed.weight", "up.weight", "down.weight", "head.weight"}


def check(job: str, directory: Path) -> None:
    """Do the part of one rank."""
    import torch
    from recipes import common, nvme
    from recipes.plain import run_steps

    import ckpttool
    from tests.deepspeed.engines import refusal

    common.start()
    rank = torch.distributed.get_rank()
    own = directory / f"{job}{torch.distributed.get_world_size()}-node{rank}"
    own.mkdir()
    os.chdir(own)
    config = common.ds_config(nvme.CASES[1])
    if job == "restore":
        del config["zero_optimization"]["offload_param"]
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    engine = nvme.initialize(config)
    manager = ckpttool.CheckpointManager(str(directory / "saved"))
    assert (nvme.offloaded(engine) >= WEIGHTS) == (job != "restore")
    if job == "train":
        run_steps(engine)
        manager.save(engine)
        held = common.live_tensors(engine)
        if rank == 0:
            torch.save(held, directory / "truth.pt")
        common.leave()
    if job == "refuse":
        before = common.live_tensors(engine)
        told = refusal(lambda: manager.restore(engine))
        assert 'cannot load into it; set "device" of offload_param to "cpu"' in told, told
        after = common.live_tensors(engine)
        assert all(torch.equal(after[key], value) for key, value in before.items())
        common.leave()
    assert manager.restore(engine) is not None
    truth, found = torch.load(directory / "truth.pt"), common.live_tensors(engine)
    assert truth.keys() == found.keys()
    for key, value in truth.items():
        assert torch.equal(found[key], value), key
    run_steps(engine)
    assert engine.global_steps == 2 * STEPS
    common.leave()


def main() -> None:
    """Check a save, restores and the refusal."""
    from tests.versions.round_trip import run_ranks

    if len(sys.argv) == 3:
        check(sys.argv[1], Path(sys.argv[2]))
    directory = Path(sys.argv[1]).resolve()
    directory.mkdir(parents=True)
    for ranks, job in ((2, "train"), (2, "restore"), (1, "restore"), (2, "refuse")):
        run_ranks(ranks, job, directory, script=os.path.abspath(__file__))
    print("parameters on NVMe: restored on 1 and 2 ranks, and refused")


if __name__ == "__main__":
    main()
