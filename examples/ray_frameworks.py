"""Hugging Face Trainer, Accelerate and Lightning under Ray Train: saves in the run's storage, resumes.

    python examples/ray_frameworks.py trainer --storage run --workers 2 --steps 8
    python examples/ray_frameworks.py trainer --storage run --workers 3 --steps 16 --stage 3

The second continues at step 8 with another number of workers and another ZeRO stage. With ``--max-failures`` Ray
restarts the workers when one is lost, and they continue from the newest commit. The models are tiny and their data is
generated. Lightning runs DeepSpeed only on GPUs.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROWS, WIDTH, GLOBAL_BATCH = 48, 16, 12
WORDS = 32


def use_cpu() -> bool:
    """Return whether the workers have no GPU; DeepSpeed then shares no memory, which it would have to compile first."""
    import deepspeed
    import torch

    if torch.cuda.is_available():
        return False
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return True


def settings(config: dict[str, Any], workers: int) -> dict[str, Any]:
    """DeepSpeed's configuration: the same global batch on any number of workers."""
    return {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // workers,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": config["stage"]},
        "zero_allow_untested_optimizer": True,
    }


def train_with_trainer(config: dict[str, Any], *, ddp: bool = False) -> None:
    """Train with the Hugging Face Trainer; runs on every worker."""
    import ray.train
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

    from ckpttool.integrations.huggingface import CkptCallback

    cpu, workers = use_cpu(), ray.train.get_context().get_world_size()
    set_seed(0)
    arguments = TrainingArguments(
        output_dir="trainer",
        max_steps=config["steps"],
        save_steps=4,
        logging_steps=4,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        per_device_train_batch_size=GLOBAL_BATCH // workers,
        optim="adamw_torch",
        report_to=[],
        disable_tqdm=True,
        use_cpu=cpu,
        ddp_backend="gloo" if cpu else None,
        deepspeed=None if ddp else {**settings(config, workers), "train_micro_batch_size_per_gpu": "auto"},
    )
    shape = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=2))
    tokens = (torch.arange(ROWS)[:, None] + torch.arange(WIDTH)) % (WORDS - 3) + 3
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": t, "labels": t} for t in tokens])
    callback = CkptCallback(async_save=True, auto_resume=True)  # saves into the run's storage, and reports to Ray
    trainer.add_callback(callback)
    trainer.train()
    if trainer.is_world_process_zero():
        print(f"trained from step {callback.restored.step if callback.restored else 0} on {workers} workers")


def build_model() -> Any:
    """A small one."""
    import torch

    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH))


def train_with_accelerate(config: dict[str, Any]) -> None:
    """Train with Accelerate; runs on every worker."""
    import ray.train
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration, set_seed

    from ckpttool.integrations.accelerate import prepare

    cpu, workers = use_cpu(), ray.train.get_context().get_world_size()
    set_seed(0)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings(config, workers)),
        project_config=ProjectConfiguration("project", automatic_checkpoint_naming=True),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if cpu else [],
    )
    saves = prepare(accelerator)  # saves into the run's storage, and reports to Ray
    model, inputs = build_model(), torch.randn(ROWS, WIDTH)
    rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs), batch_size=GLOBAL_BATCH // workers)
    engine, optimizer, rows = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), rows)
    first = 0
    if saves.has_checkpoint():
        accelerator.load_state()
        first = engine.global_steps
    for step in range(first, config["steps"], len(rows)):
        for (given,) in rows:
            loss = (engine(given) - given.roll(1, 1)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(metrics={"loss": float(loss.detach()), "step": step + len(rows)})
    if accelerator.is_main_process:
        print(f"trained from step {first} on {workers} workers")


def train_with_lightning(config: dict[str, Any], *, fsdp2: bool = False) -> None:
    """Train with Lightning; runs on every worker."""
    import lightning
    import ray.train
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from ray.train.lightning import RayDeepSpeedStrategy, RayLightningEnvironment
    from torch.distributed.fsdp import fully_shard

    from ckpttool.integrations.lightning import (
        CkptModelParallelStrategy,
        CkptSaves,
        newest_checkpoint,
        run_directory,
    )

    class Strategy(CkptSaves, RayDeepSpeedStrategy):  # type: ignore[misc]
        """Ray's strategy, with committed saves that are reported to Ray."""

    class Sharded(CkptModelParallelStrategy):
        """The strategy for FSDP2 on the device that Ray gives the worker."""

        @property
        def root_device(self) -> torch.device:
            return ray.train.torch.get_device()

    class Regression(lightning.LightningModule):
        """Two layers."""

        def __init__(self) -> None:
            super().__init__()
            self.model = build_model()

        def configure_model(self) -> None:
            if self.device_mesh is not None:  # under Sharded
                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, index: int) -> Any:
            (given,) = batch
            loss = (self.model(given) - given.roll(1, 1)).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    cpu, workers = use_cpu(), ray.train.get_context().get_world_size()
    lightning.seed_everything(0, verbose=False)
    batch = GLOBAL_BATCH // workers
    rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(ROWS, WIDTH)), batch_size=batch)
    own = settings(config, workers)
    del own["gradient_accumulation_steps"]
    strategy: Any = Strategy(config=own, process_group_backend="gloo" if cpu else "nccl")
    if fsdp2:
        strategy = Sharded(data_parallel_size=workers, tensor_parallel_size=1)
    trainer = lightning.Trainer(
        accelerator="cpu" if cpu else "gpu",
        devices="auto",
        plugins=[RayLightningEnvironment()],
        logger=False,
        strategy=strategy,
        max_epochs=config["steps"] * GLOBAL_BATCH // ROWS,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(run_directory(), filename="lightning-{step}", save_top_k=-1)],
    )
    newest = newest_checkpoint(run_directory())
    trainer.fit(Regression(), rows, ckpt_path=newest)
    if trainer.is_global_zero:
        first = strategy.restored.step if newest else 0
        print(f"trained from step {first} on {workers} workers")


FRAMEWORKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "trainer": train_with_trainer,
    "trainer-ddp": partial(train_with_trainer, ddp=True),
    "accelerate": train_with_accelerate,
    "lightning": train_with_lightning,
    "lightning-fsdp2": partial(train_with_lightning, fsdp2=True),
}


def main(arguments: Sequence[str] | None = None, train_func: Any = None) -> None:
    """Train on the workers, and show the content of the run's storage.

    Args:
        arguments: Command line; default: ``sys.argv``.
        train_func: Function to run on each worker; default: the framework's.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("--storage", required=True, help="a path that all nodes share, or a bucket")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--max-failures", type=int, default=0, help="how often to restart the workers")
    options = parser.parse_args(arguments)

    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(address=os.environ.get("RAY_ADDRESS"), ignore_reinit_error=True)
    use_gpu = ray.cluster_resources().get("GPU", 0) >= options.workers
    storage = options.storage if "://" in options.storage else os.path.abspath(options.storage)
    result = TorchTrainer(
        train_func or FRAMEWORKS[options.framework],
        train_loop_config={"steps": options.steps, "stage": options.stage},
        scaling_config=ScalingConfig(
            num_workers=options.workers, use_gpu=use_gpu, resources_per_worker=None if use_gpu else {"CPU": 0.5}
        ),
        run_config=RunConfig(
            name=options.framework,
            storage_path=storage,
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=options.max_failures),
        ),
    ).fit()
    kept = sorted(os.path.basename(checkpoint.path) for checkpoint, _ in result.best_checkpoints or [])
    print(f"newest: {os.path.basename(result.checkpoint.path)}; kept: {', '.join(kept)}")


if __name__ == "__main__":
    main()
