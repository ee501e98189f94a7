"""Fine-tune a BERT for pairs of sentences with ZeRO-3 under Ray Train, and resume with any number of workers.

    python examples/ray_text_classification.py --storage run --workers 2 --epochs 2
    python examples/ray_text_classification.py --storage run --workers 3 --epochs 4 --data ray  # continues at epoch 2

The example follows Ray's own DeepSpeed example. There, every worker saves to a temporary directory, all of it is
uploaded, and only the same number of workers can resume. Here one call saves, commits and reports, and one call
restores; the rest is unchanged. The model is tiny and random, its data generated: replace them by ``from_pretrained``
and GLUE's MRPC.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

WORDS, LENGTH, PAIRS, BATCH = 32, 12, 96, 12

DEEPSPEED = {
    "train_batch_size": BATCH,  # of all workers together
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "torch_adam": True}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "gradient_clipping": 1.0,
}


def pairs() -> list[dict[str, Any]]:
    """Pairs of sentences of token numbers, and whether the second repeats the first."""
    import numpy as np

    draw = np.random.default_rng(0)
    rows = []
    for number in range(PAIRS):
        first = draw.integers(3, WORDS, LENGTH // 2 - 2)
        same = number % 2
        second = first if same else draw.integers(3, WORDS, len(first))
        rows.append({"input_ids": np.concatenate([[1], first, [2], second, [2]]), "label": same})
    return rows


def batches(data: str, epoch: int, rank: int, workers: int) -> Any:
    """This worker's batches of an epoch, from a plain DataLoader or from Ray Data."""
    import ray.train
    import torch

    if data == "ray":
        yield from ray.train.get_dataset_shard("train").iter_torch_batches(
            batch_size=BATCH // workers, drop_last=True, local_shuffle_buffer_size=PAIRS, local_shuffle_seed=epoch
        )
        return
    rows = pairs()
    sampler: Any = torch.utils.data.DistributedSampler(rows, workers, rank, seed=0)
    sampler.set_epoch(epoch)
    yield from torch.utils.data.DataLoader(rows, BATCH // workers, sampler=sampler, drop_last=True)


def train_func(config: dict[str, Any]) -> None:
    """Fine-tune; runs on every worker."""
    import deepspeed
    import ray.train
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    from ckpttool.integrations import ray_train

    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled first
    deepspeed.init_distributed()
    rank, workers = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()

    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
            num_labels=2,
        )
    )
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=DEEPSPEED)

    state = ray_train.restore(engine) or {"epoch": 0}
    for epoch in range(state["epoch"], config["epochs"]):
        total = torch.zeros(2, device=engine.device)
        for batch in batches(config["data"], epoch, rank, workers):
            inputs, labels = batch["input_ids"].to(engine.device), batch["label"].to(engine.device)
            found = engine(input_ids=inputs, labels=labels)
            engine.backward(found.loss)
            engine.step()
            total += torch.stack([found.loss.detach().float(), torch.ones_like(total[0])])
        torch.distributed.all_reduce(total)
        metrics = {"epoch": epoch, "loss": float(total[0] / total[1]), "workers": workers}
        ray_train.report(engine, metrics, client_state={"epoch": epoch + 1})


def main() -> None:
    """Run on this machine, or on the cluster of RAY_ADDRESS."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", required=True, help="directory or URL that all workers reach")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--data", choices=("loader", "ray"), default="loader")
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()

    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(log_to_driver=False)
    storage = options.storage if "://" in options.storage else os.path.abspath(options.storage)
    result = TorchTrainer(
        train_func,
        train_loop_config={"epochs": options.epochs, "data": options.data},
        scaling_config=ScalingConfig(
            num_workers=options.workers,
            use_gpu=options.gpu,
            resources_per_worker={"GPU": 1} if options.gpu else {"CPU": 0.5},
        ),
        run_config=RunConfig(
            name="pairs",
            storage_path=storage,
            failure_config=FailureConfig(max_failures=2),
            checkpoint_config=CheckpointConfig(
                num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min"
            ),
        ),
        datasets={"train": ray.data.from_items(pairs())} if options.data == "ray" else None,
    ).fit()
    for checkpoint, metrics in result.best_checkpoints:
        print(f"epoch {metrics['epoch']:.0f}: loss {metrics['loss']:.4f}, {checkpoint.path}")


if __name__ == "__main__":
    main()
