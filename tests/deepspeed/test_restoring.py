"""What a live engine saves is restored into an engine built alike, whatever its configuration of DeepSpeed.

Configurations are drawn with a seed. DeepSpeed saves the same state beside. What a rank holds is compared tensor by
tensor, from the live engines alone.
"""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import random
import re
import shutil
import traceback
import types
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import ckpttool
from ckpttool.formats import open_checkpoint
from ckpttool.integrations.deepspeed.engine import inspect_engine
from ckpttool.integrations.deepspeed.match import match
from ckpttool.integrations.live.options import LoadOptions
from tests import forked
from tests.forked import each_on_ranks
from tests.sampling import some, thorough

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from _pytest.tmpdir import TempPathFactory

    from ckpttool.model import Checkpoint

pytestmark = pytest.mark.deepspeed

TORCH = (
    "AdamW", "Adam amsgrad=1", "SGD lr=0.01", "SGD lr=0.01 momentum=0.9", "RMSprop", "RMSprop momentum=0.9 centered=1",
    "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD", "Adafactor", "Muon",
)  # fmt: skip
TRANSFORMERS = ("HFAdafactor", "HFAdafactor beta1=0.9")
OWN = ("CountingInGroups", "Unusual")
"""Optimizers of users; see ``_own``."""
NESTED = "Nested"
"""Another one, which DeepSpeed can train without ZeRO alone."""
RARE = ("Shared", "Containers")
"""Others with states that no other layout can hold."""
DEEPSPEED = ("Adam", "AdamW", "Adam torch_adam=1", "Adagrad", "Lamb", "Lion", "Muon", "SGD", "MuAdam")
OPTIMIZERS = (
    *(f"torch {n}" for n in (*TORCH, *TRANSFORMERS, *OWN)),
    *(f"deepspeed {n}" for n in DEEPSPEED),
)
"""Those that users pass, and those that the configuration names."""
STAGES = (0, 1, 2, 3)
ZERO = ("round_robin_gradients", "sub_group_size", "overlap_comm", "elastic_checkpoint")
DTYPES = ("fp32", "fp16", "bf16", "bf16 states")
OFFLOADS = ("", "optimizer", "all")
SCHEDULERS = ("", "WarmupLR", "OneCycle", "StepLR")
MODELS = ("plain", "frozen", "tied", "counting")
SPREAD = ("pipeline", "experts")
"""Models that lie on several ranks, which restore on the same ranks alone."""
UNUSUAL = ("extra", "partial", "thawed")
"""Models whose state dict is not their parameters and buffers, or that freeze others than when they were built."""
UNSAVED = {
    "expanded": r"wide of the model is an expanded view, which torch cannot load into",
    "sparse": r"graph of the model is a sparse tensor, which ckpttool does not read",
    "conjugate": r"phase of the model is a conjugate or negated view, which ckpttool does not read",
    "partial-zero0": r"lacks down.weight, down.bias of the model",
    "thawed-zero3": r"embed.weight needs a gradient but is in no group of the optimizer: DeepSpeed saves no values",
}
"""Models, at some stages, whose first save is refused, and the reason."""
GROUPS = ("one", "two", "adapter")


@dataclass(frozen=True)
class Draw:
    """One configuration."""

    optimizer: str
    stage: int
    dtype: str
    offload: str
    accumulation: int
    clipping: float
    scheduler: str
    model: str
    groups: str
    ranks: int
    zero: str = ""
    """A further setting of ``zero_optimization``."""
    target: tuple[int, int] = (0, 0)
    """Ranks and stage of the engine that the save is restored into beside."""

    @property
    def id(self) -> str:
        """A name for it."""
        parts = [self.optimizer, f"zero{self.stage}", f"dp{self.ranks}", self.dtype, self.offload, self.model]
        parts += [self.groups, self.scheduler, self.zero, str(self.accumulation), str(self.clipping)]
        parts.append(f"to{self.target[0]}x{self.target[1]}")
        return "-".join(p.replace(" ", "_").replace("=", "") for p in parts if p)


ALSO = [
    *(Draw("torch AdamW", 0, "bf16", "", 2, 0.0, "", "pipeline", "one", ranks) for ranks in (2, 4)),
    *(Draw("torch HFAdafactor", 0, dtype, "", 2, 0.0, "", "pipeline", "one", 2) for dtype in ("fp32", "bf16")),
    *(Draw("torch HFAdafactor", stage, "bf16", "", 1, 0.0, "", "experts", "one", 2) for stage in (1, 2)),
    *(Draw(f"torch {NESTED}", 0, dtype, "", 1, 0.0, "", "plain", "one", 1, "", (1, 0)) for dtype in DTYPES[:3]),
    Draw("torch Adagrad", 2, "bf16", "optimizer", 1, 0.0, "", "plain", "one", 1, "", (1, 0)),
    *(Draw("torch Adagrad", 0, dtype, "", 1, 0.0, "", "plain", "one", 1) for dtype in ("fp16", "bf16")),
    *(
        Draw(f"torch {name}", stage, dtype, "", 1, 0.0, "", "plain", "one", 1, zero, target)
        for name, (stage, dtype, zero, target) in some(
            itertools.product(
                RARE,
                (
                    (0, "fp32", "", (1, 1)),
                    (0, "bf16", "", (0, 0)),
                    (1, "bf16", "", (1, 3)),
                    (2, "fp32", "", (2, 2)),
                    (2, "fp16", "elastic_checkpoint", (0, 0)),
                    (3, "bf16", "", (1, 1)),
                ),
            ),
            6,  # each layout, and three of each optimizer
        )
    ),
    *(
        Draw("torch AdamW", stage, dtype, "", 1, 0.0, "", model, "one", 1, "", target)
        for model in UNUSUAL
        for stage, dtype, target in ((0, "fp32", (1, 1)), (1, "bf16", (1, 3)), (2, "fp32", (2, 2)), (3, "fp16", (1, 0)))
    ),
    *(
        Draw("torch AdamW", stage, "fp32", "", 1, 0.0, "", model, "one", 1)
        for model, stage in some(itertools.product(("expanded", "sparse", "conjugate"), (0, 2, 3)), 3)
    ),
    Draw("torch Unusual", 0, "fp32", "", 1, 0.0, "OneCycle", "plain", "adapter", 3, "", (1, 2)),
    Draw("torch Adagrad", 1, "fp32", "optimizer", 1, 1.0, "StepLR", "plain", "one", 1, "elastic_checkpoint", (1, 1)),
    Draw("deepspeed Muon", 1, "bf16", "", 1, 0.0, "", "plain", "one", 2),
    Draw("deepspeed Muon", 0, "fp32", "", 1, 1.0, "", "plain", "two", 2, "", (2, 1)),
    Draw("deepspeed Muon", 0, "bf16", "", 2, 0.0, "", "plain", "two", 1, "", (3, 2)),
    Draw("deepspeed Muon", 1, "bf16", "", 1, 1.0, "WarmupLR", "plain", "adapter", 1, "sub_group_size", (3, 0)),
    Draw("deepspeed Muon", 2, "fp16", "", 2, 1.0, "OneCycle", "plain", "adapter", 2, "", (1, 3)),
    Draw("deepspeed Muon", 1, "bf16", "", 1, 0.0, "StepLR", "plain", "two", 2, "", (3, 2)),
    Draw("torch HFAdafactor", 0, "fp32", "", 1, 0.0, "", "plain", "two", 1, "", (1, 3)),
    Draw("torch HFAdafactor", 0, "fp32", "", 1, 0.0, "", "matrix", "one", 1, "", (1, 0)),
    Draw("torch HFAdafactor", 0, "fp32", "", 2, 0.0, "StepLR", "frozen", "adapter", 3, "", (1, 3)),
    *(Draw("torch AdamW", 0, dtype, "", 1, 0.0, "", "equal", "reversed", 1) for dtype in ("fp32", "bf16")),
    Draw("torch AdamW", 0, "fp32", "", 1, 0.0, "", "experts", "one", 2),
    Draw("torch HFAdafactor beta1=0.9", 1, "bf16 states", "", 1, 0.0, "", "plain", "one", 1, "", (1, 3)),
]
"""Configurations that once went wrong and that few draws are like."""


def draws(count: int, seed: int = 0) -> list[Draw]:
    """Draw configurations; optimizers, stages and types come in turn, so that all pairs of them are drawn soon."""
    chosen: dict[str, Draw] = {}
    random_ = random.Random(seed)  # noqa: S311  no secret
    bases = list(itertools.product(OPTIMIZERS, STAGES, DTYPES))
    random_.shuffle(bases)
    for optimizer, stage, dtype in itertools.islice(itertools.cycle(bases), count):
        zero = random_.choice(["", "", "", *ZERO])
        offload = random_.choice([*OFFLOADS, ""]) if stage else ""
        if dtype == "bf16 states" and (optimizer == "deepspeed Adam" or random_.random() < 0.7):
            # DeepSpeed keeps these for its CPU Adam alone.
            optimizer, stage, offload = "deepspeed AdamW", max(1, stage), "optimizer"
        draw = Draw(
            optimizer, stage, dtype, offload, random_.choice((1, 2)),
            random_.choice((0.0, 1.0)), random_.choice(SCHEDULERS), random_.choice(MODELS), random_.choice(GROUPS),
            random_.choice((1, 2, 2, 3)), zero if stage else "", (random_.choice((1, 2, 3)), random_.choice(STAGES)),
        )  # fmt: skip
        chosen.setdefault(draw.id, draw)
    return list(chosen.values())


def run(chosen: Sequence[Draw], directory: Path) -> dict[str, dict[str, Any]]:
    """Save, restore and train on each, on the same ranks and then on others; by id, what any of the ranks found."""
    jobs = []
    for draw in chosen:
        # DeepSpeed remembers the model-parallel unit of a pipeline, and the groups of experts.
        apart = draw.model if draw.model in SPREAD else ""
        for turn, ranks in enumerate((draw.ranks, draw.target[0])):
            if ranks:
                job = {"id": (draw.id, turn), "turn": turn, "world_size": ranks, "apart": apart, "draw": draw}
                jobs.append(job)
    found: dict[str, dict[str, Any]] = {}
    late = ["transformers.optimization"]
    for (name, _), everyone in sorted(each_on_ranks(_restore, jobs, directory, imports=late).items()):
        merged: dict[str, Any] = {}
        for one in everyone:
            merged |= {k: v for k, v in one.items() if v or k not in merged}
        found.setdefault(name, {}).update(merged)
    return found


# ------------------------------------------------------------------------------------------------- in the processes


def _restore(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    forked.end_if_stuck(60)
    _kernels_in_python()
    return (_other_ranks if job["turn"] else _same_ranks)(job["draw"], directory / job["draw"].id)


def _same_ranks(draw: Draw, root: Path) -> dict[str, Any]:
    """Save with both, verify, restore into a new engine, and train both engines on."""
    found: dict[str, Any] = {}
    try:
        engine = build(draw)
        train(engine, draw, 2)
        if draw.model == "thawed":
            engine.module.embed.weight.requires_grad_(True)
    except Exception as error:
        return {"deepspeed": f"cannot train: {type(error).__name__}: {str(error)[:200]}"}
    manager = ckpttool.CheckpointManager(root / "ours")
    try:
        engine.save_checkpoint(str(root / "theirs"), client_state={"epoch": 1})
    except Exception as error:
        why = f"cannot train: cannot save: {type(error).__name__}: {str(error)[:200]}"
        return {"deepspeed": why, "save": told(lambda: manager.save(engine))}
    named = {} if draw.model in SPREAD else _named(engine)
    before = snapshot(engine)
    from ckpttool.integrations.deepspeed import restorable  # imports DeepSpeed's optimizers

    with mock.patch.object(restorable, "match", wraps=match) as matching:
        found["save"] = told(lambda: manager.save(engine, client_state={"epoch": 1}))
    if matching.called and not found["save"]:
        described = matching.call_args.args[1]
        found["misdescribed"] = _misdescribed(engine, described, root / "ours")
        found["misnamed"] = [] if draw.model in SPREAD else _misnamed(described, root / "theirs")
    found["kept"] = differing(before, snapshot(engine))  # a save changes nothing
    losses = train(engine, draw, 2)
    after = snapshot(engine)
    if torch.distributed.get_rank() == 0:
        torch.save(named, root / "named.pt")
        for name in ("ours", "theirs"):
            found[f"verify {name}"] = told(lambda name=name: _verify(root / name))
    engine.destroy()
    torch.distributed.barrier()
    if found["save"]:
        return found
    other = build(draw, seed=8)
    found["load"] = told(lambda: ckpttool.load(other, root / "theirs", prove=_is_provable(other)))
    found["loaded"] = [] if found["load"] else differing(before, snapshot(other))
    state: list[Any] = []
    manager = ckpttool.CheckpointManager(root / "ours")
    if found["load"]:
        other.destroy()
        other = build(draw, seed=8)
    found["restore"] = told(lambda: state.append(manager.restore(other, prove=_is_provable(other))))
    if found["restore"]:
        other.destroy()
        other = build(draw, seed=9)
        found["deepspeed"] = told(lambda: other.load_checkpoint(str(root / "theirs")))
        other.destroy()
        return found
    found["client_state"] = "" if state == [{"epoch": 1}] else repr(state)
    found["restored"] = differing(before, snapshot(other))
    again: list[Any] = []
    found["trains"] = told(lambda: again.append(train(other, draw, 2)))
    found["trained"] = [
        *([] if _same(torch.tensor(again), torch.tensor([losses])) else ["losses"]),
        *differing(after, snapshot(other)),
    ]
    found["notes"] = list(manager.restored.notes) if manager.restored else []
    other.destroy()
    everyone: list[Any] = [None] * draw.ranks
    torch.distributed.all_gather_object(everyone, [*found["loaded"], *found["restored"], *found["trained"]])
    if any(everyone):
        other = build(draw, seed=9)
        found["deepspeed"] = told(lambda: other.load_checkpoint(str(root / "theirs")))
        found["deepspeed restored"] = differing(before, snapshot(other))
        train(other, draw, 2)
        found["deepspeed trained"] = differing(after, snapshot(other))
        other.destroy()
    return found


def _misdescribed(engine: Any, described: Checkpoint, root: Path) -> list[str]:
    """What the description of a save has otherwise than its files, and whether a match with either differs."""
    live, options = inspect_engine(engine), LoadOptions(dry_run=True)
    stored = open_checkpoint(root)
    model = live.model
    known = () if model is None else {*model.shapes, *model.buffers, *model.aliases}
    both: list[dict[str, Any]] = []
    for one in (described, stored):
        found = match(live, replace(one, client_state={}, scheduler=None), options)
        fitted = found.fitted
        tensors = {p.name: p.shape for p in one.parameters} | {b.name: b.state.shape for b in one.buffers}
        groups = [{*group.parameters} for group in one.groups] if stored.groups and model is not None else []
        both.append(
            {
                "save": (one.format, one.stage, one.dtype, one.topology, one.step, one.optimizer),
                "tensors": {name: shape for name, shape in tensors.items() if name in known},
                "groups": groups,
                "match": (found.method, found.reasons, fitted and (fitted.missing, fitted.unexpected, fitted.fresh)),
            }
        )
    return [f"{name}: {here} is {there}" for name, here in both[0].items() if here != (there := both[1][name])]


def _misnamed(described: Checkpoint, root: Path) -> list[str]:
    """The groups of DeepSpeed's save that are read with other parameters than the engine has in them."""
    read = [sorted(group.parameters) for group in open_checkpoint(root).groups]
    own = [sorted(group.parameters) for group in described.groups]
    # Those of a group are unknown if several fit.
    same = len(read) == len(own) and all(one in ([], other) for one, other in zip(read, own, strict=True))
    return [] if same or not any(read) else [f"{read} instead of {own}"]


def _other_ranks(draw: Draw, root: Path) -> dict[str, Any]:
    """Restore on other ranks and at another stage: by name the same values, or a refusal that changes nothing."""
    if draw.model in SPREAD or not (root / "named.pt").exists() or not (root / "ours" / "latest").exists():
        return {}
    changed = Draw(**{**asdict(draw), "stage": draw.target[1], "ranks": draw.target[0], "offload": "", "zero": ""})
    try:
        engine = build(changed, seed=8)
        before = snapshot(engine)
        manager = ckpttool.CheckpointManager(root / "ours")
    except Exception as error:
        return {"other deepspeed": f"{type(error).__name__}: {str(error)[:200]}"}
    found: dict[str, Any] = {"other": told(lambda: manager.restore(engine, prove=_is_provable(engine)))}
    if found["other"]:
        found["other touched"] = differing(before, snapshot(engine))
    else:
        found["other notes"] = list(manager.restored.notes) if manager.restored else []
        saved, now = torch.load(root / "named.pt", weights_only=False), _named(engine)
        common_keys = saved.keys() & now.keys()
        found["other lacks"] = sorted(saved.keys() ^ now.keys())
        found["other differs"] = differing({k: saved[k] for k in common_keys}, {k: now[k] for k in common_keys})
        found["other trains"] = told(lambda: train(engine, changed, 1))
    engine.destroy()
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(root)
    return found


def _is_provable(engine: Any) -> bool:
    from ckpttool.extensions.proof.engine_state import unprovable  # the quick tests of the core run without it

    return not unprovable(inspect_engine(engine))


def told(function: Any) -> str:
    """What a function raised: "" for nothing."""
    try:
        function()
    except ckpttool.CkptError as error:
        return str(error)
    except Exception as error:
        traceback.print_exc()
        return f"raw: {type(error).__name__}: {error}"
    return ""


def _verify(path: Path) -> None:
    report = ckpttool.verify(path, deep=True)
    if report.findings:
        raise RuntimeError(str(report.findings[0]))


# ------------------------------------------------------------------------------------------------- engines


def build(draw: Draw, seed: int = 0) -> Any:
    """An engine of the configuration."""
    import deepspeed

    torch.manual_seed(seed)
    kind, _, rest = draw.optimizer.partition(" ")
    name, *pairs = rest.split()
    options = {key: float(value) if "." in value else bool(int(value)) for key, value in (p.split("=") for p in pairs)}
    net = _model(draw.model)
    if draw.groups == "adapter":
        for p in [*net.parameters()][::2]:
            p.requires_grad_(False)
    trained = [p for p in net.parameters() if p.requires_grad]
    if rest.startswith("Muon") and kind == "torch":
        for p in trained:
            p.requires_grad_(p.dim() == 2)
        trained = [p for p in trained if p.requires_grad]
    groups = _groups(trained, draw.groups)
    if draw.model == "experts":
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        groups = split_params_into_different_moe_groups_for_optimizer({"params": trained, "name": "all"})
    zero: dict[str, Any] = {"stage": draw.stage, "stage3_param_persistence_threshold": 10}
    if draw.zero:
        zero[draw.zero] = 200 if draw.zero == "sub_group_size" else True
    if draw.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if draw.offload == "all" and draw.stage == 3:
        zero["offload_param"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "steps_per_print": 10_000,
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "gradient_accumulation_steps": draw.accumulation, "gradient_clipping": draw.clipping,
    }  # fmt: skip
    if draw.dtype.startswith("bf16"):
        config["bf16"] = {"enabled": True}
        if draw.dtype == "bf16 states":
            config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    elif draw.dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    if draw.scheduler in {"WarmupLR", "OneCycle"}:
        one_cycle = {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 3, "cycle_momentum": False}
        warmup = {"warmup_max_lr": 0.01, "warmup_num_steps": 10}
        config["scheduler"] = {"type": draw.scheduler, "params": warmup if draw.scheduler == "WarmupLR" else one_cycle}
    given: dict[str, Any] = {"model_parameters": groups}
    if kind == "deepspeed":
        config["optimizer"] = {"type": name, "params": {"lr": 0.01, **options}}
    else:
        given = {"optimizer": _optimizer(name, groups, options)}
    if draw.scheduler == "StepLR":
        given["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return deepspeed.initialize(model=net, config=config, **given)[0]


def _optimizer(name: str, groups: Any, options: dict[str, Any]) -> Any:
    if name == "HFAdafactor":
        from transformers.optimization import Adafactor

        return Adafactor(groups, lr=0.01, scale_parameter=False, relative_step=False, **options)
    if name in (*OWN, NESTED, *RARE):
        return _own(name)(groups)
    return getattr(torch.optim, name)(groups, **{"lr": 0.01, **options})


def _own(name: str) -> Any:
    import numpy as np

    class CountingInGroups(torch.optim.Optimizer):  # type: ignore[misc]  # torch is not followed
        """Counts steps in its groups alone, like apex's FusedAdam."""

        def __init__(self, groups: Any) -> None:
            super().__init__(groups, {"lr": 0.01, "weight_decay": 0.0})

        @torch.no_grad()  # type: ignore[untyped-decorator]  # the same
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
                for p in (p for p in group["params"] if p.grad is not None):
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    average.lerp_(p.grad.to(p.dtype), 0.1)
                    p.add_(average / (1 - 0.9 ** group["step"]), alpha=-group["lr"])

    class Unusual(torch.optim.Optimizer):  # type: ignore[misc]  # the same
        """Keeps what a rank computes of its own partition, states that come later, a list and no tensor at all."""

        def __init__(self, groups: Any) -> None:
            super().__init__(groups, {"lr": 0.01, "weight_decay": 0.0, "d": 1e-3})

        @torch.no_grad()  # type: ignore[untyped-decorator]  # the same
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in (p for p in group["params"] if p.grad is not None):
                    state = self.state[p]
                    state["norm"] = float(p.grad.float().norm())
                    state["history"] = [*state.get("history", []), state["norm"]][-3:]
                    state["name"], state["array"] = "unusual", np.array([state["norm"], 2.0])
                    low = state.setdefault("low", torch.zeros_like(p, dtype=torch.bfloat16))
                    low.add_(p.grad.to(low.dtype), alpha=0.3)
                    p.add_(low.to(p.dtype), alpha=-0.01)
                    state.setdefault("sketch", torch.zeros(3))[0] += state["norm"]
                    if len(state["history"]) == 2:
                        state["late"] = torch.ones_like(p)
                    group["d"] = max(group["d"], 0.01 * state["norm"])
                    p.add_(p.grad.to(p.dtype), alpha=-group["lr"] * group["d"] - 1e-3 * float(state["sketch"][0]))

    class Nested(torch.optim.Optimizer):  # type: ignore[misc]  # the same
        """Drives another optimizer, like Lookahead, and saves that one's state dict within its own."""

        def __init__(self, groups: Any) -> None:
            self.optimizer = torch.optim.Adam(groups, 0.01)
            self.defaults, self.count = self.optimizer.defaults, 0

        state = property(lambda self: self.optimizer.state)
        param_groups = property(lambda self: self.optimizer.param_groups)

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.optimizer.zero_grad(set_to_none)

        @torch.no_grad()  # type: ignore[untyped-decorator]  # the same
        def step(self, closure: Any = None) -> None:
            self.optimizer.step()
            self.count += 1
            for p in (p for group in self.param_groups for p in group["params"]):
                slow = self.state[p].setdefault("slow", p.clone())
                p.copy_(slow.lerp_(p, 0.5 if self.count % 3 == 0 else 0.1))

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count, "base": self.optimizer.state_dict()}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.count = state_dict["count"]
            self.optimizer.load_state_dict(state_dict["base"])

    class Shared(torch.optim.Adam):  # type: ignore[misc]  # the same
        """Keeps states that belong to no parameter, like a global scale."""

        def __init__(self, groups: Any) -> None:
            super().__init__(groups, 0.01)

        @torch.no_grad()  # type: ignore[untyped-decorator]  # the same
        def step(self, closure: Any = None) -> None:
            shared = self.state["shared"]
            shared["d"] = shared.get("d", 1.0) * 1.5
            shared.setdefault("path", torch.zeros(3, dtype=torch.float64))[0] += shared["d"] / 3
            for group in self.param_groups:
                group["lr"] = 0.01 * shared["d"] + 1e-3 * float(shared["path"][0])
            super().step()

    class Containers(torch.optim.Optimizer):  # type: ignore[misc]  # the same
        """Keeps tensors in containers, beside other things."""

        def __init__(self, groups: Any) -> None:
            super().__init__(groups, {"lr": 0.01, "weight_decay": 0.0})

        @torch.no_grad()  # type: ignore[untyped-decorator]  # the same
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in (p for p in group["params"] if p.grad is not None):
                    state, grad = self.state[p], p.grad.float()
                    slow = state.setdefault("slow", [torch.zeros(p.shape, dtype=torch.float64)])
                    slow[0].lerp_(grad.double(), 0.3)
                    state["block"] = {"codes": (grad * 64).clamp(0, 255).to(torch.uint8), "absmax": grad.abs().max()}
                    state["basis"] = {"t": torch.ones(2), "name": "svd", "n": np.arange(3.0), "none": None}
                    state["wave"] = {"c": torch.complex(grad, -grad), "at": {"k": torch.tensor([2**53 - 1])}}
                    state["last"] = collections.deque([*state.get("last", []), grad.clone()], maxlen=2)
                    state["pair"] = (torch.ones(3).half() / 3, "left", 1)
                    p.add_((slow[0] + state["last"][0]).to(p.dtype), alpha=-group["lr"])

    return {
        "CountingInGroups": CountingInGroups, "Unusual": Unusual, NESTED: Nested, "Shared": Shared,
        "Containers": Containers,
    }[name]  # fmt: skip


def _groups(trained: list[Any], how: str) -> list[dict[str, Any]]:
    if how == "reversed":
        return [{"params": trained[::-1], "lr": 0.01}]
    matrices, rest = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() < 2]
    if how == "one" or not matrices or not rest:
        return [{"params": trained, "lr": 0.01}]
    if how == "two":
        return [{"params": matrices, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0, "lr": 0.003}]
    return [{"params": rest, "lr": 0.002}, {"params": matrices, "lr": 0.016}]  # as LoRA+


def _model(kind: str) -> Any:
    from torch import nn

    class Net(nn.Module):  # type: ignore[misc]  # torch is not followed
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(13, 6)
            self.up = nn.Linear(6, 9)
            self.norm = nn.LayerNorm(9)
            self.down = nn.Linear(9, 6)
            self.head = nn.Linear(6, 13, bias=False)
            self.register_buffer("scales", torch.tensor([1.5, 2.5]))
            self.register_buffer("calls", torch.tensor(0))
            if kind == "tied":
                self.head.weight = self.embed.weight
            if kind in {"frozen", "thawed"}:
                self.embed.weight.requires_grad_(False)
            if kind == "frozen":
                self.down.bias.requires_grad_(False)
            if kind == "matrix":
                self.requires_grad_(False)
                self.down.weight.requires_grad_(True)
            if kind == "equal":
                self.requires_grad_(False)
                self.embed.weight.requires_grad_(True)
                self.head.weight.requires_grad_(True)
            if kind == "expanded":
                self.register_buffer("wide", torch.randn(1).expand(3))
            if kind == "sparse":
                self.register_buffer("graph", torch.eye(3).to_sparse())
            if kind == "conjugate":
                self.register_buffer("phase", torch.randn(3, dtype=torch.complex64).conj())

        def forward(self, tokens: Any) -> Any:
            if kind == "counting":
                self.calls += 1
            return self.head(self.down(torch.tanh(self.norm(self.up(self.embed(tokens))))))

    class Extra(Net):
        """Saves more than parameters and buffers, in the three ways that torch has."""

        def __init__(self) -> None:
            super().__init__()
            self.extra, self.hooked, self.own = torch.zeros(2), 0, torch.zeros(1)
            self._register_state_dict_hook(
                lambda module, into, prefix, _: into.update({f"{prefix}count": torch.tensor(module.hooked)})
            )
            self._register_load_state_dict_pre_hook(self._take_count)

        def _take_count(self, values: Any, prefix: str, *_: Any) -> None:
            self.hooked = int(values.pop(f"{prefix}count", 0))

        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, state: Any) -> None:
            self.extra = state.clone()

        def _save_to_state_dict(self, into: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(into, prefix, keep_vars)
            into[f"{prefix}own"] = self.own

        def _load_from_state_dict(self, values: Any, prefix: str, *others: Any) -> None:
            if f"{prefix}own" in values:
                self.own = values[f"{prefix}own"].clone()
            super()._load_from_state_dict(values, prefix, *others)

        def forward(self, tokens: Any) -> Any:
            self.extra, self.hooked, self.own = self.extra + 0.5, self.hooked + 1, self.own + 0.25
            return super().forward(tokens) * (
                1 + 0.1 * self.hooked + 0.1 * float(self.own) + 0.1 * float(self.extra[0])
            )

    class Partial(Net):
        """Leaves parameters out of its state dict."""

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {k: v for k, v in super().state_dict(*args, **kwargs).items() if not k.startswith("down.")}

    class Experts(Net):
        def __init__(self) -> None:
            from deepspeed.moe.layer import MoE

            super().__init__()
            expert = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6))
            self.moe = MoE(6, expert, num_experts=2, ep_size=2, k=1, use_rts=False)

        def forward(self, tokens: Any) -> Any:
            return self.head(self.moe(self.embed(tokens))[0]) + super().forward(tokens)

    if kind == "pipeline":
        from deepspeed.pipe import LayerSpec, PipelineModule

        layers = [
            LayerSpec(nn.Linear, 6, 6),
            LayerSpec(nn.Tanh),
            LayerSpec(nn.Linear, 6, 6),
            LayerSpec(nn.Linear, 6, 6),
        ]
        return PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
    return {"experts": Experts, "extra": Extra, "partial": Partial}.get(kind, Net)()


def train(engine: Any, draw: Draw, steps: int) -> list[float]:
    """Train on tokens that depend on the rank and the step; the losses."""
    losses = []
    for _ in range(steps if draw.model == "pipeline" else 0):
        generator = torch.Generator().manual_seed(97 * engine.global_steps)
        dtype = next(engine.module.parameters()).dtype
        batches = [torch.randn(2, 2, 6, generator=generator).to(dtype) for _ in range(draw.accumulation)]
        losses.append(float(engine.train_batch(iter([tuple(batch) for batch in batches]))))
    for _ in range(steps if draw.model != "pipeline" else 0):
        for micro in range(draw.accumulation):
            generator = torch.Generator().manual_seed(97 * engine.global_steps + 7 * micro + engine.global_rank)
            tokens = torch.randint(0, 13, (8,), generator=generator)
            loss = torch.nn.functional.cross_entropy(engine(tokens).float(), tokens)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    return losses


def snapshot(engine: Any) -> dict[str, Any]:
    """Everything that this rank holds, as it holds it."""
    wrapper = engine.optimizer
    inner = getattr(wrapper, "optimizer", wrapper)
    found: dict[str, Any] = {}
    for name, p in engine.module.named_parameters():
        found[f"weights/{name}"] = (p.ds_tensor if hasattr(p, "ds_tensor") else p.data).detach().clone()
    found |= {f"buffer/{name}": b.detach().clone() for name, b in engine.module.named_buffers()}
    state_dict = {} if hasattr(engine.module, "forward_funcs") else engine.module.state_dict()
    named = {*found} | {f"weights/{name}" for name, _ in engine.module.named_parameters(remove_duplicate=False)}
    found |= {f"also/{n}": _copied(v) for n, v in state_dict.items() if not {f"weights/{n}", f"buffer/{n}"} & named}
    owners = getattr(wrapper, "fp32_partitioned_groups_flat", None)
    if owners is None:
        owners = [p for group in inner.param_groups for p in group["params"]]
    paddings = [0] * len(owners)
    if engine.zero_optimization_stage() in {1, 2}:
        paddings = getattr(wrapper, "groups_padding", paddings)  # elastic checkpoints leave it out
    for number, (owner, padding) in enumerate(zip(owners, paddings, strict=True)):
        for key, value in [("master", owner), *inner.state.get(owner, {}).items()]:
            is_flat = isinstance(value, torch.Tensor) and value.shape == owner.shape and owner.dim()
            found[f"{key}/{number}"] = _copied(value[: len(value) - padding] if is_flat and padding else value)
    known = {id(owner) for owner in owners} | {id(p) for p in engine.module.parameters()}
    found |= {
        f"state/{key}": _copied(state) for key, state in getattr(inner, "state", {}).items() if id(key) not in known
    }
    for number, group in enumerate(wrapper.param_groups):
        found |= {f"option {key}/{number}": value for key, value in group.items() if key != "params"}
    if engine.lr_scheduler is not None:
        found |= {
            f"scheduler/{k}": v
            for k, v in engine.lr_scheduler.state_dict().items()
            if k != "_get_lr_called_within_step"
        }
    found["scale"] = float(getattr(wrapper, "cur_scale", 0) or 0)
    return found | {"steps": engine.global_steps, "samples": engine.global_samples, "skipped": engine.skipped_steps}


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _named(engine: Any) -> dict[str, Any]:
    """Whole tensors by name, from the live engine; weights alone if some states are not per element."""
    from recipes import common

    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    owned = [(p, state) for p, state in inner.state.items() if isinstance(p, torch.Tensor)]
    states = [(p.numel(), value) for p, state in owned for key, value in state.items() if key != "step"]
    tensors = [(n, v) for n, v in states if isinstance(v, torch.Tensor) and v.dim()]
    simple = all(v.numel() == n for n, v in tensors) and not any(g.get("use_muon") for g in inner.param_groups)
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, simple)
    if all(everyone):
        return {k: v.detach().cpu().clone() for k, v in common.live_tensors(engine).items()}
    if engine.zero_optimization_stage() == 3:
        return {}
    return {f"module/{name}": p.detach().clone() for name, p in engine.module.named_parameters()}


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """What is not in both, or not the same."""
    return sorted(key for key in a.keys() | b.keys() if key not in a or key not in b or not _same(a[key], b[key]))


def _same(a: Any, b: Any) -> bool:
    import numpy as np

    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        a, b = a.to_dense(), b.to_dense()
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a.nan_to_num(), b.nan_to_num()))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, collections.deque) and isinstance(b, collections.deque):
        return a.maxlen == b.maxlen and _same([*a], [*b])
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return float(a) == float(b)
    return bool(a == b)


@functools.cache
def _kernels_in_python() -> None:
    """Give DeepSpeed's optimizers kernels of torch in the place of compiled ones: compiling takes minutes.

    The optimizers' own code, which keeps their states, is DeepSpeed's.
    """
    from deepspeed.ops.op_builder.builder import OpBuilder

    def adam(tensors: Sequence[Any], step: int, lr: float, betas: Any, eps: float, decay: float, *, bias: bool) -> None:
        p, g, m, v = tensors
        g = g.to(p.dtype)
        p.mul_(1 - lr * decay)
        m.mul_(betas[0]).add_(g, alpha=1 - betas[0])
        v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
        first, second = (1 - betas[0] ** step, 1 - betas[1] ** step) if bias else (1.0, 1.0)
        p.addcdiv_(m, (v / second).sqrt_().add_(eps), value=-lr / first)

    def fused(_: int, __: Any, lists: Any, lr: float, b1: float, b2: float, eps: float, step: int, *rest: Any) -> None:
        for g, p, m, v in zip(*lists, strict=True):
            adam((p.data, g, m, v), step, lr, (b1, b2), eps, rest[2], bias=bool(rest[1]))

    def cpu_adam(_: int, step: int, lr: float, b1: float, b2: float, eps: float, decay: float, *rest: Any) -> None:
        bias, p, *others = rest
        adam((p.data, *others), step, lr, (b1, b2), eps, decay, bias=bool(bias))

    def lion(_: int, __: int, lr: float, b1: float, b2: float, decay: float, *tensors: Any) -> None:
        p, g, m = tensors
        p.data.mul_(1 - lr * decay).add_((m * b1 + g * (1 - b1)).sign_(), alpha=-lr)
        m.mul_(b2).add_(g, alpha=1 - b2)

    def adagrad(_: int, __: int, lr: float, eps: float, decay: float, *tensors: Any) -> None:
        p, g, v = tensors
        g = g + decay * p
        v.addcmul_(g, g)
        p.addcdiv_(g, v.sqrt().add_(eps), value=-lr)

    def no_compiler(self: Any, verbose: bool = True) -> None:
        raise RuntimeError(f"{self.name} is not compiled here")

    kernels = types.SimpleNamespace(
        multi_tensor_adam=fused, adam_update=cpu_adam, lion_update=lion, adagrad_update=adagrad,
        **{f"{verb}_{kind}": lambda *_: 0 for verb in ("create", "destroy") for kind in ("adam", "lion", "adagrad")},
    )  # fmt: skip
    known = {"fused_adam", "cpu_adam", "cpu_lion", "cpu_adagrad"}
    load = OpBuilder.load
    OpBuilder.load = lambda self, verbose=True: kernels if self.name in known else load(self, verbose)
    OpBuilder.jit_load = no_compiler


# ------------------------------------------------------------------------------------------------- tests


DRAWN = draws(2400 if thorough() else 8)
CHOSEN = [*{draw.id: draw for draw in (*ALSO, *DRAWN)}.values()]
REFUSED = (
    r"holds states that cannot be re-partitioned",  # Adafactor's rows and columns, for example
    r"holds .*, but the engine's optimizer keeps",  # the engine's differs, such as torch's Adagrad without offload
    r"has states of parameters that DeepSpeed has replaced by masters",
    r"DeepSpeed has rebuilt the optimizer of \d groups",
    r"no other layout can restore _extra_state, own, count of the model",
)
"""Why a save may not be restored on other ranks or at another stage."""
DEEPSPEED_ALSO = {"loaded": "deepspeed restored", "restored": "deepspeed restored", "trained": "deepspeed trained"}
"""Differences that DeepSpeed's own load leaves too: torch adds options, or casts a state to the type of its weights."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: TempPathFactory) -> dict[str, dict[str, Any]]:
    return run(CHOSEN, tmp_path_factory.mktemp("restoring"))


def _trained(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Those that DeepSpeed itself can train and save."""
    return {name: one for name, one in found.items() if not one.get("deepspeed", "").startswith("cannot train")}


def test_most_configurations_are_ones_that_deepspeed_can_train(found: dict[str, dict[str, Any]]) -> None:
    assert found.keys() == {draw.id for draw in CHOSEN}
    reasons = Counter(str(one["deepspeed"])[:90] for one in found.values() if one.get("deepspeed"))
    print(f"{len(found)} configurations, {len(_trained(found))} of which DeepSpeed trains; else: {reasons}")  # noqa: T201
    assert len(_trained(found)) > 0.7 * len(found)


def test_each_is_saved_and_sound(found: dict[str, dict[str, Any]]) -> None:
    wrong: dict[str, Any] = {}
    for name, one in _trained(found).items():
        save = one["save"]
        if "it could not be restored: elastic_checkpoint " in save:
            # DeepSpeed saves a part of a state: nothing could restore it.
            sound = any(kind in name for kind in ("Muon", "Unusual", *RARE))
        elif why := [reason for kind, reason in UNSAVED.items() if all(part in name for part in kind.split("-"))]:
            sound = re.search(why[0], save) is not None
        else:
            reports = [one.get(f"verify {whose}", "not run") for whose in ("ours", "theirs")]
            sound = (save, one["kept"]) == ("", []) and all(not r or "infinite values" in r for r in reports)
        if not sound:
            wrong[name] = {key: one.get(key) for key in ("save", "kept", "verify ours", "verify theirs")}
    assert not wrong


def test_the_first_save_is_matched_by_a_description_of_its_files(found: dict[str, dict[str, Any]]) -> None:
    described = {name: one["misdescribed"] for name, one in found.items() if "misdescribed" in one}
    assert len(described) > 0.5 * len(found)
    assert not {name: what for name, what in described.items() if what}


def test_no_save_of_deepspeed_is_read_with_other_parameters_in_its_groups(found: dict[str, dict[str, Any]]) -> None:
    read = {name: one["misnamed"] for name, one in found.items() if "misnamed" in one}
    assert len(read) > 0.5 * len(found)
    assert not {name: groups for name, groups in read.items() if groups}


def test_what_deepspeed_cannot_save_is_refused_with_the_reason(found: dict[str, dict[str, Any]]) -> None:
    refused = {name: one["save"] for name, one in found.items() if "cannot save" in one.get("deepspeed", "")}
    assert refused
    reason = "has states of parameters that DeepSpeed has replaced by masters"
    assert not {name: why for name, why in refused.items() if reason not in why}


def test_each_is_restored_on_the_same_ranks_and_trains_on_as_before(found: dict[str, dict[str, Any]]) -> None:
    saved = {name: one for name, one in _trained(found).items() if not one["save"]}
    facts = ("load", "restore", "client_state", "trains")
    failed = {name: {key: one.get(key) for key in facts if one.get(key) != ""} for name, one in saved.items()}
    assert not {name: why for name, why in failed.items() if why}
    differ = {
        name: {key: more for key, theirs in DEEPSPEED_ALSO.items() if (more := {*one[key]} - {*one.get(theirs, ())})}
        for name, one in saved.items()
    }
    assert not {name: what for name, what in differ.items() if what}


def test_each_is_restored_elsewhere_or_refused_before_the_engine_changes(found: dict[str, dict[str, Any]]) -> None:
    counts: Counter[str] = Counter()
    usual = {draw.id for draw in DRAWN}
    wrong: dict[str, Any] = {}
    for name, one in found.items():
        if "other" not in one:
            continue
        if why := one["other"]:
            counts["refused"] += name in usual
            right = any(re.search(pattern, why) for pattern in REFUSED) and one["other touched"] == []
        else:
            counts["restored"] += name in usual
            trains = not one["other trains"] or "Param gradient must be a 2D matrix" in one["other trains"]  # Muon
            # A state of no parameter must not be dropped.
            right = "torch_Shared" not in name and one["other differs"] == [] and trains
        if not right:
            wrong[name] = {key: value for key, value in one.items() if key.startswith("other")}
    print(f"on other ranks or at another stage: {dict(counts)}")  # noqa: T201
    assert not wrong
    assert counts["restored"] > 4 * counts["refused"]
