"""A load matches names that wrappers alone change, refuses states of another class, and proves values of every type."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from tests.deepspeed.engines import refusal
from tests.forked import each_on_ranks

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.deepspeed


class _Optimizer(torch.optim.Optimizer):  # type: ignore[misc, name-defined]  # torch is not followed
    """Keeps states of some names; its options have the names of Adam's."""

    names: tuple[str, ...] = ()

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()  # type: ignore[untyped-decorator]  # torch is not followed
    def step(self, closure: Any = None) -> None:
        """Update the states, and subtract the first."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update({key: torch.zeros_like(p) for key in self.names}, step=0)
                state["step"] += 1
                for key in self.names:
                    state[key].lerp_(p.grad, 0.1)
                p.sub_(state[self.names[0]], alpha=group["lr"])


class _Two(_Optimizer):
    names = ("exp_avg", "exp_avg_sq")


class _Three(_Optimizer):
    names = ("momentum", "difference", "variance")


class _More(_Optimizer):
    names = ("exp_avg", "exp_avg_sq", "variance")


def _engine(net: Any, kind: type[Any], stage: int) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    return deepspeed.initialize(model=net, optimizer=kind(net.parameters()), config=config)[0]


def _trained(net: Any, kind: type[Any], stage: int) -> Any:
    engine = _engine(net, kind, stage)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
    return engine


def _other_class(job: dict[str, Any], directory: Path) -> list[str]:
    path = directory / job["id"]
    _trained(torch.nn.Linear(8, 8), _Two, job["stage"]).save_checkpoint(str(path))
    engines = [_engine(torch.nn.Linear(8, 8), kind, job["to"]) for kind in (_Two, _Three, _More)]
    return [refusal(partial(ckpttool.load, engine, path, prove=True)) for engine in engines]


def test_states_are_not_loaded_into_an_optimizer_of_another_class(tmp_path: Path) -> None:
    """Files of ``save_checkpoint`` record no class, and the options have the same names."""
    jobs = [{"id": f"{a}{b}", "world_size": 1, "stage": a, "to": b} for a, b in ((2, 3), (3, 2), (1, 1))]
    for (same, other, more), *_ in each_on_ranks(_other_class, jobs, tmp_path).values():
        assert same == ""
        assert "holds exp_avg, exp_avg_sq, but the engine's optimizer keeps difference, momentum, variance" in other
        assert "the engine's optimizer keeps exp_avg, exp_avg_sq, variance" in more


def _wrapped(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Load a compiled model's checkpoint into a plain model, and the other way round."""

    def build(compiled: bool, seed: int) -> Any:
        torch.manual_seed(seed)
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        if compiled and job["whole"]:
            return torch.compile(net, backend="eager")
        if compiled:
            net[1] = torch.compile(net[1], backend="eager")
        return net

    found: dict[str, Any] = {}
    for compiled in (True, False):
        path = directory / f"{job['id']}-{compiled}"
        saved = _trained(build(compiled, 0), torch.optim.AdamW, 2)
        saved.save_checkpoint(str(path))
        wanted = [p.detach().clone() for p in saved.module.parameters()]
        for strict in (True, False):
            engine = _engine(build(not compiled, 1), torch.optim.AdamW, job["to"])
            report = ckpttool.load(engine, path, strict=strict, prove=True)
            same = all(map(torch.equal, engine.module.parameters(), wanted)) if job["to"] < 3 else True
            found[f"{compiled} {strict}"] = same, str(report.proof)
    other = _engine(torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(8, 8))), torch.optim.AdamW, job["to"])
    found["refused"] = refusal(lambda: ckpttool.load(other, path, strict=False))
    return found


class _Inside(torch.nn.Module):  # type: ignore[misc, name-defined]  # torch is not followed
    """Has the model as its attribute ``module``, as DDP has."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Any) -> Any:
        return self.module(x)


def _recorded(job: dict[str, Any], directory: Path) -> list[str]:
    found = []
    for inside in (True, False):
        nets = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in range(2)]
        nets = [_Inside(net) if n == inside else net for n, net in enumerate(nets)]
        root = directory / f"{job['id']}-{inside}"
        ckpttool.CheckpointManager(root).save(_trained(nets[0], torch.optim.AdamW, job["stage"]))
        manager = ckpttool.CheckpointManager(root)
        manager.restore(_engine(nets[1], torch.optim.AdamW, job["stage"]), prove=True)
        found.append(str(manager.restored and manager.restored.proof))
    return found


def test_recorded_digests_are_matched_where_a_prefix_differs(tmp_path: Path) -> None:
    jobs = [{"id": str(stage), "world_size": 2, "stage": stage} for stage in (0, 2, 3)]
    for ranks in each_on_ranks(_recorded, jobs, tmp_path).values():
        for proof in ranks[0]:
            assert proof.startswith("proven: "), proof
            assert "equal the state saved at step 2" in proof
            assert "not compared" not in proof, proof


def test_names_that_wrappers_change_are_matched(tmp_path: Path) -> None:
    jobs = [
        {"id": f"{to}{whole}", "world_size": 1, "to": to, "whole": whole} for to in (2, 3) for whole in (True, False)
    ]
    for found, *_ in each_on_ranks(_wrapped, jobs, tmp_path).values():
        assert "has no parameter of the model: it has 0.weight, the model 0.0.weight" in found.pop("refused")
        for same, proof in found.values():
            assert same
            assert proof.startswith("proven: "), proof
            assert "exp_avg_sq" in proof
            assert "step, hyper-parameters" in proof
