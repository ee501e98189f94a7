"""Train loops that read a data set on from a checkpoint, on other ranks and with an equal global batch."""

from __future__ import annotations

import itertools
import logging
import sys
from pathlib import Path
from typing import Any

from tests import forked

SAMPLES, WIDTH, GLOBAL = 50, 6, 12
CONFIG = {
    "train_batch_size": GLOBAL, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True, "steps_per_print": 10_000,
}  # fmt: skip


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
    for job in jobs:
        forked.end_if_stuck()
        (directory / job["id"]).mkdir(exist_ok=True)
        facts = {"train": _train, "curriculum": _curriculum, "differs": _differs}[job["do"]](job)
        torch.save(facts, directory / job["id"] / f"facts-{torch.distributed.get_rank()}.pt")
        torch.distributed.barrier()
    common.leave()


def _build(config: dict[str, Any]) -> Any:
    import deepspeed
    import torch

    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))
    return deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=0.02), config=config)[0]


def _train(job: dict[str, Any]) -> dict[str, Any]:
    """Train to the end of an epoch, or for some steps of the optimizer; resume if there is a checkpoint."""
    import torch

    import ckpttool
    import ckpttool.data

    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    config = ckpttool.resume_config(CONFIG, world_size=ranks, src=job["root"] if job["resumes"] else None)
    engine = _build(config)
    numbers = torch.Generator().manual_seed(9)
    data = [(n, torch.randn(WIDTH, generator=numbers)) for n in range(SAMPLES)]
    sampler = ckpttool.data.ResumableSampler(
        data, batch_size=config["train_micro_batch_size_per_gpu"], rank=rank, world_size=ranks, seed=4,
        accumulation=config["gradient_accumulation_steps"],
    )  # fmt: skip
    loader = ckpttool.data.ResumableLoader(
        torch.utils.data.DataLoader(data, batch_sampler=sampler, num_workers=job["workers"])
    )
    manager = ckpttool.CheckpointManager(job["root"])
    notes: tuple[str, ...] = ()
    if job["resumes"]:
        state = manager.restore(engine)
        assert state is not None
        assert manager.restored is not None
        loader.load_state_dict(state["loader"])
        notes = manager.restored.notes
    first = engine.global_steps
    read: list[tuple[int, list[int], list[float]]] = []
    for numbers_of, x in loader:
        losses = (engine(x) - x.sum(1, keepdim=True)).square().mean(1)
        read.append((engine.global_steps, numbers_of.tolist(), losses.tolist()))
        engine.backward(losses.mean())
        engine.step()
        if job["steps"] and engine.global_steps - first == job["steps"]:
            break
    if not job["resumes"] and job["steps"]:
        manager.save(engine, tag="tag", client_state={"loader": loader.state_dict()})
    engine.destroy()
    return {"read": read, "config": config, "notes": notes}


def _differs(job: dict[str, Any]) -> dict[str, Any]:
    """What a restore says if the global batch differs."""
    import ckpttool
    import ckpttool.data

    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpttool").addHandler(handler)
    facts = {}
    for name, sizes in job["configs"].items():
        engine = _build({**CONFIG, **sizes})
        preview = ckpttool.preview(engine, job["root"])
        assert not lines
        report = ckpttool.load(engine, job["root"])
        facts[name] = {"notes": [*report.notes], "preview": [*preview.notes], "warnings": list(lines)}
        lines.clear()
        engine.destroy()
    logging.getLogger("ckpttool").removeHandler(handler)
    return facts


def _curriculum(job: dict[str, Any]) -> dict[str, Any]:
    """Read with DeepSpeed's own sampler, save, and read on; or resume."""
    import torch
    from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler

    import ckpttool
    import ckpttool.data

    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    metric = {
        "clustering_type": "single_cluster", "difficulty_type": "value", "min_difficulty": 1, "max_difficulty": 10,
        "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 5, "difficulty_step": 1},
    }  # fmt: skip
    learning = {"enabled": True, "data_cluster_path": job["clusters"], "curriculum_metrics": {"length": metric}}
    efficiency = {"seed": 5, "data_sampling": {"num_epochs": 2, "num_workers": 0, "curriculum_learning": learning}}
    micro = GLOBAL // ranks // job["accumulation"]
    sampler = DeepSpeedDataSampler(
        efficiency, 200, micro, rank, ranks, torch.distributed.group.WORLD, job["accumulation"], rank
    )
    position = ckpttool.data.CurriculumPosition(sampler, workers=job.get("workers", 0))
    engine = _build({**CONFIG, "train_micro_batch_size_per_gpu": 1, "train_batch_size": ranks})
    manager = ckpttool.CheckpointManager(job["root"])
    facts: dict[str, Any] = {"before": [], "after": []}
    if job["resumes"]:
        state = manager.restore(engine)
        assert state is not None
        try:
            position.load_state_dict(state["position"])
        except ckpttool.CkptError as error:
            return {"error": str(error)}
        batches = iter(sampler)
    else:
        batches = iter(sampler)
        facts["before"] = [next(batches) for _ in range(3 * job["accumulation"] + job.get("extra", 0))]
        manager.save(engine, tag="tag", client_state={"position": position.state_dict()})
    facts["after"] = [next(batches) for _ in range(4 * job["accumulation"])]
    facts["consumed"] = position.state_dict()["consumed_samples"]
    engine.destroy()
    return facts


if __name__ == "__main__":
    main(Path(sys.argv[1]))
