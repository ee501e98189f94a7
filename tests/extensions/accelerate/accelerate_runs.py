"""Runs of Accelerate on the CPU, forked from one process that has imported it once.

Losses, learning rates, random numbers and warnings of each run are in ``facts.json`` of its directory.
"""

from __future__ import annotations

from typing import Any

from tests import accelerate_on_cpu
from tests.frameworks.killing import kill_at
from tests.frameworks.runs import note_loss, run_jobs

IMPORTED = ("accelerate", "transformers", "ckpttool.integrations.accelerate")
"""What all runs import: Accelerate itself imports Transformers when it prepares a model."""
WIDTH, ROWS, GLOBAL_BATCH = 8, 24, 6
SHARDED = "SHARDED_STATE_DICT"
STEPS, SAVED = 6, 3
"""An epoch has four steps; the save is within it."""


def run(jobs: list[dict[str, Any]]) -> None:
    """Run all jobs, one after another."""
    run_jobs(jobs, _train, accelerate_on_cpu.forget)


class Progress:
    """An object registered for checkpointing."""

    def __init__(self) -> None:
        self.step = 0
        self.large = [0.0] * 1000

    def state_dict(self) -> dict[str, Any]:
        """What to save."""
        return {"step": self.step, "large": self.large}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.step, self.large = state["step"], state["large"]


def _fsdp2() -> dict[str, Any]:
    from accelerate import FullyShardedDataParallelPlugin

    accelerate_on_cpu.run_on_cpu()
    return {"cpu": True, "fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=SHARDED)}


def _train(job: dict[str, Any], facts: dict[str, Any]) -> None:
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DataLoaderConfiguration, InitProcessGroupKwargs, ProjectConfiguration, set_seed

    from ckpttool.integrations.accelerate import prepare

    set_seed(5)
    batch = GLOBAL_BATCH // job["world_size"]
    config = {
        "train_micro_batch_size_per_gpu": batch, "gradient_accumulation_steps": job.get("accumulation", 1),
        "zero_optimization": {"stage": job["stage"], "stage3_param_persistence_threshold": 10},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    sharded = _fsdp2() if job.get("fsdp2") else {"cpu": True}
    if not job.get("fsdp2") and not job.get("ddp"):
        sharded = {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config)}
    naming = {"automatic_checkpoint_naming": True, "total_limit": 2} if job.get("automatic") else {}
    accelerator = Accelerator(
        **sharded,
        project_config=ProjectConfiguration(job["project"], **naming),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=not job.get("unseeded"), data_seed=3),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    saves = prepare(accelerator, prove=True, **job["prepare"]) if job.get("prepare") is not None else None
    if job.get("twice"):
        prepare(accelerator)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(job.get("dropout", 0.0)), torch.nn.Linear(WIDTH, WIDTH)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    steps = job.get("steps", STEPS)
    total = steps * accelerator.num_processes  # Accelerate's scheduler takes one step for each rank
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * total))
    inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
    rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs), batch_size=batch, shuffle=True)
    engine, optimizer, rows, scheduler = accelerator.prepare(model, optimizer, rows, scheduler)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if job.get("kill"):
        kill_at(job["kill"], job["out"])
    if "load" in job:
        accelerator.load_state(job["load"])
    elif job.get("auto") and saves is not None and saves.has_checkpoint():
        accelerator.load_state()
    facts["resumed"] = progress.step
    facts["iteration"] = accelerator.save_iteration
    losses: dict[str, float] = {}
    rates: dict[str, float] = {}
    while progress.step < steps:
        epoch, done = divmod(progress.step, len(rows))
        left = accelerator.skip_first_batches(rows, done) if done else rows
        left.set_epoch(epoch)  # accelerate 1.11 forgets it when it skips
        for (given,) in left:
            with accelerator.accumulate(engine):
                loss = (engine(given) - given.roll(1, 1)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            progress.step += 1
            losses[str(progress.step)] = float(accelerator.gather(loss.detach().reshape(1)).mean())
            if job.get("notes"):
                note_loss(job, progress.step, losses[str(progress.step)])
            rates[str(progress.step)] = scheduler.get_last_lr()[0]
            if progress.step % job.get("every", SAVED) == 0:
                pickled = {"safe_serialization": False} if job.get("safe") is False else {}
                accelerator.save_state(job.get("folder", "").format(progress.step) or None, **pickled)
            if progress.step == steps:
                break
    if saves is not None:
        saves.wait()
    facts |= {"losses": losses, "rates": rates}
