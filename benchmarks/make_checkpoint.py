"""Make a large checkpoint with real DeepSpeed, for benchmarks: ``torchrun make_checkpoint.py ROOT STAGE LAYERS``.

A plain transformer's parameters (hidden size 1024, vocabulary 50,000 at 16 layers: 253M parameters, 10x less at one
tenth the size), bf16, AdamW, after one step, so that moments exist. "huge" (1.0B) has no moments: SGD, and a model made
in bf16, so that it fits into the memory of one machine.
"""

from __future__ import annotations

import sys

import deepspeed
import torch
from torch import nn

SIZES = {
    "large": (1024, 50_000, 16),
    "small": (512, 10_000, 6),
    "tiny": (16, 100, 2),
    "huge": (2048, 50_000, 18),
    "growth-1x": (512, 4_000, 4),
    "growth-4x": (512, 16_000, 16),
    "growth-16x": (512, 64_000, 64),
}
"""Hidden size, vocabulary, layers."""


class Block(nn.Module):
    """The matrices and norms of one layer; the computation does not matter here."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.norm_2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use every parameter once."""
        q, k, v = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        x = x + self.out(q * torch.sigmoid(k) * v)
        return x + self.down(torch.relu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """Embedding, blocks, head norm; no tied weights, which zero_to_fp32 cannot write as safetensors."""

    def __init__(self, hidden: int, vocabulary: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """A scalar to train on."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x).float().square().mean()


def main() -> None:
    """Train one step and save."""
    root, stage, scale = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    hidden, vocabulary, layers = SIZES[scale]
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    if scale == "huge":
        torch.set_default_dtype(torch.bfloat16)
    model = Model(hidden, vocabulary, layers)
    kind = torch.optim.SGD if scale == "huge" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-3)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    loss = engine(torch.randint(0, vocabulary, (1, 4)))
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(root)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
