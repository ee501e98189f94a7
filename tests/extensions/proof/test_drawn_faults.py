"""Faults drawn by seeds in live runs of several ranks: each is named with its tensor and rank, and nothing else is."""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from tests import sampling
from tests.forked import each_on_ranks

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.deepspeed, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

LAYOUTS = {"ddp": 3, "fsdp": 3, "hsdp": 4, "tp": 2, "zero0": 3, "zero1": 2, "zero2": 3, "zero3": 2}
"""The ranks of each layout."""
RESTORED = {"zero2 of zero3": 3, "zero3 of zero1": 3, "zero1 of zero2": 2}
"""The ranks of a stage that restores the save of another."""
DRAWS = {True: 190, False: 3}
"""Draws of each layout, in a thorough run and in others."""


class _Net(torch.nn.Module):  # type: ignore[misc, name-defined]  # torch is not followed
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 5)
        self.d = torch.nn.Linear(6, 6, bias=False)
        if tied:
            self.d.weight = self.a.weight
        self.register_buffer("seen", torch.tensor([1.0, 2.0, float("nan")]))

    def forward(self, x: Any) -> Any:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(self.d(x))))))


@dataclass
class _Run:
    """A live run on this rank."""

    model: Any
    optimizer: Any
    """Its torch optimizer."""
    prove: Callable[[], Any]
    named: dict[str, Any]
    """The module's parameters."""
    owned: dict[str, list[str]] = field(default_factory=dict)
    """Empty, or with ZeRO the names of all parameters: a flat buffer has parts of several."""


@dataclass
class _Fault:
    """A fault that was made on this rank."""

    expected: set[str]
    """All names that may be told."""
    undo: Callable[[], None]


def _start(layout: str, directory: Path) -> _Run:
    """Train for two steps, and save."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    net = _Net(tied=layout != "tp")
    if layout in {"fsdp", "hsdp"}:
        ranks = torch.distributed.get_world_size()
        shape, names = ((2, 2), ("rep", "fsdp")) if layout == "hsdp" else ((ranks,), ("fsdp",))
        fully_shard(net, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    if layout == "tp":
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
        parallelize_module(net, mesh, {"a": ColwiseParallel(), "b": RowwiseParallel()})
    weights, biases = ([p for n, p in net.named_parameters() if n.endswith(end)] for end in ("weight", "bias"))
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=0.01)
    if not layout.startswith("zero"):
        model = torch.nn.parallel.DistributedDataParallel(net) if layout == "ddp" else net
        for step in range(2):
            model(torch.full((2, 6), step + 1.0)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        saved, states = get_state_dict(net, optimizer)
        dcp.save({"model": saved, "optim": states}, checkpoint_id=str(directory))
        prove = lambda: ckpttool.prove(model, directory, optimizer=optimizer)  # noqa: E731
        return _Run(model, optimizer, prove, dict(net.named_parameters()))
    import deepspeed

    stage, source = int(layout[4]), layout.partition(" of ")[2]
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True}
    config |= {"zero_optimization": {"stage": stage}, **({"bf16": {"enabled": True}} if stage else {})}
    engine = deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]
    for step in range(0 if source else 2):
        inputs = torch.full((2, 6), step + 1.0, dtype=torch.bfloat16 if stage else torch.float32)
        engine.backward(engine(inputs).float().square().sum())
        engine.step()
    directory = directory.with_name(source or directory.name)
    _ = ckpttool.load(engine, directory) if source else ckpttool.CheckpointManager(directory).save(engine)
    inner = engine.optimizer.optimizer if stage else engine.optimizer
    named = dict(engine.module.named_parameters())
    return _Run(engine, inner, lambda: ckpttool.prove(engine, directory), named, {"all": [*named]} if stage else {})


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.data


def _truth(run: _Run) -> dict[str, str]:
    """Return hashes of the whole masters and states of an engine, gathered by the places of its parameters."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from recipes import common

    found, zero, names = {}, run.model.optimizer, {id(p): name for name, p in run.named.items()}
    for key in ("weights", "exp_avg", "exp_avg_sq"):
        if hasattr(zero, "fp16_groups"):
            get = (
                safe_get_full_fp32_param
                if key == "weights"
                else partial(safe_get_full_optimizer_state, optim_state_key=key)
            )
            whole = {name: get(p) for name, p in run.named.items()}
        else:
            whole = {}
            for g, flat in enumerate(zero.single_partition_of_fp32_groups):
                own = flat.data if key == "weights" else run.optimizer.state[flat][key]
                every = common.gathered(own, zero.real_dp_process_group[g])
                group = zero.bit16_groups[g]
                whole |= {names[id(p)]: common.cut(every, zero.bit16_groups_flat[g], p) for p in group}
        for name, tensor in whole.items():
            found[f"{key} of {name}"] = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
    return found


def _of_elements(run: _Run, draw: random.Random, here: bool, alone: bool) -> _Fault:
    """Change elements of a weight, a state or a copy of the module."""
    state, key = run.optimizer.state, draw.choice(("weights", "exp_avg", "exp_avg_sq", "module"))
    name = draw.choice([*run.named])
    p = run.named[name]
    expected = {f"{key} of {name}"}
    if run.owned and key == "module":
        tensor = p.ds_tensor if hasattr(p, "ds_tensor") else p.data
    elif run.owned:
        flat = (
            draw.choice([*state]) if hasattr(p, "ds_tensor") else draw.choice(run.optimizer.param_groups)["params"][0]
        )
        tensor, expected = (flat if key == "weights" else state[flat][key]).data, set()
    else:
        key = "weights" if key == "module" else key
        expected = {f"{key} of {name}"}
        tensor = _local(p if key == "weights" else state[p][key])
    before = tensor.clone()
    view = tensor.view(-1) if tensor.is_contiguous() else tensor.t().view(-1)
    how, place = draw.choice(("zero", "more", "nan", "sign", "row")), draw.random()
    if here and len(view):
        at = int(place * len(view))
        if how == "row":
            view[at : at + 6] += 1
        else:
            view[at] = {"zero": 0.0, "more": view[at] + 1, "nan": float("nan"), "sign": -view[at]}[how]
    return _Fault(expected, lambda: tensor.copy_(before))


def _of_states(run: _Run, draw: random.Random, here: bool, alone: bool) -> _Fault:
    """Remove a state, exchange two, or give one another type."""
    state, key = run.optimizer.state, draw.choice(("exp_avg", "exp_avg_sq"))
    how = draw.choice(("absent", "exchanged", "type", "number", "number absent"))
    owners = [*state]
    owner = draw.choice(owners)
    names = {id(p): name for name, p in run.named.items()}
    told = [names[id(owner)]] if not run.owned else run.owned["all"]
    other = next((o for o in owners if o is not owner and o.shape == owner.shape), None)
    kept = [(o, dict(state[o])) for o in owners]
    if how == "exchanged" and other is None:
        how = "absent"
    if how == "exchanged":
        told = told if run.owned else [names[id(owner)], names[id(other)]]
    key = "step" if how.startswith("number") else key
    if here and how in {"absent", "number absent"}:
        del state[owner][key]
    elif here and how == "exchanged":
        state[owner][key], state[other][key] = state[other][key], state[owner][key]
    elif here and how == "type":
        state[owner][key] = state[owner][key].double()
    elif here:
        state[owner][key] = state[owner][key] + draw.choice((1, -2, float("nan")))

    def undo() -> None:
        for one, values in kept:
            state[one].clear()
            state[one].update(values)

    return _Fault({f"{key} of {name}" for name in told}, undo)


def _of_groups(run: _Run, draw: random.Random, here: bool, alone: bool) -> _Fault:
    """Change a hyper-parameter, or the group of a parameter."""
    groups = run.optimizer.param_groups
    how = draw.choice(("lr", "betas", "amsgrad", "group"))
    kept = [dict(group) for group in groups]
    names = {f"{{}} of the group of {name}" for name in run.named}
    if how == "group" and not run.owned:
        if here:
            groups[0]["params"], groups[1]["params"] = (
                groups[0]["params"][1:],
                groups[1]["params"] + groups[0]["params"][:1],
            )
        how = "weight_decay"
    else:
        how = "lr" if how == "group" else how
        if here:
            draw.choice(groups)[how] = {"lr": 0.02, "betas": (0.9, 0.9), "amsgrad": True}[how]

    def undo() -> None:
        for group, values in zip(groups, kept, strict=True):
            group.update(values)

    return _Fault({name.format(how) for name in names}, undo)


def _of_run(run: _Run, draw: random.Random, here: bool, alone: bool) -> _Fault:
    """Change a buffer, or a counter of the engine."""
    counter = draw.choice(("global_steps", "skipped_steps"))
    if hasattr(run.model, counter) and draw.random() < 0.5:
        before = getattr(run.model, counter)
        setattr(run.model, counter, before + here)
        return _Fault({counter}, lambda: setattr(run.model, counter, before))
    buffer = next(run.model.buffers())
    kept = buffer.clone()
    if here:
        buffer[draw.randrange(2)] += 1
    files = not hasattr(run.model, counter)  # no save has recorded whether ranks had one value
    return _Fault({"not compared: seen" if files and alone else "weights of seen"}, lambda: buffer.copy_(kept))


def _of_modules(run: _Run, draw: random.Random, here: bool, alone: bool) -> _Fault:
    """Take a parameter from the module, and from an optimizer that has parameters."""
    name = draw.choice([name for name in run.named if name[0] in "bc"])  # others are tied
    path, _, local = name.rpartition(".")
    p = run.named[name]
    inner = run.model.module if hasattr(run.model, "module") else run.model
    own = inner.get_submodule(path)._parameters
    groups, state = run.optimizer.param_groups, run.optimizer.state
    kept, states = [list(group["params"]) for group in groups], dict(state)
    keys = ("weights", "module", "exp_avg", "exp_avg_sq", "step")
    if here:
        own[local] = None
        for group in () if run.owned else groups:
            group["params"] = [one for one in group["params"] if one is not p]
        state.pop(p, None)

    def undo() -> None:
        own[local] = p
        for group, parameters in zip(groups, kept, strict=True):
            group["params"] = parameters
        state.clear()  # in the order in which it was
        state.update(states)

    options = {f"{key} of the group of {name}" for group in groups for key in group}
    return _Fault({*(f"{key} of {name}" for key in keys), *options, "the engine:"}, undo)


FAULTS = (_of_elements, _of_elements, _of_states, _of_groups, _of_run, _of_modules)


def _faults(job: dict[str, Any], directory: Path) -> list[dict[str, Any]]:
    """Prove a run, then with one drawn fault after the other."""
    with torch.no_grad():
        with torch.enable_grad():
            run = _start(job["id"], directory / job["id"])
        ranks, me = torch.distributed.get_world_size(), torch.distributed.get_rank()
        found = [{"seed": -1, "what": "unchanged", "expected": set(), "told": _told(run)}]
        truth = _truth(run) if run.owned else {}
        for seed in job["seeds"]:
            draw = random.Random(f"{job['id']} {seed}")  # noqa: S311  no secret
            alone, rank, make = draw.random() < 0.7, draw.randrange(ranks), draw.choice(FAULTS)
            fault = make(run, draw, here := me == rank or not alone, alone)
            expected = fault.expected
            if not expected:  # elements of a flat buffer: DeepSpeed knows whose they are
                now = _truth(run)
                expected = {name for name in now if now[name] != truth[name]}
            what = f"{make.__name__} on {rank if alone else 'all'}"
            found.append(
                {"seed": seed, "what": what, "expected": expected, "rank": rank if alone else None, "here": here}
            )
            found[-1]["told"] = _told(run)
            fault.undo()
        found.append({"seed": -2, "what": "undone", "expected": set(), "told": _told(run)})
    return found


def _told(run: _Run) -> list[str]:
    """Return the mismatches of a proof; none if it is proven with all of its parts."""
    try:
        proof = run.prove()
    except ckpttool.ProofError as error:
        return list(error.mismatches)
    except ckpttool.CkptError as error:
        return [str(error)]
    return [f"not compared: {text}" for text in proof.unproven]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    seeds = range(DRAWS[sampling.thorough()])
    jobs = [
        {"id": name, "world_size": ranks, "seeds": seeds, "turn": int(name in RESTORED)}
        for name, ranks in (LAYOUTS | RESTORED).items()
    ]
    return each_on_ranks(_faults, jobs, tmp_path_factory.mktemp("drawn"))


@pytest.mark.parametrize("layout", [*LAYOUTS, *RESTORED])
def test_a_drawn_fault_in_a_live_run_is_named_and_nothing_else_is(layout: str, drawn: dict[str, list[Any]]) -> None:
    ranks = drawn[layout]
    for one, others in zip(ranks[0], zip(*ranks, strict=True), strict=True):
        where = one["seed"], one["what"], one["expected"], one["told"]
        assert all(other["told"] == one["told"] for other in others), where
        assert bool(one["told"]) == bool(one["expected"]), where
        for told in one["told"]:
            text = told if layout == "tp" else told.replace("d.weight", "a.weight")  # tied
            assert any(text.startswith(f"{name} ") for name in one["expected"]), (text, where)
        if one["told"] and one.get("rank") is not None:
            assert re.search(rf"\branks? [^;]*\b{one['rank']}\b", "; ".join(one["told"])), where
