"""Two compared checkpoints -> plan of a delta file."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.containers import safetensors
from ckpttool.dtypes import castable
from ckpttool.errors import PlanError
from ckpttool.formats.delta import FILE
from ckpttool.formats.delta_header import INDICES, VALUES, metadata_of
from ckpttool.model import MASTER
from ckpttool.model.derived.delta import TypedState, partners
from ckpttool.model.places import Renumbered
from ckpttool.plan import CopyPlan
from ckpttool.plan.builder import CopyBuilder
from ckpttool.targets.safetensors import check_names, safetensors_file
from ckpttool.targets.weights import Weight, WeightSelection, select_weights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.model import Checkpoint, CheckpointFile, State
    from ckpttool.model.derived.delta import Change, DeltaHeader


def typed_weights(checkpoint: Checkpoint, dtype: str | None, buffers: frozenset[str]) -> dict[str, TypedState]:
    """Return the weights and buffers of a checkpoint, each with the type that a delta has it in.

    Args:
        checkpoint: The checkpoint.
        dtype: Type of the parameters, safetensors' spelling. None: trained parameters have the type that the module
            computes in, all others the type that they are stored in.
        buffers: Names that are buffers even if this checkpoint does not tell them from parameters: they keep their
            type.

    Raises:
        PlanError: A parameter cannot be cast to ``dtype``.
    """
    if dtype is not None:
        chosen = select_weights(checkpoint, source="masters", dtype=dtype, include=(), exclude=(), exclude_frozen=False)
        return {w.name: TypedState(w.state, w.state.dtype if w.name in buffers else w.dtype) for w in chosen.weights}
    found = {}
    for parameter in checkpoint.parameters:
        state = checkpoint.weights(parameter)
        trained = MASTER in parameter.states and castable(state.dtype, checkpoint.dtype)
        found[parameter.name] = TypedState(state, checkpoint.dtype if trained else state.dtype)
    return found | {b.name: TypedState(b.state, b.state.dtype) for b in checkpoint.buffers}


def typed_pair(a: Checkpoint, b: Checkpoint, dtype: str | None) -> tuple[dict[str, TypedState], dict[str, TypedState]]:
    """Return the tensors of two checkpoints; one of the first has the name and type of the second's that it becomes.

    Raises:
        PlanError: A parameter cannot be cast to ``dtype``; or both hold nothing in common.
    """
    buffers = frozenset(x.name for c in (a, b) if c.tells_buffers for x in c.buffers)
    first, second = (typed_weights(c, dtype, buffers) for c in (a, b))
    found = partners(second, b.aliases, first, a.aliases)
    if not found:
        problem = f"holds no tensor of a name that {a.location} holds"
        raise PlanError(b.location, problem, "make a delta between checkpoints of one model")
    paired = {}
    for name, own in found.items():
        state, wanted = first[own].state, second[name].dtype
        if state.shape == second[name].state.shape and castable(state.dtype, wanted):
            del first[own]
            paired[name] = TypedState(state, wanted)
    return paired | first, second


def main_dtype(tensors: Mapping[str, TypedState]) -> str:
    """Return the floating-point type of most elements; F32 if there is none that ``consolidate`` writes."""
    counts = {"F32": 0, "BF16": 0, "F16": 0}
    for state, dtype in tensors.values():
        if dtype in counts:
            counts[dtype] += state.numel
    return max(counts, key=lambda d: counts[d])


def plan_delta(
    checkpoint: Checkpoint,
    tensors: Mapping[str, TypedState],
    changes: Sequence[Change],
    spooled: CheckpointFile,
    header: DeltaHeader,
) -> CopyPlan:
    """Plan the delta file.

    Args:
        checkpoint: The second checkpoint, which tensors that are stored whole are copied from.
        tensors: Its tensors.
        changes: The tensors that differ.
        spooled: The file with indices and values.
        header: The description.

    Raises:
        PlanError: A tensor has a name that the format cannot hold, or the description is too large.
    """
    spool = len(checkpoint.files)
    sources = replace(checkpoint, parameters=(), buffers=(), replicas=(), files=(*checkpoint.files, spooled))
    weights: list[Weight] = []
    for change in changes:
        if change.indices is None or change.values is None or _ambiguous(change.name, header.tensors):
            state, dtype = tensors[change.name]
            weights.append(Weight(change.name, state, dtype))
            continue
        for suffix, column in ((INDICES, change.indices), (VALUES, change.values)):
            weights.append(Weight(change.name + suffix, _renumbered(column, spool), column.dtype))
    selection = WeightSelection(tuple(weights), {})
    check_names(checkpoint.location, (w.name for w in weights))
    builder = CopyBuilder(sources)
    metadata = metadata_of(header) | {"changed_params": json.dumps([c.name for c in changes], ensure_ascii=False)}
    file = safetensors_file(builder, FILE, weights, selection, metadata)
    if len(file.literals[0][1]) > safetensors.MAX_HEADER_BYTES:
        problem = f"gives {FILE} a header of more than {safetensors.MAX_HEADER_BYTES:,} bytes"
        raise PlanError(checkpoint.location, problem, "copy the checkpoint instead")
    return CopyPlan(builder.sources, builder.casts, (file,), None)


def _ambiguous(name: str, tensors: Mapping[str, object]) -> bool:
    """Whether another tensor has the name of the indices or values of this one."""
    return name + INDICES in tensors or name + VALUES in tensors


def _renumbered(state: State, by: int) -> State:
    return replace(state, place=Renumbered(state.place, by))
