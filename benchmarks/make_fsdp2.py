"""Train one step of a Llama under FSDP2 on the ranks of torchrun, and save it as verl, the Trainer and transformers do.

torchrun --nproc_per_node 4 benchmarks/make_fsdp2.py OUT large
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tokenizers import Tokenizer, models
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SIZES = {"large": (32000, 1024, 2816, 14), "small": (8000, 512, 1408, 5), "tiny": (131, 32, 40, 2)}
"""Vocabulary, hidden and intermediate size, and layers; the largest has 245M parameters."""


def main() -> None:
    """Train and save."""
    out, scale = Path(sys.argv[1]), sys.argv[2]
    vocabulary, hidden, intermediate, layers = SIZES[scale]
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        architectures=["LlamaForCausalLM"],
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(16)[None] % vocabulary
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()

    verl, trainer, shards = out / "verl/global_step_1/actor", out / "trainer/checkpoint-1", out / "shards"
    for path in (verl / "huggingface", trainer, shards):
        path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    torch.save(model.state_dict(), verl / f"model_world_size_{ranks}_rank_{rank}.pt")
    torch.save(optimizer.state_dict(), verl / f"optim_world_size_{ranks}_rank_{rank}.pt")
    torch.save({"lr_scheduler": None}, verl / f"extra_state_world_size_{ranks}_rank_{rank}.pt")
    weights, states = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    dcp.save({"model": weights}, checkpoint_id=str(trainer / "pytorch_model_fsdp_0"))
    dcp.save({"optimizer": states}, checkpoint_id=str(trainer / "optimizer_0"))
    dcp.save(weights, storage_writer=dcp.HuggingFaceStorageWriter(str(shards), save_distributed=True))
    if rank == 0:
        (verl / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
        config.save_pretrained(verl / "huggingface")
        words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))  # noqa: S106  a word
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(verl / "huggingface")
        config.save_pretrained(shards)
        (out / "done").touch()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
