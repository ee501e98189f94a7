"""Weights beside a numbered optimizer, saved by torch and safetensors alone, in the order of the live optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool.errors import ContainerError, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class _Model(torch.nn.Module):  # type: ignore[misc]
    """Two equal matrices, a tied one, a frozen one, and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.third = (torch.nn.Linear(4, 4) for _ in range(3))
        self.third.weight = self.first.weight
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.register_buffer("seen", torch.full((3,), float(seed)))


def _groups(model: _Model) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def _reversed(model: _Model) -> list[dict[str, Any]]:
    return _groups(model)[::-1]


def _in_one(model: _Model) -> list[torch.nn.Parameter]:
    return [p for group in _groups(model) for p in group["params"]]


def _mixed(model: _Model) -> list[dict[str, Any]]:
    first = [model.second.bias, model.first.weight]
    return [{"params": first}, {"params": [model.second.weight, model.first.bias, model.third.bias]}]


def _saved(folder: Path, prefix: str = "") -> tuple[_Model, torch.optim.Optimizer]:
    """Train a model, and save it as Accelerate does."""
    model = _Model(1)
    optimizer = torch.optim.AdamW(_groups(model), lr=0.01)
    for n in range(3):
        for parameter in _in_one(model)[n:]:  # the first ones are updated less often
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    folder.mkdir()
    weights = {
        f"{prefix}{name}": tensor.clone() for name, tensor in model.state_dict().items() if "third.w" not in name
    }
    save_file(weights, folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    return model, optimizer


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_load_gives_the_states_that_torch_gives(tmp_path: Path, prefix: str) -> None:
    _, optimizer = _saved(tmp_path / "saved", prefix)
    model = _Model(1)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    own = torch.optim.AdamW(_groups(model), lr=0.5)
    report = ckpttool.load(model, tmp_path / "saved", optimizer=own)
    assert any("read in the order of the live optimizer" in note for note in report.notes)
    known, found = optimizer.state_dict(), own.state_dict()
    assert found["param_groups"] == known["param_groups"]
    assert found["state"].keys() == known["state"].keys()
    for number, states in known["state"].items():
        for key, value in states.items():
            assert torch.equal(found["state"][number][key], value)
            assert found["state"][number][key].dtype == value.dtype
    truth = {name.removeprefix(prefix): value for name, value in _file(tmp_path / "saved").items()}
    assert all(torch.equal(model.state_dict()[name], value) for name, value in truth.items())


def _file(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("groups", [_reversed, _in_one, _mixed])
def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path, groups: Callable[[_Model], Any]) -> None:
    _saved(tmp_path / "saved")
    model = _Model(2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PlanError, match="it numbers other parameters than the optimizer has"):
        ckpttool.load(model, tmp_path / "saved", optimizer=torch.optim.AdamW(groups(model)))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_several_optimizers_are_refused_and_weights_alone_are_loaded(tmp_path: Path) -> None:
    saved, optimizer = _saved(tmp_path / "saved")
    torch.save(optimizer.state_dict(), tmp_path / "saved" / "optimizer_1.bin")
    model = _Model(2)
    with pytest.raises(PlanError, match="numbers other parameters"):
        ckpttool.load(model, tmp_path / "saved", optimizer=torch.optim.AdamW(_groups(model)))
    ckpttool.load(model, tmp_path / "saved", weights_only=True)
    assert torch.equal(model.second.weight, saved.second.weight)


def test_an_optimizer_that_is_cut_off_is_named(tmp_path: Path) -> None:
    _saved(tmp_path / "saved")
    file = tmp_path / "saved" / "optimizer.bin"
    file.write_bytes(file.read_bytes()[:-100])
    model = _Model(2)
    with pytest.raises(ContainerError, match=r"optimizer\.bin: is cut off"):
        ckpttool.load(model, tmp_path / "saved", optimizer=torch.optim.AdamW(_groups(model)))
