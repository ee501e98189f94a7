"""``verify`` accepts all of DeepSpeed's own saves, in many configurations."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckpttool
from tests import sampling
from tests.forked import each_on_ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.deepspeed

ADAPTER = "adapter"
"""A model whose frozen embedding is also its projection, saved without frozen parameters as trainers save adapters."""


@dataclass(frozen=True)
class Run:
    """One configuration."""

    stage: int
    world_size: int
    model: str = "odd"
    """"odd" (awkward shapes), "copies" (equal layers), "alike" (one value everywhere), "conv" or ADAPTER."""
    dtype: str = "bf16"
    optimizer: str = "adamw"
    steps: int = 3
    rate: float = 0.01
    zero: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    stepped: str = "engine"
    """"engine", or "optimizer" for a loop that calls ``optimizer.step()``, as the script of Ray's page does."""

    @property
    def id(self) -> str:
        """A name for it."""
        zero = "-".join(f"{key}={value}" for key, value in self.zero.items() if not isinstance(value, dict))
        parts = (f"zero{self.stage}", f"dp{self.world_size}", self.model, self.dtype, self.optimizer, self.stepped)
        return "-".join([*parts, f"{self.steps}steps", str(self.rate), str(self.accumulation), *filter(None, [zero])])


def _runs() -> list[Run]:
    runs = [
        Run(stage, ranks, model, steps=steps)
        for stage, ranks in ((1, 2), (2, 2), (2, 4), (3, 2), (3, 4))
        for model, steps in (("copies", 0), ("copies", 1), ("alike", 0), ("alike", 2))
    ]
    runs += [Run(stage, 2, "copies", steps=1, rate=0.0) for stage in (0, 1, 2, 3)]
    runs += [
        Run(stage, 2, "conv", optimizer=optimizer)
        for stage, optimizer in itertools.product((1, 2, 3), ("sgd", "momentum", "rmsprop", "adagrad"))
    ]
    runs += [
        Run(stage, ranks, dtype=dtype) for stage, ranks, dtype in itertools.product((0, 1, 3), (1, 3), ("fp16", "fp32"))
    ]
    runs += [
        Run(2, 3, zero={"round_robin_gradients": True}),
        Run(2, 2, zero={"overlap_comm": True, "contiguous_gradients": False}, accumulation=3),
        Run(3, 2, zero={"sub_group_size": 200}),
        Run(3, 4, "copies", zero={"sub_group_size": 64}, steps=2),
        Run(3, 2, zero={"stage3_param_persistence_threshold": 0}),
        Run(1, 4, "conv", accumulation=2),
        Run(2, 2, "copies", steps=5),
        Run(3, 3, "conv", steps=1),
    ]
    return runs


RUNS = _runs()
ADAPTER_RUNS = [Run(stage, 2, ADAPTER) for stage in (1, 2, 3)]
STEPPED_RUNS = [Run(stage, 2, stepped="optimizer") for stage in (1, 3)]
TRAINED = [*sampling.some(RUNS, 14), *ADAPTER_RUNS, *STEPPED_RUNS]


def _train(job: dict[str, Any], directory: Path) -> None:
    """Train and save; the checkpoint and ``truth.safetensors`` go to a directory of the run's id."""
    import deepspeed
    from recipes import common

    run: Run = job["run"]
    out = directory / run.id
    torch.manual_seed(5)
    model = _model(run.model)
    case = common.Case(run.id, run.stage, run.world_size, lambda _: None, run.dtype, run.zero)
    config = {**common.ds_config(case), "gradient_accumulation_steps": run.accumulation, "gradient_clipping": 0.0}
    del config["scheduler"]
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, optimizer=_optimizer(run, trained), config=config)
    for _ in range(run.steps * run.accumulation):
        loss = engine(_inputs(run)).float().square().mean()
        engine.backward(loss)
        if run.stepped == "engine":
            engine.step()
        else:
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    engine.save_checkpoint(str(out), exclude_frozen_parameters=run.model == ADAPTER)
    assert str(ckpttool.prove(engine, out)).startswith("proven: ")
    held = {key: tensor.detach().clone().contiguous() for key, tensor in common.live_tensors(engine).items()}
    if engine.global_rank == 0:
        save_file(held, str(out / "truth.safetensors"))
    engine.destroy()


def _optimizer(run: Run, parameters: list[Any]) -> torch.optim.Optimizer:
    if run.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=run.rate)
    if run.optimizer == "rmsprop":
        return torch.optim.RMSprop(parameters, lr=run.rate)
    if run.optimizer == "adagrad":
        return torch.optim.Adagrad(parameters, lr=run.rate)
    return torch.optim.SGD(parameters, lr=run.rate, momentum=0.9 if run.optimizer == "momentum" else 0.0)


def _inputs(run: Run) -> torch.Tensor:
    if run.model in {"odd", ADAPTER}:
        return torch.arange(12).reshape(2, 6)
    shape = (2, 3, 8, 8) if run.model == "conv" else (4, 16)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[run.dtype]
    return torch.linspace(-1, 1, math.prod(shape)).reshape(shape).to(dtype)


def _model(kind: str) -> torch.nn.Module:
    from recipes import plain

    if kind == "odd":
        model: nn.Module = plain.build_model()
        return model
    if kind == "conv":
        return nn.Sequential(nn.Conv2d(3, 5, 3), nn.GroupNorm(5, 5), nn.Flatten(), nn.Linear(180, 7))
    if kind == ADAPTER:
        model = nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 8), nn.Linear(8, 13, bias=False))
        model[2].weight = model[0].weight.requires_grad_(False)
        return model
    block = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    model = nn.Sequential(*(copy.deepcopy(block) for _ in range(4)))
    if kind == "alike":
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 0.5)
    return model


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("many")
    each_on_ranks(_train, [{"id": run.id, "world_size": run.world_size, "run": run} for run in TRAINED], directory)
    return directory


@pytest.mark.parametrize("run", TRAINED, ids=lambda run: run.id)
def test_deepspeeds_saves_are_sound_and_give_their_values(run: Run, trained: Path) -> None:
    src = trained / run.id
    assert ckpttool.verify(src).findings == ()
    assert ckpttool.verify(src, deep=True).findings == ()
    truth = load_file(src / "truth.safetensors")
    weights = ckpttool.load_state_dict(src)
    masters = {key.removeprefix("fp32/"): value for key, value in truth.items() if key.startswith("fp32/")}
    masters = masters or {k.removeprefix("module/"): v.float() for k, v in truth.items() if k.startswith("module/")}
    assert masters
    for name, value in masters.items():
        assert weights[name].equal(value.reshape(weights[name].shape)), name
    checks = weights.checks()
    assert checks is not None
    assert checks.without == ()
