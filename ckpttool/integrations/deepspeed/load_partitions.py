"""Planned load: read the ranges of this rank's partitions from any source."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.containers.values import TensorRef, walk
from ckpttool.dtypes import DTYPES
from ckpttool.errors import LayoutError
from ckpttool.execution.checks import checks_for
from ckpttool.execution.copies import failed_checks
from ckpttool.execution.sources import Sources
from ckpttool.execution.virtual_file import VirtualFile
from ckpttool.integrations.deepspeed.engine import expert_sizes, keeps_loss_scale, version
from ckpttool.integrations.deepspeed.prepared import PackedTensor, PlannedState, Replicas, Unread
from ckpttool.integrations.torch.collectives import unexpected_is_damage
from ckpttool.integrations.torch.objects import read_objects, read_structure
from ckpttool.model import MASTER, MODULE
from ckpttool.plan.builder import ALIGNMENT, Placement, pack, sample_checks, source_files
from ckpttool.targets.zero.layout import Shape, piece, zero_losses
from ckpttool.targets.zero.writer import plan_rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpttool.containers.torch_file import TorchFile
    from ckpttool.integrations.deepspeed.engine import LiveEngine
    from ckpttool.integrations.live.options import LoadOptions
    from ckpttool.model import Checkpoint, State
    from ckpttool.plan import CopyPlan, TargetFile
    from ckpttool.targets.zero.match import Fitted


def plan_replicas(checkpoint: Checkpoint, tensors: Mapping[str, State]) -> tuple[CopyPlan, list[PackedTensor]]:
    """Plan a file of whole tensors, each in its own dtype.

    Args:
        checkpoint: The source.
        tensors: The state of each tensor, by any key.

    Returns:
        A plan of one file, and the offset of each tensor in it.
    """
    plan, offsets = pack(checkpoint, (Placement(state, state.dtype, 0) for state in tensors.values()))
    packed = [
        PackedTensor(name, state.dtype, at, state.nbytes)
        for (name, state), at in zip(tensors.items(), offsets, strict=True)
    ]
    return plan, packed


LEAST_SLICE_BYTES = 1 << 22
"""Minimum bytes of a rank's slice of the replicated tensors."""


def shape_of(live: LiveEngine) -> Shape:
    """Return how the engine partitions its state over ranks; without ZeRO, as stage 1 on a single rank."""
    if not live.stage:
        return Shape(1, 1, live.sub_group_size, round_robin=False, dtype=live.dtype)
    sizes = expert_sizes(live.engine)
    experts = sizes.pop() if len(sizes) == 1 else None  # with several, the source must have the same
    return Shape(
        live.topology.data_parallel,
        live.stage,
        live.sub_group_size,
        live.round_robin,
        live.dtype,
        experts,
        live.alignment,
    )


def read_partitions(
    live: LiveEngine,
    checkpoint: Checkpoint,
    fitted: Fitted,
    options: LoadOptions,
) -> PlannedState:
    """Read the ranges of this rank's partitions from any source; without ZeRO, all of the optimizer's states.

    Raises:
        CkptError: The partitions cannot be planned, or reading failed.
    """
    notes = [*fitted.notes, *map(str, checkpoint.notes), *checkpoint.remarks]
    plans: list[CopyPlan] = []
    has_states = live.partitions_states or not options.without_optimizer
    if has_states:
        shape = shape_of(live)
        rank = live.rank if live.stage else 0
        plans.append(plan_rank(fitted.checkpoint, shape, rank, tag=checkpoint.tag, fresh=fitted.fresh))
        notes += zero_losses(fitted.checkpoint, shape) if live.engine.has_moe_layers else []
    replica_plan, tensors = plan_replicas(fitted.checkpoint, _replicated(live, fitted))
    plans.append(replica_plan)
    total = replica_plan.files[0].nbytes
    ranks = live.topology.data_parallel
    slice_bytes = max(LEAST_SLICE_BYTES, -(-total // (ranks * ALIGNMENT)) * ALIGNMENT) if options.staged else total
    first = min(total, live.rank * slice_bytes) if options.staged else 0
    own = bytearray(min(total, first + slice_bytes) - first if options.staged and not options.dry_run else 0)
    replicas = Replicas(tensors=tensors, nbytes=total, slice_bytes=slice_bytes, own=own)
    nbytes = plans[0].nbytes_read if has_states else 0
    nbytes += sum(max(0, min(p.start + p.nbytes, first + slice_bytes) - max(p.start, first)) for p in tensors)
    prepared = PlannedState(
        checkpoint=checkpoint,
        fitted=fitted,
        notes=tuple(notes),
        nbytes_read=nbytes,
        replicas=replicas if options.staged else None,
    )
    if options.dry_run:
        return prepared
    checks = checks_for(source_files(checkpoint), checkpoint, options.check)
    prepared = replace(prepared, checks=checks)
    read, unread = [], [] if options.staged else [_unread_replicas(live, replica_plan, tensors)]
    with Sources(source_files(checkpoint), checks) as sources:
        if live.rank == 0:
            for problem in failed_checks(sample_checks(checkpoint), advance=lambda _: None, sources=sources):
                sources.finish_checks()  # which names a damaged file
                raise problem
        if own:
            with VirtualFile(replica_plan, replica_plan.files[0], sources, memory=options.memory_bytes) as file:
                file.seek(first)
                file.readinto(own)
        for target in plans[0].files if has_states else ():
            with VirtualFile(plans[0], target, sources, memory=options.memory_bytes) as file:
                structure = read_structure(file)
                tensors_of_engine = {} if options.staged else _tensors_of_engine(live, structure.root)
                read.append(read_objects(file, options.allow, read=structure, own=tensors_of_engine))
            if not options.staged:
                unread.append(_unread(plans[0], target, structure, tensors_of_engine))
        sources.check_unchanged()
    prepared = replace(prepared, unread=unread)
    return _with_partitions(live, prepared, *read) if read else prepared


def _unread(plan: CopyPlan, file: TargetFile, structure: TorchFile, tensors: Mapping[str, Any]) -> Unread:
    """Return the tensors of the engine that a planned file fills, with their places in it."""
    from ckpttool.integrations.torch.fill import Part  # imports torch

    refs = {ref.storage.key: ref for ref in walk(structure.root) if isinstance(ref, TensorRef)}
    parts = [Part(structure.storages[key].start, _torch_type(refs[key].dtype), own) for key, own in tensors.items()]
    return Unread(plan, file, parts)


def _unread_replicas(live: LiveEngine, plan: CopyPlan, packed: Sequence[PackedTensor]) -> Unread:
    """Return the tensors of the engine that the replicas fill."""
    from ckpttool.integrations.deepspeed.inject import targets_by_name  # imports torch
    from ckpttool.integrations.torch.fill import Part

    targets = targets_by_name(live) if packed else {}
    parts = [Part(one.start, _torch_type(one.dtype), target.tensor) for one in packed for target in targets[one.name]]
    return Unread(plan, plan.files[0], parts)


def _tensors_of_engine(live: LiveEngine, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's tensors that a planned file fills, by the keys of their storages.

    A state that the engine does not have yet is not among them: it is read into new memory, which becomes the engine's.
    """
    states = root.get("optimizer_state_dict")
    if states is None:
        parameters, fragments = live.parameters(), root["frozen_param_fragments"] or {}
        return _in_place((ref, parameters[name].ds_tensor.detach()) for name, ref in fragments.items())
    base = states.get("base_optimizer_state") or states["optimizer_state_dict"]
    found: dict[str, Any] = {}
    for number, (ref, master) in enumerate(zip(_masters(states), live.masters, strict=False)):
        own = live.optimizer.optimizer.state.get(master, {})
        found |= _in_place((value, own.get(key)) for key, value in base["state"].get(number, {}).items())
        if ref.numel <= master.numel():  # else ``_check_partitions`` refuses it
            found[ref.storage.key] = master.detach()[: ref.numel]  # of any type: DeepSpeed casts it, too
    return found


def _in_place(pairs: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    """Return the engine's tensors of some pairs of a planned value and the engine's that have the same shape and type.

    Only flat tensors count: a step is a number, which DeepSpeed sets.
    """
    return {
        ref.storage.key: own
        for ref, own in pairs
        if isinstance(ref, TensorRef) and len(ref.shape) == 1 and getattr(own, "shape", None) == ref.shape
        if own.dtype == _torch_type(ref.dtype)
    }


def _torch_type(name: str) -> Any:
    import torch

    return getattr(torch, DTYPES[name].torch)


def fill_engine(live: LiveEngine, prepared: PlannedState, options: LoadOptions) -> None:
    """Read the ranges of this rank straight into the engine.

    Raises:
        CkptError: Reading failed; the engine has a part of the state.
    """
    from ckpttool.integrations.torch.fill import fill  # imports torch

    with unexpected_is_damage(prepared.checkpoint.location):
        with Sources(source_files(prepared.checkpoint), prepared.checks) as sources:
            for plan, target, parts in prepared.unread:
                with VirtualFile(plan, target, sources, memory=options.memory_bytes) as file:
                    fill(file, parts, options.memory_bytes)
            sources.check_unchanged()
        if states := prepared.optimizer.get("optimizer_state_dict"):
            masters = states[_key_of_masters(states)]
            for number, own in enumerate(live.masters):  # whole, so that DeepSpeed makes no padded copies
                own.detach()[masters[number].numel() :].zero_()
                masters[number] = own.detach()


def _with_partitions(
    live: LiveEngine, prepared: PlannedState, optimizer: dict[str, Any], model: dict[str, Any]
) -> PlannedState:
    """Add this rank's partitions, completed with the engine's values.

    Raises:
        LayoutError: The planned partitions differ in size from the engine's.
    """
    states = optimizer["optimizer_state_dict"]
    if not live.stage and prepared.fitted is not None and live.model is not None:
        from ckpttool.integrations.deepspeed.stage0 import from_partition  # imports torch

        model["optimizer"] = from_partition(live, live.model, prepared.fitted, states)
        return replace(prepared, model=model)
    _check_partitions(live, prepared.checkpoint, states)
    if prepared.fitted is not None:
        _fill_missing(live, prepared.fitted, states, model)
    _complete(live, prepared.checkpoint, states)
    return replace(prepared, optimizer=optimizer, model=model)


def _replicated(live: LiveEngine, fitted: Fitted) -> dict[str, State]:
    """Return the state that one rank reads for all: buffers; below stage 3 also frozen parameters; or all state."""
    replicated = dict(fitted.buffers)
    for p in fitted.checkpoint.parameters:
        if (p.frozen and live.stage < 3) or not live.partitions_states:
            state = p.states.get(MASTER) or p.states.get(MODULE)
            if state is not None:
                replicated[p.name] = state
    return replicated


def _masters(states: Mapping[str, Any]) -> list[Any]:
    return list(states[_key_of_masters(states)])


def _key_of_masters(states: Mapping[str, Any]) -> str:
    return "fp32_flat_groups" if "fp32_flat_groups" in states else "single_partition_of_fp32_groups"


def _check_partitions(live: LiveEngine, checkpoint: Checkpoint, states: Mapping[str, Any]) -> None:
    masters = _masters(states)
    paddings = states.get("group_paddings") or [0] * len(masters)
    planned = [m.numel() + padding for m, padding in zip(masters, paddings, strict=True)]
    actual = [int(m.numel()) for m in live.masters]
    if planned != actual:
        problem = f"has partitions of {planned} elements by plan, but the engine of DeepSpeed {version()} has {actual}"
        raise LayoutError(checkpoint.location, problem, "convert it, and use engine.load_checkpoint")


def _fill_missing(live: LiveEngine, fitted: Fitted, states: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Fill fp32 master weights that the checkpoint lacks from the engine."""
    missing = set(fitted.missing)
    for number, (planned, own) in enumerate(zip(_masters(states), live.masters, strict=True) if missing else ()):
        if live.stage < 3:
            places = {n: (f.start, f.numel) for n, f in states["param_slice_mappings"][number].items()}
        else:
            places, at = {}, 0
            for name, shape in model["param_shapes"][number].items():
                size = piece(math.prod(shape), live.topology.data_parallel)
                places[name] = (at, size)
                at += size
        for name, (start, numel) in places.items():
            if name in missing:
                planned[start : start + numel].copy_(own.detach()[start : start + numel])


def _complete(live: LiveEngine, checkpoint: Checkpoint, states: dict[str, Any]) -> None:
    """Fill settings that the checkpoint lacks from the engine."""
    base = states.get("optimizer_state_dict") or states["base_optimizer_state"]
    groups = zip(base["param_groups"], live.hyperparameters, strict=True)
    base["param_groups"] = [{**own, **saved} for saved, own in groups]
    if not checkpoint.native:
        states.pop("clip_grad", None)
    if not keeps_loss_scale(live, checkpoint):
        states["loss_scaler"] = getattr(live.optimizer, "loss_scaler", states["loss_scaler"])
        states["dynamic_loss_scale"] = getattr(live.optimizer, "dynamic_loss_scale", states["dynamic_loss_scale"])
