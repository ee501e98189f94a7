"""Train a causal language model with DeepSpeed under Ray Train; resume; turn it into weights, and generate with them.

    python examples/ray_causal_lm.py --storage run --workers 2 --epochs 2
    python examples/ray_causal_lm.py --storage run --workers 3 --epochs 3 --stage 3 --export out

The second continues at epoch 2 with another number of workers and another ZeRO stage. The model is tiny and random, its
data generated: replace them by ``from_pretrained`` and real text.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

WORDS, LENGTH, LINES, BATCH = 32, 16, 96, 12
MODEL = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def lines() -> Any:
    """Sequences that count upwards, each from another number on."""
    import torch

    return (torch.arange(LINES)[:, None] + torch.arange(LENGTH)) % (WORDS - 3) + 3


def train_func(config: dict[str, Any]) -> None:
    """Train; runs on every worker."""
    import deepspeed
    import ray.train
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ckpttool.integrations import ray_train

    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled first
    deepspeed.init_distributed()
    rank, workers = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    settings = {
        "train_batch_size": BATCH,  # of all workers together
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": config["stage"]},
        "gradient_clipping": 1.0,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    # Each checkpoint is written in the background, while the next epoch trains.
    with ray_train.RayTrainCheckpoints(blocking=False) as checkpoints:
        state = checkpoints.restore(engine) or {"epoch": 0}
        for epoch in range(state["epoch"], config["epochs"]):
            order = torch.randperm(LINES, generator=torch.Generator().manual_seed(epoch))
            total = torch.zeros((), device=engine.device)
            for start in range(0, LINES, BATCH):
                tokens = lines()[order[start : start + BATCH]][rank::workers].to(engine.device)
                loss = engine(input_ids=tokens, labels=tokens).loss
                engine.backward(loss)
                engine.step()
                total += loss.detach().float() * BATCH / LINES / workers
            torch.distributed.all_reduce(total)
            checkpoints.report(
                engine, {"epoch": epoch, "loss": float(total), "workers": workers}, client_state={"epoch": epoch + 1}
            )


def export(checkpoint: Any, out: str) -> None:
    """Convert a checkpoint to files for ``from_pretrained``, and generate with it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import ckpttool

    with checkpoint.as_directory() as directory:  # a URL would do as well, without a download
        written = ckpttool.consolidate(directory, out, to="safetensors", dtype="bf16")
    LlamaConfig(**MODEL, dtype="bfloat16").save_pretrained(out)
    print(f"exported {written.written.nbytes_written:,} bytes to {out}")
    model = LlamaForCausalLM.from_pretrained(out)
    begun = torch.tensor([[5, 6, 7, 8]])
    found = model.generate(begun, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(begun))
    print("generated", found[0].tolist())


def main() -> None:
    """Run on this machine, or on the cluster of RAY_ADDRESS."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", required=True, help="directory or URL that all workers reach")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--export", help="directory for the weights")
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()

    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(log_to_driver=False)
    storage = options.storage if "://" in options.storage else os.path.abspath(options.storage)
    result = TorchTrainer(
        train_func,
        train_loop_config={"epochs": options.epochs, "stage": options.stage},
        scaling_config=ScalingConfig(
            num_workers=options.workers,
            use_gpu=options.gpu,
            resources_per_worker={"GPU": 1} if options.gpu else {"CPU": 0.5},
        ),
        run_config=RunConfig(name="counting", storage_path=storage, failure_config=FailureConfig(max_failures=2)),
    ).fit()
    for _, metrics in result.best_checkpoints:
        print(f"epoch {metrics['epoch']:.0f} on {metrics['workers']} workers: loss {metrics['loss']:.4f}")
    if options.export:
        export(result.checkpoint, options.export)


if __name__ == "__main__":
    main()
