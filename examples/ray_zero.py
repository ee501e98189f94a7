"""Train a causal language model with ZeRO-3 under Ray Train, as Ray's template "DeepSpeed ZeRO and Ray Train".

ray_zero_documented.py saves as that template. ray_zero.py saves with ckpttool, and resumes on any number of workers:

    python examples/ray_zero.py --storage run --workers 2 --epochs 2
    python examples/ray_zero.py --storage run --workers 3 --epochs 4

Each continues a run of the other. The model is tiny and random, its data generated: replace them by ``from_pretrained``
and real text.
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
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": BATCH,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 1.0,
}


def use_gloo() -> None:
    """Without a GPU: let DeepSpeed share no memory, which it would have to compile first."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def setup_dataloader() -> Any:
    """Sequences that count upwards, each from another number on; Ray gives each worker a part of them."""
    lines = (torch.arange(LINES)[:, None] + torch.arange(LENGTH)) % (WORDS - 3) + 3
    return ray.train.torch.prepare_data_loader(torch.utils.data.DataLoader(lines, BATCH, shuffle=True))


def setup_model_and_optimizer() -> Any:
    """A tiny Llama under DeepSpeed."""
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    if not torch.cuda.is_available():
        use_gloo()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **MODEL))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ds_engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=DEEPSPEED)
    return ds_engine


def train_loop(config: dict[str, Any]) -> None:
    """Train; runs on every worker."""
    ds_engine = setup_model_and_optimizer()
    state = ray_train.restore(ds_engine) or {"epoch": -1}
    if "epoch" not in state:  # only for a run that was begun the documented way
        report, reported = ray_train.restored(), ray.train.get_all_reported_checkpoints()
        state = next(one.metrics for one in reported if report and one.checkpoint.path in report.path)
    start_epoch = state["epoch"] + 1

    train_loader = setup_dataloader()
    device = ray.train.torch.get_device()
    for epoch in range(start_epoch, config["epochs"]):
        if ray.train.get_context().get_world_size() > 1:
            train_loader.sampler.set_epoch(epoch)
        total = 0.0
        for batch in train_loader:
            tokens = batch.to(device)
            loss = ds_engine(input_ids=tokens, labels=tokens, use_cache=False).loss
            ds_engine.backward(loss)
            ds_engine.step()
            total += loss.item()
        metrics = {"loss": total / len(train_loader), "epoch": epoch}
        ray_train.report(ds_engine, metrics, client_state={"epoch": epoch})


def main() -> None:
    """Run on this machine, or on the cluster of RAY_ADDRESS."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", required=True, help="directory or URL that all workers reach")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()

    ray.init(log_to_driver=False)
    storage = options.storage if "://" in options.storage else os.path.abspath(options.storage)
    result = TorchTrainer(
        train_loop,
        train_loop_config={"epochs": options.epochs},
        scaling_config=ScalingConfig(
            num_workers=options.workers,
            use_gpu=options.gpu,
            resources_per_worker={"GPU": 1} if options.gpu else {"CPU": 0.5},
        ),
        run_config=RunConfig(name="zero", storage_path=storage, failure_config=FailureConfig(max_failures=2)),
    ).fit()
    for checkpoint, metrics in result.best_checkpoints:
        print(f"epoch {metrics['epoch']}: loss {metrics['loss']:.4f}, {checkpoint.path}")


if __name__ == "__main__":
    main()
