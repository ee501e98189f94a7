"""Plan the files that ``consolidate`` and exports write: whole weights, and sidecar files beside them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ckpttool.arguments import check_choice, checked_size
from ckpttool.dtypes import TRAINING_DTYPES
from ckpttool.errors import ArgumentError
from ckpttool.formats.sidecars import find_sidecars
from ckpttool.plan import CopyPlan
from ckpttool.plan.builder import CopyBuilder, sample_checks
from ckpttool.storage import connect
from ckpttool.targets.sidecars import with_sidecars
from ckpttool.targets.weights import parse_renamings, renamed, select_weights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.formats.sidecars import SidecarFile
    from ckpttool.model import Checkpoint
    from ckpttool.plan import ConsistencyChecks
    from ckpttool.targets.weights import WeightSelection


@dataclass(frozen=True, slots=True)
class WeightChoice:
    """Selection, type and file format of the weights; the fields are arguments of ``consolidate``."""

    to: str
    dtype: str
    weights: Literal["masters", "module"] = "masters"
    max_shard_size: int | str = "5GB"
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    exclude_frozen: bool = False
    adapter_only: bool = False
    rename: Sequence[str] = ()
    rename_map: Mapping[str, str] = field(default_factory=dict)
    optimizer: bool = False

    def check(self) -> None:
        """Refuse values that no checkpoint allows.

        Raises:
            ArgumentError: There is one.
        """
        check_choice("weights", self.weights, ("masters", "module"))
        check_choice("to", self.to, ("safetensors", "torch"))
        check_choice("dtype", self.dtype, tuple(TRAINING_DTYPES))
        checked_size("max_shard_size", self.max_shard_size)
        if self.adapter_only and (self.to != "safetensors" or self.include or self.exclude or self.exclude_frozen):
            problem = "writes the whole adapter, as safetensors"
            hint = 'leave out include, exclude and exclude_frozen, and write to="safetensors"'
            raise ArgumentError("adapter_only", problem, hint, ("include", "exclude", "exclude_frozen", "to"))
        parse_renamings(self.rename)
        selects = self.include or self.exclude or self.exclude_frozen or self.adapter_only
        renames = self.rename or self.rename_map
        if self.optimizer and (self.to != "safetensors" or self.weights != "masters" or selects or renames):
            problem = "writes the whole model with its own names, as safetensors, from the fp32 master weights"
            others = ("to", "weights", "include", "exclude", "exclude_frozen", "adapter_only", "rename", "rename_map")
            raise ArgumentError("optimizer", problem, f"leave out {', '.join(others[1:])}", others)


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """A plan of weight files, with facts for a report."""

    plan: CopyPlan
    selection: WeightSelection
    index: str
    """Name of the file that is committed last; "" for one file alone."""
    companions: tuple[str, ...]
    """Sidecar files that are copied."""
    notes: tuple[str, ...]
    """Remarks on the checkpoint."""


def plan_weight_files(
    checkpoint: Checkpoint, chosen: WeightChoice, out: str, companions: tuple[SidecarFile, ...] | None = None
) -> WeightFiles:
    """Choose the weights and the sidecar files, and plan the files.

    Args:
        checkpoint: The source.
        chosen: The weights.
        out: The output directory, for messages.
        companions: Sidecar files to write; None for those beside the checkpoint.

    Raises:
        CkptError: The checkpoint has no such weights, or new names collide.
    """
    target = TRAINING_DTYPES[chosen.dtype]
    proofs = sample_checks(checkpoint) if chosen.weights == "masters" else None
    notes = [*map(str, checkpoint.notes), *checkpoint.remarks]
    rules = parse_renamings(chosen.rename)
    if chosen.adapter_only:
        from ckpttool.targets import weights
        from ckpttool.targets.safetensors import plan_safetensors

        selection = weights.select_adapter(checkpoint, source=chosen.weights, dtype=target)
        selection, unused = renamed(selection, chosen.rename_map, rules, checkpoint.location)
        plan = plan_safetensors(checkpoint, selection, max_shard_bytes=1 << 62, consistency=proofs, stem=weights.STEM)
        companions = find_sidecars(connect(checkpoint.storage), checkpoint.root, (weights.CONFIG, "README.md"))
        if weights.CONFIG not in {c.name for c in companions}:
            notes.append(f"there is no {weights.CONFIG} beside the checkpoint: PEFT needs one in {out}")
        index = ""
    else:
        selection = select_weights(
            checkpoint,
            source=chosen.weights,
            dtype=target,
            include=chosen.include,
            exclude=chosen.exclude,
            exclude_frozen=chosen.exclude_frozen,
        )
        selection, unused = renamed(selection, chosen.rename_map, rules, checkpoint.location)
        limit = checked_size("max_shard_size", chosen.max_shard_size)
        if chosen.optimizer:
            plan, index, losses = _plan_with_optimizer(checkpoint, selection, target, limit, proofs)
            notes += losses
        else:
            plan, index = _plan_weights(chosen.to, checkpoint, selection, limit, proofs)
        if companions is None:
            companions = find_sidecars(connect(checkpoint.storage), checkpoint.root)
    plan = with_sidecars(plan, companions, target)
    return WeightFiles(plan, selection, index, tuple(c.name for c in companions), (*notes, *unused))


def _plan_weights(
    to: str, checkpoint: Checkpoint, selection: WeightSelection, limit: int, consistency: ConsistencyChecks | None
) -> tuple[CopyPlan, str]:
    """Return the plan, and the name of the file that is committed last."""
    if to == "safetensors":
        from ckpttool.targets import safetensors

        return safetensors.plan_safetensors(
            checkpoint, selection, max_shard_bytes=limit, consistency=consistency
        ), safetensors.INDEX
    from ckpttool.targets import torch

    return torch.plan_torch(checkpoint, selection, max_shard_bytes=limit, consistency=consistency), torch.INDEX


def _plan_with_optimizer(
    checkpoint: Checkpoint, selection: WeightSelection, dtype: str, limit: int, consistency: ConsistencyChecks | None
) -> tuple[CopyPlan, str, list[str]]:
    """Return the plan, the name of the file that is committed last, and what the files do not keep."""
    from ckpttool.formats.optimizer_states import SAVE
    from ckpttool.targets import safetensors
    from ckpttool.targets.optimizer_states import fingerprint, optimizer_files

    builder = CopyBuilder(checkpoint)
    states, losses = optimizer_files(checkpoint, builder, dtype=dtype, max_shard_bytes=limit)
    metadata = {SAVE: fingerprint(checkpoint)}
    files = safetensors.safetensors_files(checkpoint, builder, selection, max_shard_bytes=limit, metadata=metadata)
    plan = CopyPlan(builder.sources, builder.casts, (*states, *files), consistency)
    return plan, safetensors.INDEX, losses
