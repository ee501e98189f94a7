"""Train with Accelerate: committed saves, a resume on other ranks; load the weights into a plain model.

    torchrun --nproc_per_node=2 examples/huggingface_accelerate.py run out --stage 3 --steps 20
    torchrun --nproc_per_node=3 examples/huggingface_accelerate.py run out --stage 2 --steps 30

The second run continues where the first one ended or was killed. ``--strategy fsdp2`` and ``--strategy ddp`` take the
place of DeepSpeed, and each continues a run of the others. On a machine without a GPU: DS_ACCELERATOR=cpu torchrun ...;
Accelerate has FSDP2 only on GPUs.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration

import ckpttool
from ckpttool.integrations.accelerate import prepare

WIDTH, ROWS, GLOBAL_BATCH, SAVE_EVERY = 64, 48, 12, 5


def build_model() -> torch.nn.Sequential:
    """A small one, on the device and of the type that are torch's default."""
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH))


class Progress:
    """The position of the loop, which Accelerate saves."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        """Return the position to save."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a saved position."""
        self.step = state["step"]


def of_strategy(strategy: str, stage: int, batch: int, *, fp32: bool) -> dict[str, Any]:
    """The arguments of Accelerate. Under DDP it must be told of a CPU, or each rank trains a model of its own."""
    if strategy == "deepspeed":
        config = {
            "train_micro_batch_size_per_gpu": batch,
            "gradient_accumulation_steps": 1,
            "bf16": {"enabled": not fp32},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config)}
    if strategy == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
        return {"fsdp_plugin": plugin}
    return {"cpu": not torch.cuda.is_available()}


def main() -> None:
    """Train on all ranks, from the newest checkpoint if there is one; then the first one loads the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="directory of Accelerate's checkpoints")
    parser.add_argument("out", help="directory for the weights")
    parser.add_argument("--strategy", default="deepspeed", choices=("deepspeed", "fsdp2", "ddp"))
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3), help="of DeepSpeed")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--fp32", action="store_true", help="train in fp32; default: bf16")
    options = parser.parse_args()

    cpu = not torch.cuda.is_available()
    if cpu and options.strategy == "deepspeed":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled first
    batch = GLOBAL_BATCH // int(os.environ["WORLD_SIZE"])
    dtype = torch.float32 if options.fp32 else torch.bfloat16
    accelerator = Accelerator(
        mixed_precision="no" if options.fp32 else "bf16",
        **of_strategy(options.strategy, options.stage, batch, fp32=options.fp32),
        project_config=ProjectConfiguration(options.run, automatic_checkpoint_naming=True, total_limit=2),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if cpu else [],
    )
    saves = prepare(accelerator, async_save=True)
    torch.manual_seed(0)
    model = build_model()
    inputs = torch.randn(ROWS, WIDTH)
    targets = inputs.roll(1, dims=1) * 0.5
    rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=batch)
    engine, optimizer, rows = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), rows)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if saves.has_checkpoint():
        accelerator.load_state()  # the newest whole one
    resumed = progress.step
    while progress.step < options.steps:
        done = progress.step % len(rows)
        for given, wanted in accelerator.skip_first_batches(rows, done) if done else rows:
            loss = (engine(given.to(dtype)).float() - wanted).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress.step += 1
            mean: Any = accelerator.reduce(loss.detach(), "mean")
            accelerator.print(f"step {progress.step}: loss {float(mean):.7g}")
            if progress.step == options.steps:
                break
            if progress.step % SAVE_EVERY == 0:
                accelerator.save_state()
    folder = accelerator.save_state()
    saves.wait()
    with torch.no_grad():
        trained = engine(inputs.to(accelerator.device, dtype)).float()

    if accelerator.is_main_process:
        ckpttool.consolidate(folder, options.out, to="safetensors", dtype=dtype, overwrite=True)
        plain = build_model().to(accelerator.device, dtype)
        ckpttool.load_state_dict(options.out, dtype=dtype, device=accelerator.device).load_into(plain)
        with torch.no_grad():
            again = plain(inputs.to(accelerator.device, dtype)).float()
        print(f"trained from step {resumed} to {progress.step}")
        print(f"outputs of the plain model differ by {float((again - trained).abs().max()):.6f}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
