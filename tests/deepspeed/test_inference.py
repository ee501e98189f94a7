"""Weights of a training engine, loaded into engines without an optimizer: ZeRO-3 and none, fp32 and bf16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ckpttool
from tests.deepspeed.engines import build, refusal, step
from tests.forked import each_on_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed

JOBS: list[dict[str, Any]] = [
    {"id": f"{dtype}-zero{saved}-to{stage}", "world_size": 2, "saved": saved, "stage": stage, "dtype": dtype}
    for saved, stage in ((2, 3), (3, 3), (3, 0))
    for dtype in ("fp32", "bf16")
]


def _load(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Train and save one engine, and load its weights into one that only computes; return what differs."""
    import torch
    from deepspeed.utils import safe_get_full_fp32_param

    root = directory / job["id"]
    first = build(job["saved"], job["dtype"], "two", "adamw")
    step(first, 2)
    ckpttool.CheckpointManager(root).save(first)
    truth = {name: safe_get_full_fp32_param(p).clone() for name, p in first.module.named_parameters()}
    first.destroy()
    second = _without_optimizer(job["stage"], job["dtype"])
    told: dict[str, Any] = {"resume": refusal(lambda: ckpttool.load(second, root)), "differing": []}
    ckpttool.load(second, root, weights_only=True)
    dtype = torch.bfloat16 if job["dtype"] == "bf16" else torch.float32
    for name, value in _whole(second).items():
        if value.dtype != dtype or not torch.equal(value, truth[name].to(dtype)):
            told["differing"].append(name)
    inputs = torch.ones(2, 6, dtype=dtype)
    told["outputs"] = [float(x) for x in second(inputs).float().flatten()]
    told["weights"] = {name: value.to(dtype).tolist() for name, value in truth.items()}
    second.destroy()
    return told


def _without_optimizer(stage: int, dtype: str) -> Any:
    import deepspeed
    import torch

    torch.manual_seed(7)
    layers = [torch.nn.Linear(6, 6) for _ in range(3)]
    net = torch.nn.Module()
    net.a, net.b, net.c = layers
    net.forward = lambda x: net.c(torch.tanh(net.b(torch.tanh(net.a(x)))))
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "steps_per_print": 10_000}
    if stage:
        config["zero_optimization"] = {"stage": stage, "stage3_param_persistence_threshold": 10}  # keeps the biases
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    return deepspeed.initialize(model=net, config=config)[0]


def _whole(engine: Any) -> dict[str, Any]:
    """Return the engine's whole parameters."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


@pytest.fixture(scope="module")
def told(tmp_path_factory: TempPathFactory) -> dict[str, Any]:
    """By job, what its first rank tells."""
    found = each_on_ranks(_load, JOBS, tmp_path_factory.mktemp("inference"))
    return {name: ranks[0] for name, ranks in found.items()}


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["id"])
def test_an_engine_without_an_optimizer_gets_the_weights(job: dict[str, Any], told: dict[str, Any]) -> None:
    found = told[job["id"]]
    assert found["differing"] == []
    values = np.ones((2, 6))
    for layer in "abc":
        values = values @ np.array(found["weights"][f"{layer}.weight"]).T + found["weights"][f"{layer}.bias"]
        values = np.tanh(values) if layer != "c" else values
    assert found["outputs"] == pytest.approx(values.flatten(), abs=1e-5 if job["dtype"] == "fp32" else 2e-2)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["id"])
def test_a_resume_without_an_optimizer_is_refused(job: dict[str, Any], told: dict[str, Any]) -> None:
    said = told[job["id"]]["resume"]
    assert "weights_only=True" in said
    assert "\n" not in said
