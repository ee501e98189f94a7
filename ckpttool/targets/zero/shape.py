"""The target of a native checkpoint (ranks, stage, dtype), and the state that a conversion to it loses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttool.arguments import check_at_least
from ckpttool.errors import ArgumentError, PlanError
from ckpttool.formats.reports import WEIGHTS_ALONE
from ckpttool.messages import brief
from ckpttool.model import NEWER_COPIES
from ckpttool.targets.zero.experts import TargetExperts

if TYPE_CHECKING:
    from ckpttool.model import Checkpoint

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
    """Expert-parallel size; None for that of the source."""
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
    return Shape(ranks, stage, size, round_robin, dtype or checkpoint.dtype, expert_parallel)


def _check_arguments(ranks: int, stage: int | None, sub_group_size: int | None, expert_parallel: int | None) -> None:
    check_at_least("world_size", ranks, 1)
    if ranks > MAX_RANKS:
        raise ArgumentError("world_size", f"is {ranks:,}, more than {MAX_RANKS:,}", "choose fewer ranks")
    if stage is not None and stage not in STAGES:
        raise ArgumentError("stage", f"is {brief(stage)}, not 1, 2 or 3", "choose one of them, or None")
    check_at_least("sub_group_size", sub_group_size, 1)
    check_at_least("expert_parallel", expert_parallel, 1)
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
    if checkpoint.masters_alone:
        losses.append(
            "the source has no scheduler, loss scale or client state: load it with "
            "load_lr_scheduler_states=False if the run has a scheduler"
        )
    if not checkpoint.groups:
        losses.append(WEIGHTS_ALONE)
    return losses


def sliced_by_autotp(checkpoint: Checkpoint) -> bool:
    """Return whether AutoTP sliced the layers; AutoTP pads no vocabulary."""
    config = checkpoint.ds_config.get("tensor_parallel")
    return isinstance(config, dict) and bool(config.get("autotp_size"))
