"""Train with Accelerate on DeepSpeed; make weights of what ``save_state`` wrote, and load them into a plain model.

    torchrun --nproc_per_node=2 examples/huggingface_accelerate.py run out --stage 3

On a machine without a GPU: DS_ACCELERATOR=cpu ACCELERATE_USE_CPU=true torchrun ...
"""

from __future__ import annotations

import argparse
import os

import deepspeed
import torch
from accelerate import Accelerator, DeepSpeedPlugin

import ckpttool

WIDTH, BATCH, STEPS = 64, 8, 20


def build_model() -> torch.nn.Sequential:
    """A small one, on the device and of the type that are torch's default."""
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH))


def main() -> None:
    """Train on all ranks; then the first one consolidates what was saved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="directory for Accelerate's state")
    parser.add_argument("out", help="directory for the weights")
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3))
    options = parser.parse_args()

    if os.environ.get("DS_ACCELERATOR") == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled first
    config = {
        "train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": 1, "bf16": {"enabled": True},
        "zero_optimization": {"stage": options.stage}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    torch.manual_seed(0)
    model = build_model()
    inputs = torch.randn(64, WIDTH)
    targets = inputs.roll(1, dims=1) * 0.5
    rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=BATCH)
    engine, optimizer, rows = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), rows)
    step = 0
    while step < STEPS:
        for given, wanted in rows:
            loss = (engine(given.bfloat16()).float() - wanted).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    accelerator.save_state(options.run)
    with torch.no_grad():
        trained = engine(inputs.to(engine.device).bfloat16()).float()

    if accelerator.is_main_process:
        ckpttool.consolidate(options.run, options.out, to="safetensors", dtype="bf16")
        plain = build_model().to(engine.device, torch.bfloat16)
        ckpttool.load_state_dict(options.out, dtype="bf16", device=engine.device).load_into(plain)
        with torch.no_grad():
            again = plain(inputs.to(engine.device).bfloat16()).float()
        print(f"trained {step} steps; outputs of the plain model differ by {float((again - trained).abs().max()):.6f}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
