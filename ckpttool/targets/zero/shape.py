"""The target of a native checkpoint: ranks, stage and types, and what a conversion to it loses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttool.arguments import check_at_least
from ckpttool.errors import ArgumentError, PlanError
from ckpttool.messages import brief
from ckpttool.model import NEWER_COPIES
from ckpttool.targets.zero.experts import TargetExperts

if TYPE_CHECKING:
    from ckpttool.model import Checkpoint

MAX_RANKS = 1 << 20
"""Largest number of ranks that a checkpoint can be written for."""
STAGES = (1, 2, 3)
"""ZeRO stages that partition the optimizer's states."""
SUB_GROUP_SIZE = 1_000_000_000
"""DeepSpeed's default, in elements."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The target."""

    ranks: int
    """Data-parallel ranks."""
    stage: int
    """1, 2 or 3."""
    sub_group_size: int
    """Elements of each rank at which a flat buffer of stage 3 is closed."""
    round_robin: bool
    """Whether the target run has ``round_robin_gradients``."""
    dtype: str
    """What the target run computes in, safetensors' spelling."""
    expert_parallel: int | None = None
    """Number of ranks to spread experts over; None for the source's number."""
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
    """Make the target, with defaults from the source's configuration.

    Raises:
        PlanError: The number of ranks is missing, or the source has no stage of its own.
        ArgumentError: A number is out of range.
    """
    if ranks is None:
        raise PlanError(
            checkpoint.location,
            "cannot be re-partitioned over an unknown number of ranks",
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
        problem = "holds masters, and does not say what the run computes in"
        raise PlanError(checkpoint.location, problem, "choose dtype bf16, fp16 or fp32", ("dtype",))
    if dtype is not None and dtype != checkpoint.dtype and checkpoint.groups and not checkpoint.masters_alone:
        problem = f"was trained in {checkpoint.dtype}, and its 16-bit copies and loss scale follow that"
        raise PlanError(checkpoint.location, problem, "leave out dtype, which is for weights alone", ("dtype",))
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
    """Sentences on what the target does not keep of the source."""
    losses = []
    if checkpoint.topology.tensor_parallel * checkpoint.topology.pipeline_parallel > 1:
        losses.append("written without tensor and pipeline parallelism: the run that loads it must have neither")
    padded = [f"{p.name} has {p.shape[0]}" for p in checkpoint.parameters if p.slicing.vocabulary]
    if padded and not sliced_by_autotp(checkpoint):
        losses.append(f"the vocabulary is written without padding: {', '.join(padded)} rows, and the model must too")
    layers = TargetExperts(checkpoint, shape.ranks, shape.expert_parallel).layers
    if layers:
        spread = " and ".join(map(str, sorted({layer.parallel for layer in layers})))
        losses.append(f"experts are for an expert-parallel size of {spread}: the run that loads it must have that")
    if checkpoint.has_newer_copies and shape.stage == 3:
        losses.append(f"{NEWER_COPIES}: stage 3 keeps no copies, and masters are made of them")
    elif checkpoint.has_newer_copies:
        losses.append(f"{NEWER_COPIES}: the run that loads it must use ZenFlow too, or its first step takes that back")
    if checkpoint.masters_alone:
        losses.append(
            "there was no scheduler, loss scale or client state to carry over: load it with "
            "load_lr_scheduler_states=False if the run has a scheduler"
        )
    if not checkpoint.groups:
        losses.append(
            "written from weights alone: load it with load_module_only=True at stages 1 and 2, and with "
            "load_optimizer_states=False and load_lr_scheduler_states=False at stage 3; DeepSpeed makes the masters of "
            "what it computes with"
        )
    return losses


def sliced_by_autotp(checkpoint: Checkpoint) -> bool:
    """Whether AutoTP sliced the layers; it pads no vocabulary."""
    config = checkpoint.ds_config.get("tensor_parallel")
    return isinstance(config, dict) and bool(config.get("autotp_size"))
