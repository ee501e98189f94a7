"""Weights of any checkpoint as torch tensors, without DeepSpeed."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

import ckpttool
from ckpttool import PlanError
from ckpttool.errors import ArgumentError
from tests.truth import REPRESENTATIVE, source
from tests.wording import refused

if TYPE_CHECKING:
    from pathlib import Path

NAME = "zero3-dp4-bf16"


def _model() -> Any:
    from torch import nn

    model = nn.Module()
    model.up = nn.Linear(18, 37)
    model.tiny = nn.Parameter(torch.zeros(3))
    return model


@pytest.mark.parametrize("name", REPRESENTATIVE)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_tensor_is_what_consolidate_writes(name: str, dtype: Any, tmp_path: Path) -> None:
    weights = ckpttool.load_state_dict(source(name), dtype=dtype)
    ckpttool.consolidate(source(name), tmp_path, to="safetensors", dtype=dtype)
    expected = load_file(str(tmp_path / "model.safetensors"))
    assert {*expected} <= {*weights}
    for key, tensor in expected.items():
        assert weights[key].dtype == tensor.dtype
        assert torch.equal(weights[key], tensor)
        assert weights.shapes()[key] == tuple(tensor.shape)


def test_tied_names_give_one_tensor() -> None:
    weights = ckpttool.load_state_dict(source(NAME))
    embed = weights["embed.weight"]
    assert weights["head.weight"] is embed
    assert weights["up.weight"] is not weights["up.weight"]


def test_a_module_takes_it_as_a_state_dict() -> None:
    model = _model()
    weights = ckpttool.load_state_dict(source(NAME), include=["up.*", "tiny"], dtype=torch.float32)
    assert str(model.load_state_dict(weights)) == "<All keys matched successfully>"
    again = _model()
    assert weights.load_into(again) == ([], [])
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[key])
        assert torch.equal(tensor, again.state_dict()[key])


def test_a_misfit_with_a_module_is_an_error_before_any_change() -> None:
    model = _model()
    before = {k: t.clone() for k, t in model.state_dict().items()}
    weights = ckpttool.load_state_dict(source(NAME))
    with refused(PlanError):
        weights.load_into(model)
    model.more = torch.nn.Parameter(torch.zeros(2))
    with refused(PlanError):
        weights.load_into(model)
    model.tiny = torch.nn.Parameter(torch.zeros(4))
    with refused(PlanError):
        weights.load_into(model, strict=False)
    assert all(torch.equal(model.state_dict()[k], t) for k, t in before.items() if k != "tiny")
    with refused(PlanError):
        weights.load_into(_model().to("meta"), strict=False)
    del model.tiny
    missing, unexpected = weights.load_into(model, strict=False)
    assert missing == ["more"]
    assert "tiny" in unexpected
    assert torch.equal(model.up.weight, weights["up.weight"])


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", torch.bfloat16])
def test_torchs_names_of_types_mean_the_short_ones(dtype: Any, tmp_path: Path) -> None:
    weights = ckpttool.load_state_dict(source(NAME), dtype=dtype)
    assert weights["up.weight"].dtype == torch.bfloat16
    report = ckpttool.consolidate(source(NAME), tmp_path / "weights", to="safetensors", dtype=dtype)
    assert report.dtype == "bf16"
    ckpttool.convert(tmp_path / "weights", tmp_path / "zero", to="zero", stage=2, world_size=2, dtype=dtype)
    states = {state.dtype for _, key, state in ckpttool.inspect(tmp_path / "zero").states() if key == "module"}
    assert "BF16" in states


def test_wrong_dtypes_and_names() -> None:
    with refused(ArgumentError):
        ckpttool.load_state_dict(source(NAME), dtype=torch.int8)
    with pytest.raises(KeyError):
        ckpttool.load_state_dict(source(NAME))["no such"]


def test_neither_torch_nor_deepspeed_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, ckpttool\n"
        f"weights = ckpttool.load_state_dict({source(NAME)!r})\n"
        "ckpttool.load, ckpttool.LoadReport\n"
        "assert not {'torch', 'deepspeed'} & {*sys.modules}\n"
        "weights['up.bias']\n"
        "assert 'deepspeed' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
