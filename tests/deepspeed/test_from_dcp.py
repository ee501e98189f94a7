"""Other formats with an optimizer (DCP, safetensors, files of FSDP2) become ZeRO checkpoints that real engines load."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch

import ckpttool
from tests.deepspeed_engines import Load, Loaded, load_all
from tests.truth import HERE, source, truth

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.deepspeed
Dtype = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class Case:
    source: str
    """The bundled checkpoint that was converted; "torch" for a DCP that torch itself wrote."""
    stage: int
    world_size: int
    dtype: Dtype = "bf16"
    model: str = "plain"
    """See ``parallel_engines``."""
    way: Literal["dcp", "safetensors", "verl", "accelerate"] = "dcp"

    @property
    def id(self) -> str:
        return f"{self.source}-{self.way}-to-zero{self.stage}-dp{self.world_size}"


CASES = [
    Case("zero2-dp2-bf16", 1, 2),
    Case("zero3-dp4-bf16", 2, 1),
    Case("zero1-dp2-fp16", 2, 2, "fp16"),
    Case("zero3-dp2-fp32", 1, 2, "fp32"),
    Case("autotp-zero1-tp2-dp2-bf16", 3, 2, model="autotp"),
    Case("torch", 2, 2),
    Case("zero2-dp2-bf16", 3, 2, way="safetensors"),
    Case("zero3-dp4-bf16", 2, 1, way="safetensors"),
    Case("zero2-dp2-bf16", 3, 2, way="verl"),
    Case("zero3-dp4-bf16", 2, 1, way="accelerate"),
]


@dataclass(frozen=True)
class Expected:
    tensors: dict[str, torch.Tensor]
    groups: list[dict[str, Any]]
    steps: int


def _trained_by_torch(directory: Path) -> Expected:
    """Train the odd model with torch alone and save it as FSDP users do; returns what the optimizer held."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    sys.path.insert(0, str(HERE))
    from recipes import plain

    torch.manual_seed(99)
    model: Any = plain.build_model()
    optimizer = torch.optim.AdamW(plain.param_groups(model), betas=(0.9, 0.95))
    tokens = torch.arange(12).reshape(2, 6)
    for _ in range(2):
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states, "epoch": 3}, checkpoint_id=str(directory), no_dist=True)
    persistent = model.state_dict()
    held = {f"buffer/{n}": b for n, b in model.named_buffers() if n in persistent}
    for name, p in model.named_parameters():
        held[f"module/{name}"] = p.detach().bfloat16() if p.requires_grad else p.detach()
        if p.requires_grad:
            held |= {f"{key}/{name}": optimizer.state[p][key] for key in ("exp_avg", "exp_avg_sq")}
            held[f"fp32/{name}"] = p.detach()
    return Expected(held, [{**group, "betas": list(group["betas"])} for group in optimizer.param_groups], 2)


def _trained_by_deepspeed(name: str) -> Expected:
    return Expected(truth(name).tensors, truth(name).facts["groups"], truth(name).facts["global_steps"])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Loaded], Expected]:
    """What live engines held after loading each conversion, and what torch's optimizer held."""
    directory = tmp_path_factory.mktemp("from-dcp")
    with pytest.warns(UserWarning, match="torch.distributed"):
        trained = _trained_by_torch(directory / "torch-dcp")
    loads = []
    for case in CASES:
        between, root = directory / f"{case.source}-{case.way}", directory / case.id
        if case.way == "safetensors":
            ckpttool.consolidate(source(case.source), between, to="safetensors", optimizer=True, prove=True)
        elif case.way in {"verl", "accelerate"}:
            layout: Any = case.way
            ckpttool.convert(source(case.source), between, to="ranks", layout=layout, world_size=3, prove=True)
        elif case.source != "torch":
            ckpttool.convert(source(case.source), between, to="dcp", prove=True)
        dtype = None if case.way == "safetensors" else case.dtype
        ckpttool.convert(
            between, root, to="zero", world_size=case.world_size, stage=case.stage, dtype=dtype, prove=True
        )
        loads.append(Load(case.id, str(root), case.stage, case.world_size, dtype=case.dtype, model=case.model))
    ckpttool.convert(directory / "torch-dcp", directory / "universal", to="universal", prove=True)
    loads += [Load(f"universal{n}", str(directory / "universal"), n, 2, model="plain", universal=True) for n in (1, 3)]
    return load_all(loads), trained


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_live_engine_holds_what_the_optimizer_held(case: Case, loaded: tuple[dict[str, Loaded], Expected]) -> None:
    engine = loaded[0][case.id]
    expected = loaded[1] if case.source == "torch" else _trained_by_deepspeed(case.source)
    assert engine.error == ""
    assert engine.facts["step"] == ""
    assert engine.tensors.keys() == expected.tensors.keys()
    for key, tensor in expected.tensors.items():
        held = engine.tensors[key]
        # Of torch's run, which was in fp32, the engine casts what is frozen.
        kept = tensor.to(held.dtype) if key.startswith("module/") else tensor
        assert held.dtype == kept.dtype, key
        assert torch.equal(held, kept), key
    assert engine.facts["global_steps"] == expected.steps
    assert engine.facts["scalars"] == [{"step": expected.steps}] * len(expected.groups)
    for group, kept_group in zip(engine.facts["groups"], expected.groups, strict=True):
        for key in ("lr", "weight_decay", "betas", "eps"):
            assert group[key] == kept_group[key], key


@pytest.mark.parametrize("stage", [1, 3])
def test_it_becomes_a_universal_checkpoint_too(stage: int, loaded: tuple[dict[str, Loaded], Expected]) -> None:
    engine, expected = loaded[0][f"universal{stage}"], loaded[1]
    assert (engine.error, engine.facts["step"]) == ("", "")
    for key, tensor in expected.tensors.items():
        if not key.startswith(("module/", "buffer/")):
            assert torch.equal(engine.tensors[key], tensor), key
    assert engine.facts["scalars"] == [{"step": expected.steps}] * len(expected.groups)
