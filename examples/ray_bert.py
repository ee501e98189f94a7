"""Fine-tune a BERT for pairs of sentences with ZeRO-3 under Ray Train, as Ray's page "Get Started with DeepSpeed".

ray_bert_documented.py saves as that page does. ray_bert.py saves with ckpttool, and resumes on any number of workers:

    python examples/ray_bert.py --storage run --workers 2 --epochs 2
    python examples/ray_bert.py --storage run --workers 3 --epochs 4 --data ray

The model is tiny and random, its data generated: replace them by ``from_pretrained`` and GLUE's MRPC. As on that page,
the loop steps the optimizer and the scheduler, not the engine.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from ckpttool.integrations import ray_train

WORDS, LENGTH, PAIRS, BATCH = 32, 12, 48, 4

MODEL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
DEEPSPEED = {
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "gradient_clipping": 1.0,
    "train_micro_batch_size_per_gpu": BATCH,
}


def pairs(seed: int) -> list[dict[str, Any]]:
    """Pairs of sentences of token numbers, and whether the second repeats the first."""
    draw = np.random.default_rng(seed)
    rows = []
    for number in range(PAIRS):
        first = draw.integers(3, WORDS, LENGTH // 2 - 2)
        second = first if number % 2 else draw.integers(3, WORDS, len(first))
        rows.append({"input_ids": np.concatenate([[1], first, [2], second, [2]]), "labels": number % 2})
    return rows


def use_gloo() -> None:
    """Without a GPU: let DeepSpeed share no memory, which it would have to compile first."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def train_func(config: dict[str, Any]) -> None:
    """Fine-tune; runs on every worker."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from transformers import BertConfig, BertForSequenceClassification, set_seed

    if not torch.cuda.is_available():
        use_gloo()
    set_seed(42)
    model = BertForSequenceClassification(BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **MODEL))
    model, optimizer, _, lr_scheduler = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=DEEPSPEED
    )
    training: Any
    validation: Any
    if config["data"] == "ray":
        training = ray.train.get_dataset_shard("train").iter_torch_batches(batch_size=BATCH, drop_last=True)
        validation = ray.train.get_dataset_shard("validation").iter_torch_batches(batch_size=BATCH)
    else:  # in this process: one that is forked from a worker of Ray may hang
        training = model.deepspeed_io(pairs(0), num_local_io_workers=0)
        validation = torch.utils.data.DataLoader(pairs(1), BATCH)
    device = get_accelerator().device_name(model.local_rank)

    state = ray_train.restore(model) or {}
    for epoch in range(state.get("epoch", -1) + 1, config["epochs"]):
        model.train()
        for batch in training:
            loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
            model.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

        model.eval()
        right = torch.zeros(2, device=device)
        for batch in validation:
            with torch.no_grad():
                found = model(input_ids=batch["input_ids"].to(device)).logits.argmax(-1).cpu()
            right += torch.tensor([(found == batch["labels"].cpu()).sum(), len(found)], device=device)
        torch.distributed.all_reduce(right)
        metrics = {"accuracy": float(right[0] / right[1])}
        if model.global_rank == 0:
            print(f"epoch {epoch}:", metrics)

        ray_train.report(model, metrics, client_state={"epoch": epoch})


def main() -> None:
    """Run on this machine, or on the cluster of RAY_ADDRESS."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", required=True, help="directory or URL that all workers reach")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--data", choices=("loader", "ray"), default="loader")
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()

    ray.init(log_to_driver=False)
    storage = options.storage if "://" in options.storage else os.path.abspath(options.storage)
    of_ray = {"train": ray.data.from_items(pairs(0)), "validation": ray.data.from_items(pairs(1))}
    result = TorchTrainer(
        train_func,
        train_loop_config={"epochs": options.epochs, "data": options.data},
        scaling_config=ScalingConfig(
            num_workers=options.workers,
            use_gpu=options.gpu,
            resources_per_worker={"GPU": 1} if options.gpu else {"CPU": 0.5},
        ),
        run_config=RunConfig(name="bert", storage_path=storage, failure_config=FailureConfig(max_failures=2)),
        datasets=of_ray if options.data == "ray" else None,
    ).fit()
    for checkpoint, metrics in result.best_checkpoints:
        print(f"accuracy {metrics['accuracy']:.2f}: {checkpoint.path}")


if __name__ == "__main__":
    main()
