"""Train a causal language model with FSDP2 under Ray Train, as Ray's template.

ray_fsdp2_documented.py saves as that template. ray_fsdp2.py saves with ckpttool, and resumes on any number of workers:

    python examples/ray_fsdp2.py --storage run --workers 2 --epochs 2
    python examples/ray_fsdp2.py --storage run --workers 3 --epochs 4

Each continues a run of the other. A run begins with ``--start CHECKPOINT``: with ckpttool any checkpoint, such as one
of ray_zero.py, which has the same model; without it, what ``convert CHECKPOINT OUT --to dcp --layout app`` writes.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from ckpttool.integrations import ray_train

WORDS, LENGTH, LINES, BATCH = 32, 12, 24, 2
MODEL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def train_func(config: dict[str, Any]) -> None:
    """Train; runs on every worker."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    device = ray.train.torch.get_device()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **MODEL)).to(device)
    mesh = init_device_mesh(device.type, (ray.train.get_context().get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    saves = ray_train.RayTrainCheckpoints(layout="app")
    state = saves.restore(model, optimizer=optimizer)
    if state is None and config["start"]:
        state = saves.restore(model, config["start"], optimizer=optimizer)
    start_epoch, step = (0, 0) if state is None else (state["epoch"] + 1, state.get("step", 0))

    lines = (torch.arange(LINES)[:, None] + torch.arange(LENGTH)) % (WORDS - 3) + 3
    loader = ray.train.torch.prepare_data_loader(torch.utils.data.DataLoader(lines, BATCH, shuffle=True))
    for epoch in range(start_epoch, config["epochs"]):
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        total = 0.0
        for tokens in loader:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
            step += 1
        metrics = {"loss": total / len(loader), "epoch": epoch}
        state = {"epoch": epoch, "step": step}
        saves.report(model, metrics, optimizer=optimizer, step=step, client_state=state)


def main() -> None:
    """Run on this machine, or on the cluster of RAY_ADDRESS."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", required=True, help="directory or URL that all workers reach")
    parser.add_argument("--start", help="checkpoint to begin the run with, which all workers reach")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()

    ray.init(log_to_driver=False)
    storage, start = (
        os.path.abspath(path) if path and "://" not in path else path for path in (options.storage, options.start)
    )
    result = TorchTrainer(
        train_func,
        train_loop_config={"epochs": options.epochs, "start": start},
        scaling_config=ScalingConfig(
            num_workers=options.workers,
            use_gpu=options.gpu,
            resources_per_worker={"GPU": 1} if options.gpu else {"CPU": 0.5},
        ),
        run_config=RunConfig(name="fsdp2", storage_path=storage, failure_config=FailureConfig(max_failures=2)),
    ).fit()
    for checkpoint, metrics in result.best_checkpoints:
        print(f"epoch {metrics['epoch']}: loss {metrics['loss']:.4f}, {checkpoint.path}")


if __name__ == "__main__":
    main()
