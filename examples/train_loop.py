"""A train loop of plain DeepSpeed that can be killed at any moment, and continues with any number of ranks.

    torchrun --nproc_per_node=2 examples/train_loop.py run --steps 20
    torchrun --nproc_per_node=3 examples/train_loop.py run --steps 40     # continues at step 20

On a machine without a GPU: DS_ACCELERATOR=cpu torchrun ...
"""

from __future__ import annotations

import argparse
import logging
import math
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


def loss_of(engine: deepspeed.DeepSpeedEngine, step: int) -> torch.Tensor:
    """Return the loss of this rank's part of a step's data."""
    inputs, targets = batch(step, torch.distributed.get_rank(), torch.distributed.get_world_size())
    return (engine(inputs.to(engine.device)).float() - targets.to(engine.device)).square().mean()


def mean_over_ranks(loss: torch.Tensor) -> float:
    """Return the mean of the ranks' losses."""
    mean = loss.detach() / torch.distributed.get_world_size()
    torch.distributed.all_reduce(mean)
    return float(mean)


def replay(engine: deepspeed.DeepSpeedEngine, step: int) -> float:
    """Return the loss of the next step's data, without the step: a save records it, and a restore repeats it."""
    with torch.no_grad():
        return mean_over_ranks(loss_of(engine, step))


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
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH))
    config = {**CONFIG, "zero_optimization": {"stage": options.stage}}
    engine, *_ = deepspeed.initialize(
        model=model, config=config, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3)
    )

    manager = ckpttool.CheckpointManager(
        options.root, keep_last=2, keep_best=("loss", "min", 1), async_save=True, signals=[signal.SIGTERM]
    )
    state = manager.restore(engine, prove=True) or {"step": 0}
    if "replay" in state:
        now = replay(engine, state["step"])
        if not math.isclose(now, state["replay"], rel_tol=1e-5):  # equal on the same ranks; else the sum is rounded
            raise RuntimeError(f"the loss of step {state['step'] + 1} is {now}, but was {state['replay']} at the save")
        if rank == 0:
            print(f"replayed step {state['step'] + 1}: loss {now:.6f}, as at the save", flush=True)
    for step in range(state["step"], options.steps):
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
        leaving = manager.preempted()
        if (step + 1) % options.save_every == 0 or leaving:
            mean = mean_over_ranks(loss)
            state = {"step": step + 1, "replay": replay(engine, step + 1)}
            manager.save(engine, client_state=state, metrics={"loss": mean})
            if rank == 0:
                print(f"step {step + 1}: loss {mean:.4f}", flush=True)
        if leaving:
            break
    manager.wait()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
