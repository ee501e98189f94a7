"""A train loop of plain DeepSpeed that can be killed at any moment, and continues with any number of ranks.

    torchrun --nproc_per_node=2 examples/train_loop.py run --steps 20
    torchrun --nproc_per_node=3 examples/train_loop.py run --steps 40     # continues at step 20

On a machine without a GPU: DS_ACCELERATOR=cpu torchrun ...
"""

from __future__ import annotations

import argparse
import logging
import os
import signal

import deepspeed
import torch

import ckpttool

WIDTH, BATCH = 64, 12
CONFIG = {
    "train_batch_size": BATCH,  # the same on any number of ranks that divides it
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 1.0,
}


def batch(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a step's data; all ranks together see the same, however many they are."""
    numbers = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, WIDTH, generator=numbers)
    targets = inputs.roll(1, dims=1) * 0.5
    return inputs[rank::ranks].bfloat16(), targets[rank::ranks]


def main() -> None:
    """Train, save now and then, and resume if there is something to resume from."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", help="directory or URL of the run's checkpoints")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3))
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("ckpttool").setLevel(logging.INFO)

    if os.environ.get("DS_ACCELERATOR") == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled first
    deepspeed.init_distributed()
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH))
    config = {**CONFIG, "zero_optimization": {"stage": options.stage}}
    engine, *_ = deepspeed.initialize(
        model=model, config=config, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3)
    )

    manager = ckpttool.CheckpointManager(
        options.root, keep_last=2, keep_best=("loss", "min", 1), async_save=True, signals=[signal.SIGTERM]
    )
    state = manager.restore(engine) or {"step": 0}
    for step in range(state["step"], options.steps):
        inputs, targets = batch(step, rank, ranks)
        loss = (engine(inputs.to(engine.device)).float() - targets.to(engine.device)).square().mean()
        engine.backward(loss)
        engine.step()
        leaving = manager.preempted()
        if (step + 1) % options.save_every == 0 or leaving:
            mean = loss.detach() / ranks
            torch.distributed.all_reduce(mean)
            manager.save(engine, client_state={"step": step + 1}, metrics={"loss": float(mean)})
            if rank == 0:
                print(f"step {step + 1}: loss {float(mean):.4f}", flush=True)
        if leaving:
            break
    manager.wait()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
