"""Engines whose optimizers differ from the saved ones: other groups, order, frozen parameters, class."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from tests import forked

STEPS = 2


def main(directory: Path) -> None:
    """Do all jobs in one process; its only rank."""
    import deepspeed  # noqa: F401  once, for all that are forked

    jobs = forked.jobs_in(directory)
    forked.run_ranks(1, lambda: _rank(jobs, directory))


def _rank(jobs: list[dict[str, Any]], directory: Path) -> None:
    from recipes import common

    common.start(seed=1)
    told = {}
    for job in jobs:
        forked.end_if_stuck()
        told[job["id"]] = _do(job, directory / "root")
        shutil.rmtree(directory / "root")
    (directory / "told.json").write_text(json.dumps(told))
    common.leave()


def _do(job: dict[str, Any], root: Path) -> dict[str, Any]:
    """Save one engine, restore into another; what was said, and what differs."""
    from ckpttool import CheckpointManager, verify

    first = build(job["stage"], job["dtype"], job["groups"][0], job["optimizers"][0])
    step(first, STEPS)
    saved, scale = held(first), getattr(first.optimizer, "loss_scale", None)
    if job["plain"]:
        first.save_checkpoint(str(root))
    else:
        CheckpointManager(root).save(first)
    told: dict[str, Any] = {"verify": [f"{f.path}: {f.problem}" for f in verify(root, deep=True).findings]}
    step(first, STEPS)
    went_on = held(first)
    first.destroy()
    second = build(job["to"], job["dtype"], job["groups"][1], job["optimizers"][1], seed=7)
    manager = CheckpointManager(root)
    before = held(second)
    told |= {
        "preview": _told(lambda: manager.preview(second)),
        "restore": _told(lambda: manager.restore(second)),
    }
    now = held(second)
    told["untouched"] = differing(before, now) == [] and second.global_steps == 0
    told["differing"] = differing(saved, now)
    told["loss scales"] = [scale, getattr(second.optimizer, "loss_scale", None)]
    told["notes"] = list(manager.restored.notes) if manager.restored else []
    told["step"] = _told(lambda: step(second, STEPS))
    told["differing later"] = differing(went_on, held(second), tolerance=1e-4)
    second.destroy()
    return told


def _told(function: Any) -> str:
    from ckpttool import CkptError

    try:
        function()
    except CkptError as error:
        return str(error)
    except Exception as error:
        return f"raw: {type(error).__name__}: {error}"
    return ""


def build(stage: int, dtype: str, groups: str, optimizer: str, seed: int = 0, accumulation: int = 1) -> Any:
    """Three layers of one shape under DeepSpeed."""
    import deepspeed
    import torch

    class Net(torch.nn.Module):  # type: ignore[misc]  # torch is not followed
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (torch.nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: Any) -> Any:
            return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))

    torch.manual_seed(seed)
    net = Net()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "steps_per_print": 10_000,
        "zero_allow_untested_optimizer": True, "gradient_accumulation_steps": accumulation,
    }  # fmt: skip
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 40}
    return deepspeed.initialize(model=net, optimizer=_optimizer(optimizer, _grouped(net, groups)), config=config)[0]


def _grouped(net: Any, how: str) -> list[dict[str, Any]]:
    layers = [net.a, net.b, net.c]
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    rates = (0.01, 0.003, 0.001)
    if how.startswith("frozen"):
        frozen = layers.pop("abc".index(how[-1]))
        for p in frozen.parameters():
            p.requires_grad_(False)
        return [{"params": [p for layer in layers for p in layer.parameters()], "lr": rates[0]}]
    cuts = {
        "two": ([weights, biases], rates),
        "swapped": ([biases, weights], (rates[1], rates[0])),
        "reversed": ([weights[::-1], biases[::-1]], rates),
        "cut": ([weights[:2], [*weights[2:], *biases]], rates),
        "one": ([list(net.parameters())], rates),
        "layers": ([list(layer.parameters()) for layer in layers], rates),
        "layers swapped": ([list(layers[i].parameters()) for i in (1, 0, 2)], (rates[1], rates[0], rates[2])),
    }
    return [{"params": own, "lr": rate} for own, rate in zip(*cuts[how], strict=False)]


def _optimizer(name: str, groups: Any) -> Any:
    import torch
    from deepspeed.ops.adam import FusedAdam

    class Fused(FusedAdam):  # type: ignore[misc]  # DeepSpeed is not followed
        """What DeepSpeed's wrapper takes for its own, and torch computes: nothing is compiled."""

        _init_group = torch.optim.Adam._init_group

        def __init__(self, groups: Any) -> None:
            defaults = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).defaults
            torch.optim.Optimizer.__init__(self, groups, defaults)

        def step(self, closure: Any = None) -> Any:
            return torch.optim.Adam.step(self, closure)

        def zero_grad(self, set_to_none: bool = True) -> None:
            torch.optim.Optimizer.zero_grad(self, set_to_none)

    makers: dict[str, Any] = {
        "adamw": lambda: torch.optim.AdamW(groups),
        "fused": lambda: Fused(groups),
        "amsgrad": lambda: torch.optim.AdamW(groups, amsgrad=True),
        "momentum": lambda: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
        "sgd": lambda: torch.optim.SGD(groups, lr=0.01),
        "rmsprop": lambda: torch.optim.RMSprop(groups),
        "nadam": lambda: torch.optim.NAdam(groups),
    }
    return makers[name]()


def step(engine: Any, count: int) -> None:
    """Train on the same numbers."""
    import torch

    for _ in range(count):
        torch.manual_seed(5)
        x = torch.randn(2, 6).to(next(engine.module.parameters()).dtype)
        engine.backward((engine(x).float() ** 2).sum())
        engine.step()


def held(engine: Any) -> dict[str, Any]:
    """Everything by the names of the parameters, learning rates too; taken from the live engine alone."""
    import torch
    from recipes import common

    wrapper, names = engine.optimizer, {id(p): n for n, p in engine.module.named_parameters()}
    if engine.zero_optimization_stage():
        found: dict[str, Any] = {k: v.detach().clone() for k, v in common.live_tensors(engine).items()}
        for group, options in zip(common.live_groups(engine), wrapper.param_groups, strict=True):
            found |= {f"lr/{name}": options["lr"] for name in group}
        return found
    found = {f"module/{n}": p.detach().clone() for n, p in engine.module.named_parameters()}
    inner = getattr(wrapper, "optimizer", wrapper)
    for number, options in enumerate(inner.param_groups):
        own = wrapper.fp16_groups[number] if wrapper is not inner else options["params"]
        flat = hasattr(wrapper, "fp32_groups_flat")
        at = 0
        for i, p in enumerate(own):
            name, master = names[id(p)], options["params"][0 if flat else i]
            found[f"lr/{name}"] = options["lr"]
            for key, value in {"fp32": master.detach(), **inner.state.get(master, {})}.items():
                is_cut = flat and isinstance(value, torch.Tensor) and value.shape == master.shape
                piece = value[at : at + p.numel()].view(p.shape) if is_cut else value
                found[f"{key}/{name}"] = piece.clone() if isinstance(piece, torch.Tensor) else piece
            at += p.numel()
    return found


def differing(a: dict[str, Any], b: dict[str, Any], tolerance: float = 0.0) -> list[str]:
    """What is not in both, or not the same; with a tolerance, of tensors relative to their largest element."""
    import torch

    def same(x: Any, y: Any) -> bool:
        if tolerance and isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            return bool((x.float() - y.float()).abs().max() <= tolerance * x.float().abs().max())
        return torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else bool(x == y)

    return sorted(key for key in a.keys() | b.keys() if key not in a or key not in b or not same(a[key], b[key]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
