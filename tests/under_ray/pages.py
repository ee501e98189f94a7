"""The scripts of Ray's pages, with tiny models: as they are documented, and changed as our documentation says.

Source: Ray 2.60, "Get Started with DeepSpeed" (python/ray/train/examples/deepspeed) and the template "Getting Started
with DeepSpeed ZeRO and Ray Train".
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

from tests.under_ray.loops import digest_of, note


def _start() -> None:
    import deepspeed
    import torch

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    torch.manual_seed(0)


def _note(config: dict[str, Any], engine: Any, restored: str, state: Any) -> None:
    import ray.train

    found = {"restored": restored, "state": state, "saved": digest_of(engine, odd=False)}
    if ray.train.get_context().get_world_rank() == 0:
        note(config["facts"], f"{config['script']} {config['turn']}.json", found)


def page(config: dict[str, Any]) -> None:
    """The BERT of Ray's page: the loop steps the optimizer and the scheduler, and not the engine."""
    import deepspeed
    import ray.train
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    from ckpttool.integrations import ray_train

    _start()
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(vocab_size=32, max_position_embeddings=12, **sizes))
    settings = {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}, "zero_optimization": {"stage": 3},
    }  # fmt: skip
    model, optimizer, _, lr_scheduler = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings
    )
    ours, state = config["way"] == "ours", None
    if ours:
        state = ray_train.restore(model)
    elif checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as directory:
            model.load_checkpoint(directory)
    restored = digest_of(model, odd=False)
    for epoch in range(2):
        for number in range(3):
            ids = torch.arange(number, number + 32).reshape(4, 8) % 32
            loss = model(input_ids=ids, labels=torch.tensor([0, 1, 0, 1])).loss
            model.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        assert model.global_steps == 0
        metrics = {"epoch": epoch, "f1": 0.5}
        if ours:
            ray_train.report(model, metrics, client_state={"epoch": epoch + 1})
            continue
        with tempfile.TemporaryDirectory() as directory:
            model.save_checkpoint(directory)
            torch.distributed.barrier()
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(directory))
    _note(config, model, restored, state)


def template(config: dict[str, Any]) -> None:
    """The causal language model of the template, which saves to a folder of the checkpoint."""
    import deepspeed
    import ray.train
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ckpttool.integrations import ray_train

    _start()
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=12, **sizes))
    settings = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ds_engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    ours, state = config["way"] == "ours", None
    if ours:
        state = ray_train.restore(ds_engine)
    elif checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as directory:
            inner = os.path.join(directory, "epoch")
            ds_engine.load_checkpoint(inner if os.path.isdir(inner) else directory)
    restored = digest_of(ds_engine, odd=False)
    for epoch in range(2):
        for number in range(2):
            ids = torch.arange(number, number + 8).reshape(1, 8) % 32
            loss = ds_engine(input_ids=ids, labels=ids, use_cache=False).loss
            ds_engine.backward(loss)
            ds_engine.step()
        metrics = {"loss": float(loss.detach()), "epoch": epoch}
        if ours:
            ray_train.report(ds_engine, metrics, client_state={"epoch": epoch + 1})
            continue
        with tempfile.TemporaryDirectory() as directory:
            inner = os.path.join(directory, "epoch")
            os.makedirs(inner, exist_ok=True)
            ds_engine.save_checkpoint(inner)
            torch.distributed.barrier()
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(directory))
    _note(config, ds_engine, restored, state)
