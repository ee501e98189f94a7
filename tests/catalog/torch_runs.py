"""A saved torch run to make thin, and its weights as torch loads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp

from ckpttool import CheckpointManager

if TYPE_CHECKING:
    from pathlib import Path


def save(root: str) -> None:
    """Save the model of ``trained`` as step1."""
    model, optimizer = trained()
    CheckpointManager(root).save(model, optimizer=optimizer, step=1, tag="step1")


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model with buffers, a frozen and a tied parameter, after one step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
    model[2].bias.requires_grad_(False)
    model.register_parameter("tied", model[0].weight)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def rounded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Values of a model's tensors in a thin checkpoint of bf16, in the types of the model."""
    return {
        k: v.bfloat16().to(v.dtype) if "running" not in k and v.is_floating_point() else v for k, v in tensors.items()
    }


def loaded_by_torch(directory: Path, keys: tuple[str, ...] = ("model",)) -> dict[str, torch.Tensor]:
    """The model's tensors as ``torch.distributed.checkpoint`` loads them."""
    found = {name: torch.full_like(value, 7) for name, value in trained()[0].state_dict().items()}
    nested: dict[str, Any] = found
    for key in reversed(keys):
        nested = {key: nested}
    dcp.load(nested, checkpoint_id=directory, no_dist=True)
    return found


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def assert_loads(directory: Path, *, thin: bool, recovered: bool) -> None:
    """Check what torch loads: after the commit of a thin checkpoint the old weights, until it is recovered."""
    exact, loaded = trained()[0].state_dict(), loaded_by_torch(directory)
    old = not recovered and torch.equal(loaded["0.weight"], exact["0.weight"])
    assert_equal(loaded, rounded(exact) if thin and not old else exact)
