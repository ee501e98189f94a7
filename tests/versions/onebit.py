"""1-bit Adam, 1-bit LAMB and 0/1 Adam of DeepSpeed 0.19.6, the last release that has them; needs no pytest.

    PYTHONPATH=.:fixtures OLD_ENVIRONMENT/bin/python tests/versions/onebit.py DIRECTORY

Two ranks train until momentums are compressed, and save with ``CheckpointManager``, which warns of what DeepSpeed does
not save. Two ranks and one restore: weights, moments, frozen variances and numbers are, bit for bit, those of the live
engine, the compression errors are reset, as DeepSpeed's own load resets them, and training continues.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

STEPS = 3
RESET = {"worker_error", "server_error", "momentum_accumulator"}


def held(engine: Any) -> dict[str, Any]:
    """Masters, states and weights of the live engine, without the states that DeepSpeed's load resets."""
    import torch
    from recipes.common import base_optimizer

    optimizer = base_optimizer(engine)
    found: dict[str, Any] = {name: p.data.clone() for name, p in engine.module.named_parameters()}
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            found[f"{g}/{i}"] = p.data.clone()
            for key, value in optimizer.state[p].items():
                if key not in RESET:
                    found[f"{g}/{i}/{key}"] = value.clone() if torch.is_tensor(value) else value
    return found


def check(job: str, name: str, directory: Path) -> None:
    """Do the part of one rank."""
    import torch
    from recipes import onebit
    from recipes.common import leave

    import ckpttool

    case = next(case for case in onebit.CASES if case.name == name)
    engine = onebit.initialize(case)
    rank, manager = torch.distributed.get_rank(), ckpttool.CheckpointManager(str(directory / "saved"))
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpttool").addHandler(handler)
    if job == "train":
        onebit.run_steps(engine, STEPS)
        manager.save(engine)
        assert any("compression errors" in line for line in warnings) == (rank == 0), warnings
        torch.save(held(engine), directory / f"truth{rank}.pt")
        leave()
    assert manager.restore(engine) is not None
    assert manager.restored is not None
    compresses = "lamb" not in name  # 1-bit LAMB keeps no errors in its state
    assert any("resets" in note for note in manager.restored.notes) == compresses, manager.restored.notes
    # Under 0/1 Adam each rank has weights of its own between synchronizations, and the first rank's are saved.
    own = rank if "zero-one" not in name else 0
    truth, found = torch.load(directory / f"truth{own}.pt"), held(engine)
    assert truth.keys() == found.keys()
    for key, value in truth.items():
        assert torch.equal(found[key], value) if torch.is_tensor(value) else found[key] == value, key
    onebit.run_steps(engine, 2)
    assert engine.global_steps == STEPS + 2
    leave()


def main() -> None:
    """Check every optimizer."""
    from recipes import onebit

    from tests.versions.round_trip import run_ranks

    if len(sys.argv) == 4:
        check(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    for case in onebit.CASES:
        directory = Path(sys.argv[1]) / case.name
        directory.mkdir(parents=True)
        for ranks, job in ((2, "train"), (2, "restore"), (1, "restore")):
            run_ranks(ranks, job, case.name, directory, script=os.path.abspath(__file__))
        print(f"{case.name}: restored on 1 and 2 ranks")


if __name__ == "__main__":
    main()
