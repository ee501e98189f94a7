"""The outputs of ``convert``, by its options: native ZeRO, universal and distributed checkpoints."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Any

from ckpttool.arguments import check_choice, check_positive
from ckpttool.dtypes import TRAINING_DTYPES
from ckpttool.errors import ArgumentError
from ckpttool.formats.dcp import METADATA
from ckpttool.model.items import STEP
from ckpttool.plan.builder import sample_checks
from ckpttool.storage import LATEST, LATEST_UNIVERSAL
from ckpttool.targets.sidecars import rank_state_sidecars, sidecars_for, with_sidecars
from ckpttool.targets.table import Planned

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ckpttool.model import Checkpoint
    from ckpttool.plan import CopyPlan


def check_zero(given: Mapping[str, Any]) -> None:
    """Refuse options of a native checkpoint that no source allows.

    Raises:
        ArgumentError: There is one.
    """
    for name in ("world_size", "sub_group_size", "expert_parallel"):
        check_positive(name, given[name])
    if given["dtype"] is not None:
        check_choice("dtype", given["dtype"], tuple(TRAINING_DTYPES))
    if given["stage"] not in {None, 1, 2, 3}:
        raise ArgumentError("stage", f"is {given['stage']!r}, not 1, 2 or 3", "choose one of them, or None")
    if given["world_size"] is None:
        problem = "is missing: files for ZeRO depend on the number of ranks"
        raise ArgumentError("world_size", problem, "set world_size to the ranks that will load it", ("world_size",))


def for_zero(checkpoint: Checkpoint, given: Mapping[str, Any], tag: str) -> Planned:
    """Plan a native ZeRO checkpoint.

    Raises:
        CkptError: The checkpoint or an option does not fit.
    """
    from ckpttool.targets.zero.layout import shape_for, zero_losses
    from ckpttool.targets.zero.writer import plan_zero

    names = ("stage", "sub_group_size", "round_robin", "expert_parallel")
    dtype = None if given["dtype"] is None else TRAINING_DTYPES[given["dtype"]]
    shape = shape_for(checkpoint, ranks=given["world_size"], dtype=dtype, **{name: given[name] for name in names})
    planned = Planned(plan_zero(checkpoint, shape, tag=tag), (LATEST,), zero_losses(checkpoint, shape))
    return _with_sidecars(planned, checkpoint, given["world_size"], tag)


def for_universal(checkpoint: Checkpoint, _given: Mapping[str, Any], tag: str) -> Planned:
    """Plan a universal checkpoint.

    Raises:
        CkptError: The checkpoint does not fit.
    """
    from ckpttool.targets.universal import plan_universal, universal_losses

    plan = plan_universal(checkpoint, tag=tag, consistency=sample_checks(checkpoint))
    return _with_sidecars(Planned(plan, (LATEST_UNIVERSAL,), universal_losses(checkpoint)), checkpoint, None, tag)


def for_dcp(checkpoint: Checkpoint, given: Mapping[str, Any], tag: str) -> Planned:
    """Plan a checkpoint of ``torch.distributed.checkpoint``.

    Raises:
        CkptError: The checkpoint or the layout does not fit.
    """
    from ckpttool.targets.dcp import LAYOUTS, client_state_of, plan_dcp

    layout = given["layout"] or "nested"
    plan = plan_dcp(checkpoint, layout=layout, consistency=sample_checks(checkpoint))
    names = LAYOUTS[layout]
    kept = checkpoint.client_state if names.state else client_state_of(checkpoint.client_state, names)
    losses = losses_of_torch(checkpoint, tag, kept, scheduler=False)
    if layout == "accelerate":
        plan, left_behind = with_sidecars_of_accelerate(plan, checkpoint, None)
        losses += left_behind
    return Planned(plan, tuple(f.name for f in plan.files if posixpath.basename(f.name) == METADATA), losses)


def losses_of_torch(checkpoint: Checkpoint, tag: str, kept: Collection[str], *, scheduler: bool) -> list[str]:
    """Return the state that files for a torch run without ckpttool do not keep.

    Args:
        checkpoint: The source.
        tag: Name of the checkpoint in the output.
        kept: Keys of the client state that they keep.
        scheduler: Whether they keep the scheduler.
    """
    losses = [f"{name}: belongs to no parameter, and is left out" for name in checkpoint.nonpartitionable]
    if own := rank_state_sidecars(checkpoint, tag):
        losses.append(f"not copied: the rank states of {len(own)} ranks (rank_state of a save)")
    lost = ["the scheduler"] if checkpoint.scheduler and not scheduler else []
    lost += ["the loss scale"] if checkpoint.loss_scaler is not None and checkpoint.dtype == "F16" else []
    numbers = (*(g.scalars for g in checkpoint.groups), *(p.numbers for p in checkpoint.parameters))
    lost += [f"the step ({checkpoint.step})"] if checkpoint.step and not any(STEP in own for own in numbers) else []
    stated = any(p.optimizer_states or checkpoint.numbers(p) for p in checkpoint.parameters)
    frozen = [p.name for p in checkpoint.parameters if p.frozen and any(p.name in g.listed for g in checkpoint.groups)]
    lost += [f"which parameters are frozen ({', '.join(frozen[:5])})"] if frozen and not stated else []
    lost += ["the counts of samples and skipped steps"] if checkpoint.native else []
    if left := [str(name) for name in checkpoint.client_state if name not in kept]:
        lost.append(f"the client state ({', '.join(left[:5])}{', ...' * (len(left) > 5)})")
    return [*losses, *([f"not written: {', '.join(lost)}"] if lost else [])]


def with_sidecars_of_accelerate(
    plan: CopyPlan, checkpoint: Checkpoint, ranks: int | None
) -> tuple[CopyPlan, list[str]]:
    """Return a plan with the sidecar files beside it, and a note on each kind that is left out.

    Args:
        plan: The plan.
        checkpoint: The source.
        ranks: Number of ranks of the output; None for any.
    """
    companions, left_behind = sidecars_for(checkpoint, ranks)
    return with_sidecars(plan, companions, None), left_behind


def _with_sidecars(planned: Planned, checkpoint: Checkpoint, ranks: int | None, tag: str) -> Planned:
    """Add the sidecar files, and the files of the rank states, to a checkpoint with a tag."""
    companions, left_behind = sidecars_for(checkpoint, ranks)
    companions += rank_state_sidecars(checkpoint, tag)
    plan = with_sidecars(planned.plan, companions, None)
    return Planned(plan, planned.last, [*planned.losses, *left_behind])
