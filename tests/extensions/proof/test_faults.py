"""``prove`` finds and names faults that people have had after a resume, and nothing beside them.

Each is made in a live run after a correct restore, by torch and DeepSpeed alone: by what they keep, not by how ckpttool
reads it. The same run is proven before and after. The comment of a fault names a thread of someone who had it.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import torch
import torch.distributed as dist

import ckpttool
from tests import forked, sampling
from tests.deepspeed import engines
from tests.forked import each_on_ranks
from tests.formats import fsdp_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

pytestmark = pytest.mark.deepspeed

STATES = ("exp_avg", "exp_avg_sq")
Make = TypeVar("Make", bound="Callable[[Run], Sequence[str | Sequence[str]]]")
STEPS = 3
SKIPPED = 30
"""Steps that a run in fp16 skips at most, because its loss scale is too large."""


class Run:
    """A live run under DeepSpeed, and its save after three steps."""

    fused, square, pair = "a.weight", "b.weight", ("b.weight", "c.weight")
    """A matrix with an even number of rows, a square one, and two tensors of one shape."""
    frozen: Sequence[str] = ()
    tied: Mapping[str, str] = {}
    """Other names of tied weights."""

    def __init__(self, job: dict[str, Any], root: Path) -> None:
        self.job, self.root, self.stage = job, root, job.get("stage", 0)
        self.undo: Callable[[], None] = lambda: None
        """Takes back what a restore does not."""
        self.prover: Callable[[], Any] = self.prove
        self.older: list[tuple[Any, dict[str, Any]]] = []
        """What the optimizer of this rank had a step before the save, as ``owners``."""

    def train(self) -> None:
        """Train and save, and build another run."""
        self._build(0)
        self._step(STEPS - 1 if self.job["dtype"] != "fp16" else SKIPPED + STEPS)
        self.older = [(p.detach().clone(), {key: own[key].clone() for key in STATES}) for p, own in self.owners()]
        self._step(1)
        self._save()
        self._build(1)

    def _build(self, seed: int) -> None:
        """Build a run; seed 0 is that of the save."""
        job = self.job
        groups = job.get("groups", "two")
        self.model = engines.build(self.stage, job["dtype"], groups, job.get("optimizer", "adamw"), seed)
        self.net = self.model.module
        if groups == "frozen c":
            self.frozen, self.pair = ("c.weight", "c.bias"), ("a.weight", "b.weight")
        self.net.register_buffer("positions", torch.arange(5.0) + 10 * seed)
        wrapper = self.model.optimizer
        self.optimizer = getattr(wrapper, "optimizer", wrapper)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.model.lr_scheduler = self.scheduler

    def _step(self, count: int) -> None:
        engines.step(self.model, count)

    def _save(self) -> None:
        ckpttool.CheckpointManager(self.root).save(self.model, client_state={"samples": 12, "epoch": 1})

    def restore(self) -> str:
        """Restore the save, correctly; what the proof says."""
        self._take_back()
        manager = ckpttool.CheckpointManager(self.root)
        manager.restore(self.model, prove=True)
        assert manager.restored is not None
        return str(manager.restored.proof)

    def _take_back(self) -> None:
        self.undo()
        self.undo, self.prover = lambda: None, self.prove

    def prove(self) -> Any:
        """Prove the live state."""
        return ckpttool.prove(self.model, self.root)

    @property
    def copies(self) -> str:
        """Name of what the module computes with."""
        return "weights" if self.stage == 0 and self.job["dtype"] == "fp32" else "module"

    def trained(self) -> list[str]:
        """Names of the trained parameters."""
        return [name for name, p in self.net.named_parameters() if p.requires_grad]

    def owners(self) -> list[tuple[Any, dict[str, Any]]]:
        """What the optimizer updates on this rank, each with its states."""
        own = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        if self.stage:
            name = "fp32_partitioned_groups_flat" if self.stage == 3 else "single_partition_of_fp32_groups"
            own = getattr(self.model.optimizer, name)
        return [(p, self.optimizer.state.get(p, {})) for p in own]

    def parts(self, key: str, name: str) -> list[tuple[Any, int]]:
        """This rank's parts of a tensor: a view of each, and its first index in the tensor."""
        p = dict(self.net.named_parameters())[name]
        if self.stage == 3:
            return [self._slice(key, p)]
        if key == "module":
            return [(p.data.view(-1), 0)]
        if self.stage:
            if p._hp_mapping is None:
                return []
            place, groups = p._hp_mapping.hp_fragment_address, self.model.optimizer.bit16_groups
            owner, own = self.owners()[next(i for i, group in enumerate(groups) if any(q is p for q in group))]
            flat = owner.data if key == "weights" else own[key]
            return [(flat.narrow(0, place.start, place.numel), p._hp_mapping.lp_fragment_address.start)]
        owner = self._owner(p)
        whole = owner.data if key == "weights" else self.optimizer.state[owner][key]
        return [(whole.view(-1), 0)]

    def _slice(self, key: str, p: Any) -> tuple[Any, int]:
        size, place = p.ds_tensor.numel(), dist.get_rank() * p.ds_tensor.numel()
        if key == "module" or not p.requires_grad:
            return p.ds_tensor.data, place
        groups = self.model.optimizer.fp16_groups
        number = next(i for i, group in enumerate(groups) if any(q is p for q in group))
        before = sum(q.ds_tensor.numel() for q in groups[number][: [q is p for q in groups[number]].index(True)])
        owner, own = self.owners()[number]
        return (owner.data if key == "weights" else own[key]).narrow(0, before, size), place

    def _owner(self, p: Any) -> Any:
        wrapper = self.model.optimizer
        if wrapper is self.optimizer:
            return p
        pairs = zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
        return next(o for own, held in pairs for q, o in zip(own, held, strict=True) if q is p)

    def whole(self, key: str, name: str) -> Any:
        """A tensor, on every rank."""
        p = dict(self.net.named_parameters())[name]
        shape = getattr(p, "ds_shape", p.shape)
        parts = self.parts(key, name)
        if not self.stage or (self.stage < 3 and key == "module"):
            return parts[0][0].detach().clone().view(shape)
        found = torch.zeros(shape.numel() + 64)
        for view, start in parts:
            found[start : start + view.numel()] = view.float()
        dist.all_reduce(found)
        return found[: shape.numel()].view(shape).clone()

    def change(self, key: str, name: str, function: Callable[[Any], Any]) -> str:
        """Change a tensor on all ranks; its name as errors have it."""
        new = function(self.whole(key, name)).reshape(-1)
        with torch.no_grad():
            for view, start in self.parts(key, name):
                piece = new[start : start + view.numel()]
                view[: len(piece)].copy_(piece)
        return f"{key} of {name}"


class Sharded(Run):
    """A live run of FSDP2, HSDP or tensor parallelism, and its save by torch."""

    fused, square, pair = "up.weight", "frozen.weight", ("norm.weight", "norm.bias")
    frozen = ("frozen.weight", "frozen.bias")
    tied = {"head.weight": "embed.weight"}  # noqa: RUF012  read alone

    def _build(self, seed: int) -> None:
        parameters = "decay" if self.job["layout"] == "nested" else "named"
        self.net, self.optimizer, self.scheduler = fsdp_runs.start({**self.job, "seed": seed, "parameters": parameters})
        self.model = self.net

    def _step(self, count: int) -> None:
        for step in range(count):
            fsdp_runs.advance(self.net, self.optimizer, step)
            self.scheduler.step()

    def _save(self) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

        if self.job["layout"] == "nested":
            states = get_optimizer_state_dict(self.net, self.optimizer)
            dcp.save({"model": get_model_state_dict(self.net), "optim": states}, checkpoint_id=str(self.root))
            return
        if dist.get_rank() == 0:
            self.root.mkdir(parents=True)
        dist.barrier()
        suffix = f"world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
        torch.save(self.net.state_dict(), self.root / f"model_{suffix}")
        torch.save(self.optimizer.state_dict(), self.root / f"optim_{suffix}")
        torch.save({"lr_scheduler": self.scheduler.state_dict()}, self.root / f"extra_state_{suffix}")
        dist.barrier()

    def restore(self) -> str:
        self._take_back()
        self.optimizer.state.clear()  # torch leaves out states of which some are missing
        fsdp_runs.LOADERS[self.job["layout"]](self.net, self.optimizer, str(self.root))
        if self.job["layout"] == "verl":
            suffix = f"world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
            extra = torch.load(self.root / f"extra_state_{suffix}", weights_only=False)
            self.scheduler.load_state_dict(extra["lr_scheduler"])
        return str(self.prove())

    def prove(self) -> Any:
        return ckpttool.prove(self.net, self.root, optimizer=self.optimizer, scheduler=self.scheduler)

    @property
    def copies(self) -> str:
        return "weights"

    def parts(self, key: str, name: str) -> list[tuple[Any, int]]:
        p = dict(self.net.named_parameters())[name]
        value = p.detach() if key == "weights" else self.optimizer.state[p][key]
        return [(value, 0)]

    def whole(self, key: str, name: str) -> Any:
        ((value, _),) = self.parts(key, name)
        return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()

    def change(self, key: str, name: str, function: Callable[[Any], Any]) -> str:
        new = function(self.whole(key, name))
        ((value, _),) = self.parts(key, name)
        own = self._own_part(new, dict(self.net.named_parameters())[name])
        with torch.no_grad():
            value.to_local().copy_(own)
        return f"{key} of {name}"

    @staticmethod
    def _own_part(value: Any, p: Any) -> Any:
        """This rank's part of a whole tensor: torch cannot cut what is sharded twice along one dimension."""
        kinds = list(enumerate(p.placements))
        if any(type(kind).__name__ == "_StridedShard" for kind in p.placements):
            kinds.reverse()  # tensor parallelism cuts first
        for dim, kind in kinds:
            if hasattr(kind, "dim"):
                parts = value.chunk(p.device_mesh.size(dim), kind.dim)
                place = p.device_mesh.get_coordinate()[dim]
                value = parts[place] if place < len(parts) else value.narrow(kind.dim, 0, 0)
        return value


# ------------------------------------------------------------------------------------------------- faults


@dataclass(frozen=True)
class Fault:
    """A fault."""

    make: Callable[[Run], Sequence[str | Sequence[str]]]
    """Makes it on all ranks; returns what it breaks, as errors name it, or under any of some names."""
    fits: Callable[[dict[str, Any]], bool]
    """Whether the run of a job can have it."""
    where: str = ""
    """What the error tells of where."""


FAULTS: dict[str, Fault] = {}


def _fault(
    name: str, fits: Callable[[dict[str, Any]], bool] = lambda _: True, where: str = ""
) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        FAULTS[name] = Fault(make, fits, where)
        return make

    return register


def _deepspeed(job: dict[str, Any]) -> bool:
    return "stage" in job


def _half(job: dict[str, Any]) -> bool:
    return job["dtype"] in {"bf16", "fp16"}


def _of_all(run: Run, *keys: str) -> list[str]:
    return [f"{key} of {name}" for key in keys for name in run.trained()]


def _of_groups(run: Run, key: str, *numbers: int) -> list[list[str]]:
    """A hyper-parameter of some groups: errors name any parameter of each."""
    trained = run.trained()
    if len(run.optimizer.param_groups) == 2:
        matrices = [name for name in trained if dict(run.net.named_parameters())[name].dim() > 1]
        if _deepspeed(run.job):
            matrices = [name for name in trained if name.endswith("weight")]
        members = [matrices, [name for name in trained if name not in matrices]]
    else:
        members = [trained]
    return [[f"{key} of the group of {name}" for name in members[number]] for number in numbers]


@_fault("the optimizer's states are not loaded")  # AReaL#1468
def no_states(run: Run) -> list[str]:
    run.optimizer.state.clear()
    return _of_all(run, *STATES, "step")


@_fault("DeepSpeed loads without the optimizer's states", _deepspeed)  # DeepSpeed#6691
def loaded_without_states(run: Run) -> list[str | Sequence[str]]:
    run.model.destroy()
    run._build(2)
    run.model.load_checkpoint(str(run.root), load_optimizer_states=False)
    masters = ["weights"] if _half(run.job) else []  # rebuilt from rounded copies
    rates = _of_groups(run, "lr", *range(len(run.optimizer.param_groups)))
    scale = ["loss_scale"] if run.job["dtype"] == "fp16" else []
    return [*_of_all(run, *STATES, "step", *masters), *rates, *scale]


@_fault("one of two states is not loaded")
def no_second_moment(run: Run) -> list[str]:
    for _, own in run.owners():
        own.pop("exp_avg_sq")
    return _of_all(run, "exp_avg_sq")


@_fault("a state of one rank has another shape", lambda job: job.get("stage", 0) > 0, "on rank 1")
def other_shape(run: Run) -> list[str]:
    if torch.distributed.get_rank() == 1:
        own = next(own for _, own in run.owners())
        own["exp_avg"] = own["exp_avg"].reshape(-1, 1)
    return ["exp_avg"]


@_fault("the steps of Adam begin anew")  # SkyRL#1403
def step_of_zero(run: Run) -> list[str]:
    for _, own in run.owners():
        own["step"] = torch.zeros_like(own["step"]) if isinstance(own["step"], torch.Tensor) else 0
    return _of_all(run, "step")


@_fault("the moments are zeros")  # torchtitan#1136
def zero_moments(run: Run) -> list[str]:
    for _, own in run.owners():
        for key in STATES:
            own[key].zero_()
    return _of_all(run, *STATES)


@_fault("a second load into a used optimizer mixes two saves")
def second_load(run: Run) -> list[str]:
    for (_, own), (_, old) in zip(run.owners(), run.older, strict=True):
        own["exp_avg_sq"].copy_(old["exp_avg_sq"])
    return _of_all(run, "exp_avg_sq")


@_fault("masters are rebuilt from bf16 copies", lambda job: job["dtype"] != "bfloat16")
def rounded_masters(run: Run) -> list[str]:
    return [run.change("weights", name, lambda t: t.bfloat16().float()) for name in run.trained()]


@_fault("gate and up halves of a fused weight are permuted")
def swapped_halves(run: Run) -> list[str]:
    return [run.change(key, run.fused, lambda t: torch.cat([*t.chunk(2)][::-1])) for key in ("weights", *STATES)]


@_fault("heads of queries and keys are interleaved")
def interleaved_heads(run: Run) -> list[str]:
    return [run.change("weights", run.fused, lambda t: t.unflatten(0, (2, -1)).transpose(0, 1).reshape(t.shape))]


@_fault("a square weight is transposed")
def transposed(run: Run) -> list[str]:
    return [run.change("weights", run.square, lambda t: t.T.contiguous())]


@_fault("two layers have each other's moments")
def swapped_layers(run: Run) -> list[str]:
    one, other = (run.whole("exp_avg", name) for name in run.pair)
    return [run.change("exp_avg", run.pair[0], lambda _: other), run.change("exp_avg", run.pair[1], lambda _: one)]


@_fault("one element has the other sign", where="1 of the elements 5 to 5")
def one_sign(run: Run) -> list[str]:
    def flipped(t: Any) -> Any:
        t.view(-1)[5] *= -1
        return t

    return [run.change("exp_avg", run.fused, flipped)]


@_fault("the last bit of one element is flipped", where="1 of the elements 7 to 7")
def last_bit(run: Run) -> list[str]:
    def flipped(t: Any) -> Any:
        t.view(-1)[7:8].view(torch.int32 if t.dtype == torch.float32 else torch.int16).bitwise_xor_(1)
        return t

    return [run.change("exp_avg_sq", run.fused, flipped)]


@_fault("a shard begins one element late")
def shifted(run: Run) -> list[str]:
    return [run.change("weights", run.fused, lambda t: t.reshape(-1).roll(1).view(t.shape))]


def _has_replicas(job: dict[str, Any]) -> bool:
    return bool(job["stage"] < 3 if _deepspeed(job) else job["mesh"] == "hsdp")


@_fault("a replica of one rank differs", _has_replicas, where="differs between ranks ")  # Megatron#6920
def one_replica(run: Run) -> list[str]:
    ((view, _),) = run.parts(run.copies, run.fused)
    if dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            (view.to_local() if hasattr(view, "to_local") else view).view(-1)[0] += 1
    return [f"{run.copies} of {run.fused}"]


@_fault("copies of the weights are not updated from the masters", _half)
def stale_copies(run: Run) -> list[str]:
    return [run.change("module", name, lambda t: t + 1) for name in run.trained()]


@_fault("one rank has its shard of an older save", lambda job: job.get("stage") != 0, where=" rank")
def one_old_shard(run: Run) -> list[str]:
    last = dist.get_world_size() - 1
    keys, names = ("weights", *STATES), run.trained()

    def shards() -> dict[str, list[Any]]:
        return {f"{k} of {n}": [_local(v).clone() for v, _ in run.parts(k, n)] for k in keys for n in names}

    before = shards()
    if dist.get_rank() == last:
        with torch.no_grad():
            for (p, own), (old, states) in zip(run.owners(), run.older, strict=True):
                for new, value in ((p, old), *((own[key], states[key]) for key in STATES)):
                    _local(new).copy_(_local(value))
    after = shards()
    changed = [[k for k, own in before.items() if not all(map(torch.equal, own, after[k]))]]
    dist.broadcast_object_list(changed, src=last)
    return list(changed[0])


def _local(value: Any) -> Any:
    return value.detach().to_local() if hasattr(value, "to_local") else value.data


@_fault("the learning rate begins anew")  # KempnerForge#114
def reset_rate(run: Run) -> list[list[str]]:
    run.optimizer.param_groups[0]["lr"] = 0.5
    return _of_groups(run, "lr", 0)


@_fault("the groups have each other's hyper-parameters", lambda job: _two_groups(job))
def swapped_groups(run: Run) -> list[list[str]]:
    one, other = run.optimizer.param_groups
    keys = [key for key in one if key not in {"params", "param_names"} and one[key] != other[key]]
    for key in keys:
        one[key], other[key] = other[key], one[key]
    return [names for key in keys for names in _of_groups(run, key, 0, 1)]


@_fault("one rank alone has another learning rate", where=" on rank ")
def one_rate(run: Run) -> list[list[str]]:
    if dist.get_rank() == dist.get_world_size() - 1:
        run.optimizer.param_groups[-1]["lr"] = 0.7
    return _of_groups(run, "lr", len(run.optimizer.param_groups) - 1)


def _two_groups(job: dict[str, Any]) -> bool:
    return job.get("groups") is None and job.get("layout") != "verl"


@_fault("the scheduler is one step behind", lambda job: job.get("layout") != "nested")
def late_scheduler(run: Run) -> list[str]:
    run.scheduler.last_epoch -= 1
    run.scheduler._step_count -= 1
    return ["scheduler.last_epoch", "scheduler._step_count"]


@_fault("the loss scale begins anew", lambda job: job["dtype"] == "fp16")
def reset_scale(run: Run) -> list[str]:
    wrapper = run.model.optimizer
    scaler = getattr(wrapper, "loss_scaler", None) or wrapper.loss_scale_config
    scaler.cur_scale = 2.0**16
    return ["loss_scale"]


@_fault("the counters begin anew", _deepspeed)
def reset_counters(run: Run) -> list[str]:
    run.model.global_steps = run.model.global_samples = 0
    return ["global_steps", "global_samples"]


@_fault("the position in the data is of another step", _deepspeed)
def other_position(run: Run) -> list[str]:
    load = run.model.load_checkpoint

    def loaded(*arguments: Any, **options: Any) -> Any:
        path, state = load(*arguments, **options)
        return path, {**state, "samples": 8}

    def undo() -> None:
        run.model.load_checkpoint = load

    run.model.load_checkpoint, run.undo = loaded, undo
    run.prover = lambda: ckpttool.load(run.model, run.root, prove=True)
    return ["client_state.samples"]


@_fault("a buffer is not restored")
def lost_buffer(run: Run) -> list[str]:
    dict(run.net.named_buffers())["positions"].zero_()
    return ["weights of positions"]


@_fault("frozen weights are initialised anew", lambda job: not _deepspeed(job) or "groups" in job)
def new_frozen(run: Run) -> list[str]:
    key = "module" if run.stage else "weights"
    for name in run.frozen:
        run.change(key, name, lambda t: torch.full_like(t, 0.25))
    return [f"weights of {name}" for name in run.frozen]


@_fault("a tied weight is untied, and one copy is not loaded", lambda job: not _deepspeed(job))
def broken_tie(run: Run) -> list[str]:
    tied = run.net.head.weight
    run.net.head.weight = torch.nn.Parameter(torch.full_like(tied, 0.5))

    def undo() -> None:
        run.net.head.weight = tied

    run.undo = undo
    return ["weights of head.weight"]


@_fault("a gathered copy is not updated from its partitions", lambda job: job.get("stage") == 3)
def stale_gathered(run: Run) -> list[str]:
    """ZeRO-3 keeps small parameters gathered, and computes with these copies."""
    p = dict(run.net.named_parameters())[run.fused]
    assert p.ds_persist
    kept = p.data.clone()
    p.data.add_(1)

    def undo() -> None:
        p.data.copy_(kept)

    run.undo = undo
    return [f"module of {run.fused}"]


@_fault("the optimizer has the parameters that another wrapper has replaced", lambda job: not _deepspeed(job))
def other_parameters(run: Run) -> list[str]:
    own = [torch.nn.Parameter(torch.zeros(p.shape)) for p in run.net.parameters()]
    optimizer = torch.optim.AdamW(own, lr=0.01)
    run.prover = lambda: ckpttool.prove(run.net, run.root, optimizer=optimizer, scheduler=run.scheduler)
    return ["optimizer:"]


# ------------------------------------------------------------------------------------------------- runs


def _zero(stage: int, dtype: str, ranks: int, **more: Any) -> dict[str, Any]:
    name = "-".join([f"zero{stage}", dtype, f"dp{ranks}", *more.values()]).replace(" ", "-")
    return {"id": name, "stage": stage, "dtype": dtype, "world_size": ranks, **more}


def _sharded(mesh: str, dtype: str, ranks: int, layout: str) -> dict[str, Any]:
    name = f"{mesh}-{dtype}-{ranks}-{layout}"
    return {"id": name, "mesh": mesh, "dtype": dtype, "world_size": ranks, "layout": layout}


JOBS = [
    _zero(0, "fp32", 2),
    _zero(0, "fp16", 2),
    _zero(1, "bf16", 3),
    _zero(1, "fp32", 2),
    _zero(2, "fp16", 2),
    _zero(2, "bf16", 2, groups="frozen c"),
    _zero(3, "bf16", 2),
    _zero(3, "fp32", 3),
    _zero(3, "fp16", 2, groups="frozen c"),
    _sharded("fsdp", "float32", 2, "nested"),
    _sharded("fsdp", "bfloat16", 3, "verl"),
    _sharded("hsdp", "float32", 4, "nested"),
    _sharded("2d", "float32", 4, "verl"),
]
if not sampling.thorough():
    JOBS = [job for job in JOBS if job["id"] not in {"zero0-fp32-dp2", "zero2-fp16-dp2", "zero3-fp32-dp3"}]


def _cases() -> list[tuple[str, str]]:
    """Return job and fault: each fault in a run under DeepSpeed and in one of DTensors, the one with the fewest yet."""
    cases: list[tuple[str, str]] = []
    for name, fault in FAULTS.items():
        for of_deepspeed in (True, False):
            fitting = [job["id"] for job in JOBS if _deepspeed(job) == of_deepspeed and fault.fits(job)]
            if not sampling.thorough():
                fitting.sort(key=Counter(job for job, _ in cases).__getitem__)
                del fitting[1:]
            cases += [(job, name) for job in fitting]
    return cases


CASES = _cases()
for _job in JOBS:
    _job["faults"] = [name for job, name in CASES if job == _job["id"]]
TIE = "a tied weight is untied, and one copy is not loaded"
GATHERED = "a gathered copy is not updated from its partitions"


def _run(job: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Make each fault in a run; what is broken, the mismatches, and the error."""
    forked.end_if_stuck(60)
    run = (Run if _deepspeed(job) else Sharded)(job, directory / job["id"])
    run.train()
    found: dict[str, Any] = {"proofs": [run.restore()]}
    for name in job["faults"]:
        broken = FAULTS[name].make(run)
        try:
            found[name] = (broken, (), str(run.prover()))
        except ckpttool.ProofError as error:
            found[name] = (broken, error.mismatches, str(error))
        except ckpttool.ArgumentError as error:  # of an argument that nothing can be compared with
            found[name] = (broken, (f"{error.path}: {error.problem}",), str(error))
        found["proofs"].append(run.restore())
    found["tied"] = run.tied
    if _deepspeed(job):
        found["weights alone"] = str(ckpttool.load(run.model, run.root, weights_only=True, prove=True).proof)
        found["without optimizer"] = str(ckpttool.load(run.model, run.root, optimizer=False, prove=True).proof)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return each_on_ranks(_run, JOBS, tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("job", [job["id"] for job in JOBS])
def test_the_same_run_without_a_fault_is_proven(job: str, found: dict[str, list[dict[str, Any]]]) -> None:
    for rank in found[job]:
        assert len(rank["proofs"]) > 2
        for proof in rank["proofs"]:
            assert proof.startswith("proven: ")
            left_out = proof.partition("; not compared: ")[2]
            assert left_out == ("scheduler, which the checkpoint does not record" if "nested" in job else "")


@pytest.mark.parametrize(("job", "fault"), CASES)
def test_a_fault_is_found_and_named_and_nothing_else_is(
    job: str, fault: str, found: dict[str, list[dict[str, Any]]]
) -> None:
    broken, mismatches, error = found[job][0][fault]
    assert mismatches, error
    assert len({rank[fault][2] for rank in found[job]}) == 1  # all ranks have the same error
    assert mismatches[0] in error
    assert FAULTS[fault].where in error
    tied = found[job][0]["tied"]
    expected = [[one] if isinstance(one, str) else one for one in broken]
    named = [re.sub(r" (is|has|differs) .*", "", one) for one in mismatches]
    named = [re.sub(r"^loss_scale\..*", "loss_scale", one) for one in named]
    for names in expected:
        assert any(name in named for name in names), names
    for name in named:
        of, _, parameter = name.partition(" of ")
        names = {name, f"{of} of {tied.get(parameter, parameter)}"}  # a tied weight has several
        assert any(names & {*own} for own in expected), name


@pytest.mark.parametrize("job", [job["id"] for job in JOBS if _deepspeed(job)])
def test_a_load_of_the_weights_alone_compares_all_of_them(job: str, found: dict[str, list[dict[str, Any]]]) -> None:
    for rank in found[job]:
        proof = rank["weights alone"]
        assert proof.startswith("proven: ")
        assert proof.endswith("; not compared: all but the weights and buffers, which were left out")
        assert not proof.startswith("proven: 0 ")


@pytest.mark.parametrize("job", [job["id"] for job in JOBS if _deepspeed(job)])
def test_a_load_without_the_optimizer_compares_the_counters_too(
    job: str, found: dict[str, list[dict[str, Any]]]
) -> None:
    for rank in found[job]:
        proof, _, left_out = rank["without optimizer"].partition("; not compared: ")
        assert proof.startswith("proven: ")
        assert left_out.startswith("the optimizer's states and hyper-parameters, which were not restored")
        assert "global_steps, global_samples, skipped_steps, scheduler, client_state" in proof
        assert "exp_avg" not in proof
        assert "hyper-parameters" not in proof
