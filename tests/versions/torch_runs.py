"""Saves of torch runs under other releases of torch: each release reads and continues the saves of each.

    PYTHON -m tests.versions.torch_runs save DIRECTORY [MESH ...]
    PYTHON -m tests.versions.torch_runs load DIRECTORY [MESH ...]

The first command trains a small model on every mesh and saves it; the second one loads the saves with the functions of
torch alone, on the same mesh, and with ckpttool on another mesh. PYTHON needs ckpttool and any torch from 2.6 on.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import multiprocessing, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckpttool

MESHES = {"plain": 1, "ddp": 2, "fsdp": 3, "hsdp": 4, "tp": 2, "fsdp-tp": 4}
"""Ranks of each mesh."""
OTHER = {"plain": "fsdp", "ddp": "hsdp", "fsdp": "plain", "hsdp": "fsdp", "tp": "fsdp-tp", "fsdp-tp": "ddp"}
"""The mesh that continues the save of each."""
STEPS = 3
OLD = torch.__version__ < "2.7"
"""Whether FSDP2 of this release cannot train on a CPU: its streams are those of CUDA."""


class Model(nn.Module):  # type: ignore[misc]  # torch is not followed
    """A model with a buffer, and frozen and tied parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 12)
        self.up = nn.Linear(12, 16)
        self.down = nn.Linear(16, 12)
        self.norm = nn.LayerNorm(12)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.head = nn.Linear(12, 17, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Any) -> Any:
        self.seen += 1
        hidden = self.embedding(tokens)
        return self.head(self.norm(self.frozen(hidden + self.down(torch.relu(self.up(hidden))))))


def _built(mesh: str, seed: int) -> tuple[Any, Any, Any]:
    """Return the model as it is called, the model inside, and its optimizer."""
    torch.manual_seed(seed)
    inner = Model()
    model: Any = inner
    ranks = MESHES[mesh]
    if mesh == "ddp":
        model = nn.parallel.DistributedDataParallel(inner, broadcast_buffers=False)
    elif mesh != "plain":
        names = ("dp", "tp") if "tp" in mesh else ("replicate", "shard")
        shape = {"fsdp": (1, ranks), "tp": (1, ranks)}.get(mesh, (2, ranks // 2))
        device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        if "tp" in mesh:
            parallelize_module(inner, device_mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if mesh != "tp":
            own = {"hsdp": device_mesh, "fsdp": device_mesh["shard"] if mesh == "fsdp" else None}.get(mesh)
            fully_shard(inner, mesh=device_mesh["dp"] if own is None else own)
    trained = [p for p in inner.parameters() if p.requires_grad]
    return model, inner, torch.optim.AdamW(trained, lr=0.01)


def _train(run: tuple[Any, Any, Any], steps: range) -> list[float]:
    """Train on the same tokens on all ranks; where FSDP2 needs a GPU, with made gradients and without losses."""
    model, inner, optimizer = run
    losses = []
    for step in steps:
        if OLD and isinstance(inner, FSDPModule):
            for number, parameter in enumerate(p for p in inner.parameters() if p.requires_grad):
                parameter.grad = torch.full_like(parameter, (number + 1) * (step - 1.5))
        else:
            tokens = torch.randint(0, 17, (2, 6), generator=torch.Generator().manual_seed(step))
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _held(run: tuple[Any, Any, Any]) -> dict[str, Any]:
    """Return all tensors of a run, whole, by "KEY/NAME"."""
    _, inner, optimizer = run
    found = {f"weights/{name}": value for name, value in inner.state_dict().items()}
    for name, parameter in inner.named_parameters():
        found |= {f"{key}/{name}": value for key, value in optimizer.state.get(parameter, {}).items()}
    whole = {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in found.items()}
    return {key: value.detach().clone() for key, value in whole.items()}


def _check(held: dict[str, Any], truth: dict[str, Any], where: str) -> None:
    assert held.keys() == truth.keys(), (where, held.keys() ^ truth.keys())
    for name, value in truth.items():
        assert torch.equal(held[name], value), (where, name)


def _save(mesh: str, directory: Path) -> None:
    run = _built(mesh, 1)
    _train(run, range(STEPS))
    truth = _held(run)
    ckpttool.CheckpointManager(directory / mesh).save(run[0], optimizer=run[2], step=STEPS)
    losses = _train(run, range(STEPS, 2 * STEPS))
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save({"held": truth, "losses": losses, "release": torch.__version__}, directory / f"{mesh}.truth")


def _load_with_torch(mesh: str, directory: Path) -> None:
    truth = torch.load(directory / f"{mesh}.truth", weights_only=False)
    run = _built(mesh, 2)
    _, inner, optimizer = run
    state = {"model": get_model_state_dict(inner), "optim": get_optimizer_state_dict(inner, optimizer)}
    other = truth["release"] != torch.__version__  # whose optimizers may lack an option
    planner = DefaultLoadPlanner(allow_partial_load=other)
    dcp.load(state, checkpoint_id=directory / mesh / f"step-{STEPS}", planner=planner)
    set_model_state_dict(inner, state["model"])
    set_optimizer_state_dict(inner, optimizer, state["optim"])
    _check(_held(run), truth["held"], f"{mesh} by torch")
    _check_losses(run, truth, exact=not other)


def _load_with_ckpttool(mesh: str, directory: Path) -> None:
    truth = torch.load(directory / f"{mesh}.truth", weights_only=False)
    run = _built(OTHER[mesh], 3)
    ckpttool.CheckpointManager(directory / mesh).restore(run[0], optimizer=run[2], prove=True)
    _check(_held(run), truth["held"], f"{mesh} on {OTHER[mesh]}")
    _check_losses(run, truth, exact=False)


def _check_losses(run: tuple[Any, Any, Any], truth: dict[str, Any], *, exact: bool) -> None:
    losses = _train(run, range(STEPS, 2 * STEPS))
    if losses and truth["losses"]:  # not where FSDP2 needs a GPU
        pairs = zip(losses, truth["losses"], strict=True)
        assert all(abs(a - b) <= (0.0 if exact else 1e-5) for a, b in pairs), (losses, truth["losses"])


def _rank(rank: int, ranks: int, store: str, work: Any, mesh: str, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    work(mesh, directory)
    dist.destroy_process_group()


def run(command: str, directory: Path, meshes: list[str]) -> None:
    """Save or load on every mesh, each in processes of its own.

    Raises:
        Exception: A rank has failed.
    """
    jobs: Any = {"save": [(_save, {})], "load": [(_load_with_torch, {}), (_load_with_ckpttool, OTHER)]}[command]
    for mesh in meshes:
        for work, on in jobs:
            ranks = MESHES[on.get(mesh, mesh)]
            with tempfile.TemporaryDirectory() as scratch:
                store = os.path.join(scratch, "store")
                multiprocessing.spawn(_rank, (ranks, store, work, mesh, directory), nprocs=ranks)


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), sys.argv[3:] or list(MESHES))
    print(f"torch {torch.__version__}, {sys.argv[1]}: every tensor is right")
