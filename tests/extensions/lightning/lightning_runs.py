"""Runs of Lightning's trainer on the CPU, forked from one process that has imported it once.

Losses and warnings of each run are in ``facts.json`` of its directory.
"""

from __future__ import annotations

import os
from typing import Any

from tests.frameworks.killing import kill_at
from tests.frameworks.runs import note_loss, run_jobs

IMPORTED = ("ckpttool.integrations.lightning", "torch.distributed.tensor.experimental")
"""What all runs import."""
WIDTH, ROWS, GLOBAL_BATCH = 8, 24, 6
MESH = ("data_parallel_size", "tensor_parallel_size")
STEPS, SAVED = 8, 4
"""An epoch has four steps, and ends with a save."""


def run(jobs: list[dict[str, Any]]) -> None:
    """Run all jobs, one after another."""
    from recipes import lightning

    lightning.run_on_cpu()
    run_jobs(jobs, _train)


def shard(net: Any, mesh: Any) -> None:
    """Cut the layers over the ranks of a mesh of Lightning, as ``configure_model`` does."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if mesh["tensor_parallel"].size() > 1:
        parallelize_module(net, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh["data_parallel"])


def _train(job: dict[str, Any], facts: dict[str, Any]) -> None:
    import lightning
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from ckpttool.integrations.lightning import CkptDeepSpeedStrategy, CkptModelParallelStrategy, newest_checkpoint

    losses: dict[str, float] = {}

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"width": WIDTH})
            self.net = torch.nn.Sequential(
                torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(job.get("dropout", 0.0)), torch.nn.Linear(WIDTH, WIDTH)
            )

            self.automatic_optimization = not job.get("several")

        def configure_model(self) -> None:
            if "mesh" in job:
                shard(self.net, self.device_mesh)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if job.get("changes"):
                checkpoint["state_dict"].pop("net.0.bias")

        def training_step(self, batch: Any, index: int) -> Any:
            (given,) = batch
            loss = (self.net(given) - given.roll(1, 1)).square().mean()
            if job.get("several"):
                self.manual_backward(loss)
                several: Any = self.optimizers()
                for one in several:
                    one.step()
                    one.zero_grad()
            whole = loss.detach().clone()
            torch.distributed.all_reduce(whole)
            step = self.global_step // 2 if job.get("several") else self.global_step + 1
            losses[str(step)] = float(whole) / self.trainer.world_size
            if job.get("notes"):
                note_loss(job, step, losses[str(step)])
            return loss

        def test_step(self, batch: Any, index: int) -> None:
            given = batch[0].to(self.net[0].weight.dtype)
            self.log("test", (self.net(given) - given.roll(1, 1)).float().square().mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            if job.get("several"):
                own = self.net[2].bias
                first = torch.optim.AdamW([p for p in self.parameters() if p is not own], lr=0.05)
                return [first, torch.optim.SGD([own], lr=0.02, momentum=0.9)]
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    os.environ |= {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"], "NODE_RANK": "0", "GROUP_RANK": "0"}
    os.environ |= job.get("environment", {})
    os.environ |= {"TORCHELASTIC_RUN_ID": "tests"}  # Lightning then starts no processes of its own
    lightning.seed_everything(5, verbose=False)
    config = {
        "zero_optimization": {"stage": job["stage"], "stage3_param_persistence_threshold": 10},
        "zero_allow_untested_optimizer": True, "train_micro_batch_size_per_gpu": GLOBAL_BATCH // job["world_size"],
    }  # fmt: skip
    options: dict[str, Any] = {"config": config, "process_group_backend": "gloo"}
    saves = job.get("saves")
    own: Any = CkptDeepSpeedStrategy
    if "mesh" in job:
        own, options = CkptModelParallelStrategy, dict(zip(MESH, job["mesh"], strict=True))
    strategy = own.__bases__[1](**options) if saves is None else own(**options, prove=True, **saves)
    inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
    batch = GLOBAL_BATCH // job.get("mesh", [job["world_size"]])[0]
    rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs), batch_size=batch)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=job["world_size"], strategy=strategy, max_epochs=job.get("steps", STEPS) // 4,
        precision=job.get("precision", "32-true"),
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(
                job["run"], filename="{step}", save_top_k=job.get("keep", -1), monitor="step", mode="max",
                save_weights_only=job.get("weights_only", False),
            )
        ],
    )  # fmt: skip
    given = job.get("load")
    given = newest_checkpoint(job["run"]) if given == "newest" else given
    facts["from"] = given
    if job.get("kill"):
        kill_at(job["kill"], job["out"])
    module = Module()
    if job.get("test"):
        facts["tested"] = trainer.test(module, rows, ckpt_path=given, verbose=False)[0]["test"]
        return
    trainer.fit(module, rows, ckpt_path=given)
    facts["losses"] = losses
    if "mesh" in job:
        torch.save(
            get_model_state_dict(module, options=StateDictOptions(full_state_dict=True)), job["out"] + "/live.pt"
        )
    facts["rate"] = trainer.optimizers[0].param_groups[0]["lr"]
