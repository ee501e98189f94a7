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
import tempfile
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed.checkpoint as dcp
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

WORDS, LENGTH, LINES, BATCH = 32, 12, 24, 2
MODEL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


class AppState:
    """The state in a checkpoint: model, optimizer, and the last epoch."""

    def __init__(self, model: Any, optimizer: Any, epoch: int = 0) -> None:
        self.model, self.optimizer, self.epoch = model, optimizer, epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this worker."""
        weights, states = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optim": states, "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state of this worker."""
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )
        self.epoch = state_dict["epoch"]


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

    start_epoch = 0
    checkpoint = ray.train.get_checkpoint() or (Checkpoint(config["start"]) if config["start"] else None)
    if checkpoint:
        app_state = AppState(model, optimizer)
        with checkpoint.as_directory() as directory:
            latest = os.path.join(directory, "latest")
            if os.path.exists(latest):  # only for a run that was begun with ckpttool
                with open(latest) as file:
                    directory = os.path.join(directory, file.read())
            dcp.load({"app": app_state}, checkpoint_id=directory)
        start_epoch = app_state.epoch + 1

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
        metrics = {"loss": total / len(loader), "epoch": epoch}
        with tempfile.TemporaryDirectory() as directory:
            dcp.save({"app": AppState(model, optimizer, epoch)}, checkpoint_id=directory)
            ray.train.report(metrics, checkpoint=Checkpoint.from_directory(directory))


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
