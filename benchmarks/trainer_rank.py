"""One rank of ``trainer.py``: a Trainer at ZeRO-3 that saves in different ways, and reports the time of each."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed as dist
from measure import keep
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ckpttool.integrations.huggingface import CkptCallback

if TYPE_CHECKING:
    from collections.abc import Callable

WORDS = 512
BLOCKING = "callback, blocking"


def build(directory: Path, parameters: int, width: int) -> Any:
    """Train a model with a number of parameters for two steps; the Trainer gathers weights unless a callback prevents
    it.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=2,
        save_strategy="no",
        per_device_train_batch_size=1,
        use_cpu=True,
        ddp_backend="gloo",
        bf16=True,
        optim="adamw_torch",
        report_to=[],
        disable_tqdm=True,
        deepspeed={
            "train_micro_batch_size_per_gpu": "auto",
            "bf16": {"enabled": "auto"},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        },
    )
    a_layer = 4 * width * width + 3 * width * 4 * width
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=width // 32,
        num_hidden_layers=max(1, parameters // a_layer),
        max_position_embeddings=16,
    )
    line = torch.arange(16)
    data = [{"input_ids": line, "labels": line}] * (2 * dist.get_world_size() if dist.is_initialized() else 8)
    trainer = Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=data)
    trainer.train()
    return trainer


def timed(function: Callable[[], Any]) -> float:
    """Seconds until all ranks have done it."""
    dist.barrier()
    began = time.perf_counter()
    function()
    dist.barrier()
    return time.perf_counter() - began


def save(trainer: Any, callback: CkptCallback | None) -> tuple[float, float]:
    """Return the seconds of a save, and until it and its export are done; removes it."""
    trainer.state.global_step += 1
    if callback is not None:
        trainer.add_callback(callback)
    seconds = timed(lambda: trainer._save_checkpoint(trainer.model, None))
    rest = timed(callback.wait) if callback is not None else 0.0
    if callback is not None:
        trainer.remove_callback(callback)
    if dist.get_rank() == 0:
        shutil.rmtree(Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}")
    dist.barrier()
    return seconds, seconds + rest


def main() -> None:
    """Measure the ways in turn; every second round in the reverse order, after a round to warm up."""
    given, directory = json.loads(sys.argv[1]), Path(sys.argv[2])
    trainer = build(directory, given["parameters"], given["width"])
    ways: dict[str, CkptCallback | None] = {
        "the Trainer's own save, 16-bit weights gathered": None,
        BLOCKING: CkptCallback(),
        "callback, in the background": CkptCallback(async_save=True),
        "callback, in the background, weights exported": CkptCallback(async_save=True, export_every=1),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for run in range(given["runs"] + 1):
        for name, callback in list(ways.items())[:: -1 if run % 2 else 1]:
            found = save(trainer, callback)
            if run or not given["runs"] - 1:
                taken[name].append(found)
    if os.environ["RANK"] != "0":
        return
    keep(
        f"zero3, {dist.get_world_size()} ranks, {given['parameters'] // 10**6}M",
        BLOCKING,
        {name: {"wall": [waited for waited, _ in values]} for name, values in taken.items()},
    )
    own = statistics.median(seconds for seconds, _ in taken[next(iter(ways))])
    print("::")
    for name, values in taken.items():
        waited, done = (statistics.median(column) for column in zip(*values, strict=True))
        low, high = min(one for one, _ in values), max(one for one, _ in values)
        print(
            f"{name:<50} {waited:7.2f} s ({low:.2f} to {high:.2f})  {own / waited:5.1f}x faster  done in {done:.2f} s"
        )


if __name__ == "__main__":
    main()
