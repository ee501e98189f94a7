"""A native checkpoint's shape (ranks, stage, dtype), its parameter groups, and the place of each parameter in them.

Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py (``__init__``, ``get_data_parallel_partitions``) and
runtime/zero/stage3.py (``_create_fp16_sub_groups``).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.arguments import check_positive
from ckpttool.errors import ArgumentError, PlanError
from ckpttool.formats.fields import WEIGHTS_ALONE
from ckpttool.formats.zero.experts import NATIVE
from ckpttool.formats.zero.partitions import round_robin
from ckpttool.messages import brief
from ckpttool.model import MASTER, MODULE, NEWER_COPIES, UNKNOWN_GROUP, ParamGroup
from ckpttool.targets.zero.experts import TargetExperts
from ckpttool.targets.zero.match import check_partitionable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckpttool.model import Checkpoint, State
    from ckpttool.targets.zero.experts import Share


MAX_RANKS = 1 << 20
"""Largest number of ranks of a target."""
STAGES = (1, 2, 3)
"""ZeRO stages that partition the optimizer's states."""
SUB_GROUP_SIZE = 1_000_000_000
"""DeepSpeed's default, in elements."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The target of a native checkpoint."""

    ranks: int
    """Data-parallel ranks."""
    stage: int
    """1, 2 or 3."""
    sub_group_size: int
    """Stage 3 closes a flat buffer at this number of elements for each rank."""
    round_robin: bool
    """Whether the target run has ``round_robin_gradients``."""
    dtype: str
    """Compute dtype of the target run, safetensors' spelling."""
    expert_parallel: int | None = None
    """Expert-parallel size; None for the source's."""
    alignment: int = 1
    """Alignment of every parameter in a flat buffer of stages 1 and 2, in elements."""


def shape_for(
    checkpoint: Checkpoint,
    *,
    ranks: int | None,
    stage: int | None,
    sub_group_size: int | None,
    round_robin: bool | None,
    dtype: str | None,
    expert_parallel: int | None = None,
) -> Shape:
    """Return the target, with defaults from the source's configuration.

    Raises:
        PlanError: The number of ranks is missing, or the source has no stage of its own.
        ArgumentError: A number is out of range.
    """
    if ranks is None:
        raise PlanError(
            checkpoint.location,
            "cannot be re-partitioned without a number of ranks",
            "give world_size",
            ("world_size",),
        )
    config = checkpoint.ds_config.get("zero_optimization")
    config = config if isinstance(config, dict) else {}
    _check_arguments(ranks, stage, sub_group_size, expert_parallel)
    stage = stage or checkpoint.stage or config.get("stage")
    if stage not in STAGES:
        raise PlanError(checkpoint.location, "has no ZeRO stage", "choose one with stage", ("stage",))
    size = config.get("sub_group_size", SUB_GROUP_SIZE) if sub_group_size is None else sub_group_size
    size = int(size) if isinstance(size, int | float) and size >= 1 else SUB_GROUP_SIZE  # "auto" for Hugging Face
    if round_robin is None:
        round_robin = bool(config.get("round_robin_gradients"))
    if checkpoint.masters_alone and dtype is None:
        problem = "holds fp32 master weights, but no compute dtype"
        raise PlanError(checkpoint.location, problem, "choose dtype bf16, fp16 or fp32", ("dtype",))
    if dtype is not None and dtype != checkpoint.dtype and checkpoint.groups and not checkpoint.masters_alone:
        problem = f"was trained in {checkpoint.dtype}: its 16-bit copies and loss scale have that dtype"
        raise PlanError(checkpoint.location, problem, "leave out dtype, which is for weights-only sources", ("dtype",))
    sizes = {layer.parallel for layer in TargetExperts(checkpoint, ranks).layers} if expert_parallel else set()
    if len(sizes) > 1:
        problem = f"spreads its experts over {' and '.join(map(str, sorted(sizes)))} ranks, in groups of their own"
        raise PlanError(checkpoint.location, problem, "leave out expert_parallel", ("expert_parallel",))
    return Shape(ranks, stage, size, round_robin, dtype or checkpoint.dtype, expert_parallel)


def _check_arguments(ranks: int, stage: int | None, sub_group_size: int | None, expert_parallel: int | None) -> None:
    check_positive("world_size", ranks)
    if ranks > MAX_RANKS:
        raise ArgumentError("world_size", f"is {ranks:,}, more than {MAX_RANKS:,}", "choose fewer ranks")
    if stage is not None and stage not in STAGES:
        raise ArgumentError("stage", f"is {brief(stage)}, not 1, 2 or 3", "choose one of them, or None")
    check_positive("sub_group_size", sub_group_size)
    check_positive("expert_parallel", expert_parallel)
    if expert_parallel is not None and expert_parallel > ranks:
        problem = f"is {expert_parallel:,}, more than the {ranks:,} ranks of the run that loads it"
        hint = "choose an expert_parallel that divides world_size"
        raise ArgumentError("expert_parallel", problem, hint, ("expert_parallel", "world_size"))


def zero_losses(checkpoint: Checkpoint, shape: Shape) -> list[str]:
    """Return one sentence for each state of the source that the target does not keep."""
    losses = []
    if checkpoint.topology.tensor_parallel * checkpoint.topology.pipeline_parallel > 1:
        losses.append("written without tensor and pipeline parallelism: the run that loads it must use neither")
    padded = [f"{p.name} has {p.shape[0]}" for p in checkpoint.parameters if p.slicing.vocabulary]
    if padded and not sliced_by_autotp(checkpoint):
        losses.append(f"the vocabulary is written without padding: {', '.join(padded)} rows; the model needs as many")
    layers = TargetExperts(checkpoint, shape.ranks, shape.expert_parallel).layers
    if layers:
        sizes = " and ".join(map(str, sorted({layer.parallel for layer in layers})))
        losses.append(f"experts are written for an expert-parallel size of {sizes}: the run that loads it must use it")
    if checkpoint.has_newer_copies and shape.stage == 3:
        losses.append(f"{NEWER_COPIES}: stage 3 keeps no copies, so that the masters are written from them")
    elif checkpoint.has_newer_copies:
        losses.append(f"{NEWER_COPIES}: the run that loads it must use ZenFlow, or its first step reverts the copies")
    if checkpoint.masters_alone and checkpoint.scheduler is None:
        losses.append(
            "the source has no scheduler, loss scale or client state: load it with "
            "load_lr_scheduler_states=False if the run has a scheduler"
        )
    elif checkpoint.masters_alone:
        losses.append("the source has no loss scale or client state")
    if not checkpoint.groups:
        losses.append(WEIGHTS_ALONE)
    return losses


def sliced_by_autotp(checkpoint: Checkpoint) -> bool:
    """Return whether AutoTP sliced the layers; AutoTP pads no vocabulary."""
    config = checkpoint.ds_config.get("tensor_parallel")
    return isinstance(config, dict) and bool(config.get("autotp_size"))


ALIGNMENT = 2
"""Each rank's share of a flat buffer is a multiple of this number of elements (``nccl_start_alignment_factor``)."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """Consecutive elements of a parameter in one rank's partition."""

    name: str
    """Name of the parameter."""
    first: int
    """First element, in the flattened parameter."""
    numel: int
    """Elements."""
    position: int
    """First element in the rank's partition."""


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """One flat buffer of stage 1 or 2: the parameters one after another, padded at the end."""

    sizes: Mapping[str, int]
    """Elements of each parameter, in the order of the buffer."""
    ranks: int
    """Number of ranks that partition it."""
    alignment: int = 1
    """The position of every parameter is a multiple of this number of elements (``parameter_alignment``)."""

    @property
    def numel(self) -> int:
        """Elements without the padding at the end."""
        return sum(self.sizes.values()) + sum(self.paddings())

    def paddings(self) -> list[int]:
        """Return the elements of padding after each parameter except the last."""
        result, at, last = [], 0, len(self.sizes) - 1
        for number, numel in enumerate(self.sizes.values()):
            result.append(-(at + numel) % self.alignment if number < last else 0)
            at += numel + result[-1]
        return result

    @property
    def partition(self) -> int:
        """Elements of each rank's partition, padding included."""
        unit = ALIGNMENT * self.ranks
        return -(-self.numel // unit) * unit // self.ranks

    def padding(self, rank: int) -> int:
        """Return the elements of padding at the end of a rank's partition."""
        return min(self.partition, max(0, (rank + 1) * self.partition - self.numel))

    def offsets(self) -> dict[str, int]:
        """Return the position of each parameter in the buffer, in elements."""
        result, at = {}, 0
        for (name, numel), padding in zip(self.sizes.items(), self.paddings(), strict=True):
            result[name] = at
            at += numel + padding
        return result

    def fragments(self) -> list[list[Fragment]]:
        """Return the fragments in each rank's partition."""
        result: list[list[Fragment]] = [[] for _ in range(self.ranks)]
        size = self.partition
        for name, offset in self.offsets().items():
            first, numel = 0, self.sizes[name]
            while first < numel:
                rank, position = divmod(offset + first, size)
                count = min(numel - first, size - position)
                result[rank].append(Fragment(name, first, count, position))
                first += count
        return result


@dataclass(frozen=True, slots=True)
class SubGroup:
    """One flat buffer of stage 3: each rank has an equal part of every parameter, padded."""

    sizes: Mapping[str, int]
    """Elements of each parameter, in the order of the buffer."""
    ranks: int
    """Number of ranks that partition it."""

    @property
    def partition(self) -> int:
        """Elements of each rank's partition, padding included."""
        return sum(piece(n, self.ranks) for n in self.sizes.values())

    def fragments(self) -> list[list[Fragment]]:
        """Return the fragments in each rank's partition."""
        return [self.rank_fragments(rank) for rank in range(self.ranks)]

    def rank_fragments(self, rank: int) -> list[Fragment]:
        """Return the fragments in one rank's partition."""
        result: list[Fragment] = []
        position = 0
        for name, numel in self.sizes.items():
            size = piece(numel, self.ranks)
            count = min(size, numel - rank * size)
            if count > 0:
                result.append(Fragment(name, rank * size, count, position))
            position += size
        return result


def piece(numel: int, ranks: int) -> int:
    """Return the elements of each rank's part of a parameter at stage 3, padding included."""
    return -(-numel // ranks)


def sub_groups(sizes: Mapping[str, int], ranks: int, limit: int) -> Iterator[SubGroup]:
    """Split a parameter group of stage 3 into sub-groups; the parameter that crosses the limit ends a sub-group."""
    part: dict[str, int] = {}
    filled = 0
    for name, numel in sizes.items():
        part[name] = numel
        filled += piece(numel, ranks)
        if filled >= limit:
            yield SubGroup(part, ranks)
            part, filled = {}, 0
    if part:
        yield SubGroup(part, ranks)


RELEASE = "0.19.8"
"""Version of DeepSpeed in the files if the source has none."""

_OF_THIN = "consolidate it to safetensors and convert that, or load its weights into an engine with weights_only=True"


def _one_group(checkpoint: Checkpoint) -> tuple[ParamGroup, ...]:
    """Return one group of all parameters for a weights-only source; else nothing."""
    names = tuple(p.name for p in checkpoint.parameters)
    weights_alone = all(p.group == UNKNOWN_GROUP and set(p.states) <= {MODULE} for p in checkpoint.parameters)
    if checkpoint.native or not weights_alone or not names:
        return ()
    return (ParamGroup(names, {}, {}),)


class TargetGroups:
    """The parameter groups of a native checkpoint, partitioned over the ranks of the target.

    Args:
        checkpoint: The source.
        shape: Ranks and stage of the target.
        fresh: Parameters whose states the source lacks in part or wholly; the missing states are zero.

    Raises:
        PlanError: The source cannot be written as a ZeRO checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint, shape: Shape, fresh: frozenset[str] = frozenset()) -> None:
        self.checkpoint = checkpoint
        self.shape = shape
        self.fresh = fresh
        self.parameters = {p.name: p for p in checkpoint.parameters}
        self.source_groups = checkpoint.groups or _one_group(checkpoint)
        """The parameter groups of the source; one group of all parameters for a weights-only source."""
        self.names = [self._names(group) for group in self.source_groups]
        """For each group: names of its parameters in the whole model."""
        self.keys = [self._keys(names) for names in self.names]
        """For each group: names of the optimizer's states."""
        self._check()
        self.experts = TargetExperts(checkpoint, shape.ranks, shape.expert_parallel)
        self.shares = [self.experts.shares(g, n) for g, n in zip(self.source_groups, self.names, strict=True)]
        """For each group: the sets of ranks that partition it; one set of all ranks, except for experts."""
        self.groups = [self._order(shares[0]) for shares in self.shares]
        """For each group: local names of its parameters, in the order of the target's flat buffer."""
        sizes = [
            {name: shares[0].parameters[name].numel for name in names}
            for shares, names in zip(self.shares, self.groups, strict=True)
        ]
        counts = [len(shares[0].ranks) for shares in self.shares]
        pairs = list(zip(sizes, counts, strict=True))
        self.flat = [FlatGroup(group_sizes, count, shape.alignment) for group_sizes, count in pairs]
        """For each group: its flat buffer, at stages 1 and 2."""
        self.subs = [list(sub_groups(group_sizes, count, shape.sub_group_size)) for group_sizes, count in pairs]
        """For each group: its sub-groups, at stage 3."""

    def _check(self) -> None:
        checkpoint = self.checkpoint
        if not any(self.names):
            if checkpoint.thin:
                raise PlanError(checkpoint.location, "is thin: it does not record the trained parameters", _OF_THIN)
            hint = "convert a checkpoint that was saved with its optimizer"
            raise PlanError(checkpoint.location, "does not record the trained parameters", hint)
        check_partitionable(checkpoint, "resume on the same number of ranks, or consolidate the weights")
        if self.shape.stage == 3:
            self._check_stage3()

    def _check_stage3(self) -> None:
        checkpoint = self.checkpoint
        unclear = [p.name for p in checkpoint.parameters if p.frozen] if not checkpoint.tells_buffers else []
        if unclear:
            problem = f"does not say whether {unclear[0]} is a frozen parameter or a buffer: stage 3 distinguishes them"
            hint = (
                "pass the names of the buffers in buffers, '' if there are none (a tied weight is not one), "
                "choose stage 1 or 2, or convert the checkpoint that it was made from"
            )
            raise PlanError(checkpoint.location, problem, hint, ("buffers", "stage"))
        if any(NATIVE.fullmatch(p.name) for p in checkpoint.parameters):
            problem = "trains DeepSpeed's own mixture of experts, which has no stage 3"
            raise PlanError(checkpoint.location, problem, "choose stage 1 or 2", ("stage",))
        int8 = [p.name for p in checkpoint.parameters if p.frozen and p.numel and p.module_state.dtype == "I8"]
        if int8:
            problem = (
                f"has frozen parameter {int8[0]} in int8: at stage 3 it looks like a parameter that ZeRO++ quantised "
                "without saving its scale"
            )
            raise PlanError(checkpoint.location, problem, "choose stage 1 or 2", ("stage",))
        without_elements = [n for names in self.names for n in names if self.parameters[n].numel == 0]
        if without_elements:
            problem = f"trains {without_elements[0]}, which has no elements: stage 3 cannot hold it"
            raise PlanError(checkpoint.location, problem, "choose stage 1 or 2", ("stage",))

    def _names(self, group: ParamGroup) -> list[str]:
        return [n for n in group.parameters if self.parameters[n].numel or self.shape.stage == 3]

    def _order(self, share: Share) -> list[str]:
        """Return the local names of a group in the order of the target's flat buffer."""
        names = list(share.parameters)
        return round_robin(names, len(share.ranks)) if self.shape.round_robin and self.shape.stage < 3 else names

    def place(self, group: int, rank: int) -> tuple[Share, int]:
        """Return the share of a group that contains a rank, and the index of the rank in it."""
        share = next(s for s in self.shares[group] if rank in s.ranks)
        return share, share.ranks.index(rank)

    def _keys(self, names: Sequence[str]) -> list[str]:
        names = [n for n in names if n not in self.fresh]
        states = [set(self.parameters[n].optimizer_states) for n in names]
        for name, keys in zip(names, states, strict=True):
            without_master = self.checkpoint.groups and MASTER not in self.parameters[name].states
            if keys != states[0] or without_master:
                state = sorted(keys ^ states[0])[0] if keys != states[0] else "master"
                problem = f"has {state} of only one of {name} and {names[0]}, which are in one group"
                raise PlanError(self.checkpoint.location, problem, "convert a checkpoint saved with its optimizer")
        return [k for k in self.parameters[names[0]].states if k in states[0]] if names else []

    def dtype(self, names: Sequence[str], key: str) -> str:
        """Return the dtype of one state of a group's parameters.

        Raises:
            PlanError: The parameters have different dtypes.
        """
        if key == MASTER and not self.checkpoint.groups:
            return "F32"
        dtypes = {self.parameters[n].states[key].dtype for n in names if key in self.parameters[n].states}
        if len(dtypes) > 1 and key == MASTER and not self.fresh.isdisjoint(names):
            return "F32"  # some weights have only a 16-bit copy
        if len(dtypes) > 1:
            raise PlanError(
                self.checkpoint.location,
                f"has {key} of several dtypes in one group: {', '.join(sorted(dtypes))}",
                "convert a checkpoint saved with one dtype",
            )
        return dtypes.pop() if dtypes else "F32"

    @property
    def release(self) -> str:
        """Version of DeepSpeed in the files."""
        return self.checkpoint.deepspeed_version or RELEASE

    def config(self) -> dict[str, Any]:
        """Return the source's configuration with the target's partitioning."""
        config = dict(self.checkpoint.ds_config)
        zero = config.get("zero_optimization")
        zero = {**zero} if isinstance(zero, dict) else {}
        zero["stage"] = self.shape.stage
        if self.shape.stage < 3 and (self.shape.round_robin or "round_robin_gradients" in zero):
            zero["round_robin_gradients"] = self.shape.round_robin
        if self.shape.stage == 3 and self.shape.sub_group_size != SUB_GROUP_SIZE:
            zero["sub_group_size"] = self.shape.sub_group_size
        config["zero_optimization"] = zero
        return config

    @functools.cached_property
    def fragments(self) -> list[list[list[Fragment]]]:
        """For each group and rank: the fragments in the rank's partition, at stages 1 and 2."""
        return [g.fragments() for g in self.flat]

    def state(self, name: str, key: str) -> State:
        """Return a state of a parameter; for weights-only sources, the weights serve as fp32 master weights.

        Stage 3 has no module copies: copies newer than the master weights are written in their place.
        """
        parameter = self.parameters[name]
        if key == MASTER and self.checkpoint.has_newer_copies and self.shape.stage == 3:
            return self.checkpoint.weights(parameter)
        return parameter.states.get(key) or parameter.module_state
