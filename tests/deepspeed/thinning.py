"""Train loops whose manager thins old checkpoints; engines then load what is left of them."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from tests import forked


def main(directory: Path) -> None:
    """Do all jobs on two ranks."""
    import deepspeed  # noqa: F401  once, for all that are forked

    jobs = forked.jobs_in(directory)
    forked.run_ranks(2, lambda: _rank(jobs, directory))


def _rank(jobs: list[dict[str, Any]], directory: Path) -> None:
    import torch
    from recipes import common

    common.start(seed=5)
    for job in jobs:
        forked.end_if_stuck()
        facts = _do(job, directory / job["id"])
        if torch.distributed.get_rank() == 0:
            torch.save(facts, directory / f"{job['id']}.pt")
        torch.distributed.barrier()
    common.leave()


def _do(job: dict[str, Any], root: Path) -> dict[str, Any]:
    import torch

    import ckpttool
    from tests.deepspeed.saving import build

    rank = torch.distributed.get_rank()
    torch.manual_seed(5)
    first = build(job)
    manager = ckpttool.CheckpointManager(
        root, keep_last=1, thin_every=2, thin=job["dtype_thin"], async_save=job["background"]
    )
    facts: dict[str, Any] = {}
    for step in range(1, 5):
        first.step()
        manager.save(first.engine, client_state={"step": step}, metrics={"loss": 1.0 / step})
        if step == 2:
            facts["held"] = first.whole()
    manager.wait()
    torch.distributed.barrier()
    facts["kept"] = sorted(p.name for p in root.iterdir() if p.is_dir())
    facts["entries"] = [(e.name, e.thin, e.step, e.metrics.get("loss")) for e in ckpttool.ls(root).entries]

    def told(function: Any) -> str:
        try:
            function()
        except ckpttool.CkptError as error:
            return str(error)
        return ""

    torch.manual_seed(6)
    other = build(job)
    before = other.whole()
    facts["refused"] = told(lambda: ckpttool.load(other.engine, root, tag="global_step2"))
    facts["untouched"] = all(torch.equal(before[name], value) for name, value in other.whole().items())
    report = ckpttool.load(other.engine, root, tag="global_step2", weights_only=True)
    facts["loaded"], facts["report"] = other.whole(), str(report)
    # The newest one is damaged: a thin one is no way to go on, and the error says what is wrong with the newest.
    torch.distributed.barrier()
    if rank == 0:
        path = next((root / "global_step4").glob("*model_states.pt"))
        path.write_bytes(path.read_bytes()[:-1])
    torch.distributed.barrier()
    facts["none whole"] = told(lambda: ckpttool.CheckpointManager(root).restore(other.engine))
    thin = root.with_name(f"{root.name}-thin")
    if rank == 0:
        shutil.copytree(root / "global_step2", thin / "global_step2")
    torch.distributed.barrier()
    facts["all thin"] = told(lambda: ckpttool.CheckpointManager(thin).restore(other.engine))
    again = ckpttool.CheckpointManager(root)
    facts["weights alone"] = again.restore(other.engine, weights_only=True)
    facts["restored"] = None if again.restored is None else again.restored.tag
    again.save(other.engine, tag="following")
    torch.distributed.barrier()
    facts["provenance"] = json.loads((root / "following" / "ckpttool.json").read_text())["provenance"]
    facts["attempt"] = json.loads((root / "global_step2" / "ckpttool.json").read_text())["attempt"]
    quiet = ckpttool.CheckpointManager(root, provenance=False)
    quiet.save(other.engine, tag="quiet")
    torch.distributed.barrier()
    facts["quiet"] = json.loads((root / "quiet" / "ckpttool.json").read_text())["provenance"]
    return facts


if __name__ == "__main__":
    main(Path(sys.argv[1]))
