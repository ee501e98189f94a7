"""Checkpoint -> plan of the files that DeepSpeed's plain ``load_checkpoint`` reads, for any number of ranks.

Source: DeepSpeed 0.19.8, runtime/engine.py (``_save_checkpoint``, ``_save_zero_checkpoint``, ``load_checkpoint``),
runtime/zero/stage_1_and_2.py (``state_dict``, ``_rigid_load_state_dict``) and runtime/zero/stage3.py
(``_rigid_state_dict``, ``_rigid_load_state_dict``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.containers.values import TensorRef, walk
from ckpttool.errors import PlanError
from ckpttool.plan import CopyPlan
from ckpttool.plan.builder import CopyBuilder
from ckpttool.plan.copy_checks import sample_checks
from ckpttool.storage import LATEST
from ckpttool.targets.torch_file import plain_file
from ckpttool.targets.zero.groups import TargetGroups
from ckpttool.targets.zero.model_files import ModelFiles
from ckpttool.targets.zero.optimizer_files import OptimizerFiles

if TYPE_CHECKING:
    from ckpttool.model import Checkpoint
    from ckpttool.targets.zero.shape import Shape


def plan_zero(checkpoint: Checkpoint, shape: Shape, *, tag: str) -> CopyPlan:
    """Plan a native checkpoint: every rank's files under ``tag``, and ``latest``.

    Args:
        checkpoint: The source.
        shape: Ranks and stage.
        tag: Name of the checkpoint.

    Raises:
        PlanError: The source cannot be written as a ZeRO checkpoint.
    """
    _check_hyperparameters(checkpoint)
    groups, builder = TargetGroups(checkpoint, shape), CopyBuilder(checkpoint)
    optimizer, model = OptimizerFiles(groups, builder, tag), ModelFiles(groups, builder, tag)
    files = [*optimizer.files(), *model.files(), plain_file(LATEST, tag.encode())]
    return CopyPlan(builder.sources, builder.casts, tuple(files), sample_checks(checkpoint))


def plan_rank(
    checkpoint: Checkpoint, shape: Shape, rank: int, *, tag: str, fresh: frozenset[str] = frozenset()
) -> CopyPlan:
    """Plan the part of a native checkpoint for one rank: its partition, and the structure of its model states.

    The plan leaves out tensors that are equal on all ranks: weights cast from the fp32 master weights, buffers and,
    below stage 3, frozen parameters.

    Args:
        checkpoint: As for ``plan_zero``.
        shape: Ranks and stage.
        rank: The data-parallel rank.
        tag: Name of the checkpoint.
        fresh: Parameters whose states the checkpoint lacks in part or wholly; the missing states stay zero.

    Returns:
        A plan of two files: optimizer states, model states.

    Raises:
        PlanError: The source cannot be written as a ZeRO checkpoint.
    """
    groups, builder = TargetGroups(checkpoint, shape, fresh), CopyBuilder(checkpoint)
    optimizer, model = OptimizerFiles(groups, builder, tag), ModelFiles(groups, builder, tag)
    files = (optimizer.file(rank), model.file(rank, shared=False))
    return CopyPlan(builder.sources, builder.casts, files)


def local_shapes(checkpoint: Checkpoint, shape: Shape, rank: int) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Return (local name, shape) of each parameter on one rank of the target, for each group in the optimizer's order.

    Raises:
        PlanError: The source cannot be written as a ZeRO checkpoint.
    """
    groups = TargetGroups(checkpoint, shape)
    places = (groups.place(g, rank) for g in range(len(groups.groups)))
    return [[(name, local.shape) for name, local in share.parameters.items()] for share, _ in places]


def _check_hyperparameters(checkpoint: Checkpoint) -> None:
    """Check that the hyper-parameters are complete: DeepSpeed's load replaces those of the run.

    Source: torch 2.13, optim/optimizer.py (``load_state_dict``).
    """
    for number, group in enumerate(checkpoint.groups):
        if group.parameters and not group.hyperparameters:
            problem = (
                f"holds no hyper-parameters (lr, betas, ...) of group {number}, as with elastic_checkpoint: "
                "a run that loads the result could not take a step"
            )
            hint = "resume with ckpttool.load(engine, ...), or convert to universal: both keep those of the run"
            raise PlanError(checkpoint.location, problem, hint)
        tensors = [key for key, v in group.hyperparameters.items() if any(isinstance(x, TensorRef) for x in walk(v))]
        if tensors:
            problem = f"holds hyper-parameter {tensors[0]} of group {number} as a tensor of several numbers"
            raise PlanError(checkpoint.location, problem, "resume on the same number of ranks")
