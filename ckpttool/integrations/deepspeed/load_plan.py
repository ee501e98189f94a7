"""The first half of a load: everything that may fail. It reads, into host memory, and leaves the engine as it is."""

from __future__ import annotations

import fnmatch
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpttool.commit.checksummed import GuardedStorage
from ckpttool.errors import LayoutError, PlanError
from ckpttool.execution.check_copies import failed_proofs
from ckpttool.execution.read_checks import checks_for
from ckpttool.execution.sources import Sources
from ckpttool.execution.virtual_file import PlannedFile, StoredFile
from ckpttool.formats.zero.experts import NATIVE
from ckpttool.integrations.deepspeed.engine import LiveEngine, version
from ckpttool.integrations.torch.objects import read_objects, unknown_class, unknown_classes
from ckpttool.model import MASTER, MODULE, Parameter
from ckpttool.plan.copy_checks import sample_checks, source_files
from ckpttool.targets.replicas import ALIGNMENT, Packed, plan_packed
from ckpttool.targets.zero.layout import piece, sub_groups
from ckpttool.targets.zero.match import Fitted, fit, listed
from ckpttool.targets.zero.shape import SUB_GROUP_SIZE, Shape, zero_losses
from ckpttool.targets.zero.writer import held_by, plan_rank

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpttool.execution.read_checks import Check, ReadChecks
    from ckpttool.model import Checkpoint, State
    from ckpttool.plan import CopyPlan

CONVERT = "ckpttool convert --to universal writes what engine.load_checkpoint reads with load_universal"
LEAST_SLICE_BYTES = 1 << 22
"""What all ranks hold alike is not cut into smaller slices to read."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How files are read."""

    memory: int
    """Bytes that requests in flight may take together where the checkpoint is distant."""
    check: Check = "read"
    """Which recorded CRC-32 to compare with what is read; a storage that checks by itself needs none."""
    allow: tuple[str, ...] = ()
    """Classes of objects that are built although ckpttool does not know them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replicas:
    """What all ranks hold alike: each rank has read a slice, and gets the others from those who have."""

    packed: Sequence[Packed]
    """Where each tensor lies in the whole."""
    nbytes: int
    """Bytes of the whole."""
    slice_bytes: int
    """Bytes of each rank's slice; a multiple of ALIGNMENT. The last ones may be shorter, or empty."""
    own: bytearray
    """This rank's slice."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """What has been read and is to be handed over."""

    road: str
    """"native" or "planned"."""
    checkpoint: Checkpoint
    """Where from."""
    fitted: Fitted | None
    """How it goes into the engine; None for a model that is spread over ranks by stages."""
    notes: tuple[str, ...]
    nbytes_read: int
    """Bytes that were read, or would be."""
    files: dict[str, Any] = field(default_factory=dict)
    """On the native road, what was in each file, by its name."""
    later: Callable[[str], Any] | None = None
    """On the native road, reads any other file."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """On the planned road, this rank's optimizer states."""
    model: dict[str, Any] = field(default_factory=dict)
    """On the planned road, this rank's model states; without what follows from the masters or all ranks hold alike."""
    replicas: Replicas | None = None
    checks: ReadChecks | None = None
    """On the planned road, checksums of what this rank has read, to be compared when all ranks have read."""

    def forget(self) -> None:
        """Free what has been handed over."""
        self.files.clear()
        self.optimizer.clear()
        self.model.clear()


def prepare(
    live: LiveEngine,
    checkpoint: Checkpoint,
    *,
    strict: bool,
    weights_only: bool,
    dry_run: bool,
    reading: Reading,
) -> Prepared:
    """Match a checkpoint with an engine, choose the road, and read what this rank needs.

    Args:
        live: The engine.
        checkpoint: Any source.
        strict: Whether all names must be on both sides.
        weights_only: Leave out what the optimizer keeps.
        dry_run: Read nothing.
        reading: How files are read.

    Raises:
        CkptError: They do not fit, or reading failed.
    """
    if isinstance(checkpoint.storage, GuardedStorage):
        reading = replace(reading, check="off")  # its manifest has all checksums
    if weights_only:
        checkpoint = replace(checkpoint, client_state={}, scheduler=None)  # whatever they hold
    for name in unknown_classes([checkpoint.client_state, checkpoint.scheduler], reading.allow)[:1]:
        raise unknown_class(checkpoint.location, name)
    if live.model is None or live.topology.tensor_parallel > 1:
        fitted = None
        if weights_only or live.topology != checkpoint.topology or not _same_kind(live, checkpoint):
            problem = (
                f"cannot be cut for the engine's {_parallel(live)}, which loads all that the same ranks have saved"
            )
            raise PlanError(checkpoint.location, problem, CONVERT)
        why_not = ""
    else:
        fitted = _fit(live, checkpoint, live.model, strict=strict, weights_only=weights_only)
        why_not = _why_not_native(live, checkpoint, fitted, weights_only)
    if not weights_only:
        from ckpttool.integrations.deepspeed.states import check_states  # imports torch

        check_states(live, checkpoint)
    if not why_not:
        return _native(live, checkpoint, fitted, strict=strict, dry_run=dry_run, reading=reading)
    if live.stage == 0 and not weights_only:
        problem = f"{why_not}, and the engine has no ZeRO stage"
        raise PlanError(checkpoint.location, problem, "configure stage 1, 2 or 3, or pass weights_only=True")
    if fitted is None or live.engine.zero_nvme_offload_optimizer():
        problem = f"{why_not}, and the engine keeps its optimizer on NVMe"
        raise PlanError(checkpoint.location, problem, "resume on the ranks that saved it, or offload to the CPU")
    return _planned(live, checkpoint, fitted, weights_only=weights_only, dry_run=dry_run, reading=reading)


# ------------------------------------------------------------------------------------------------------- which road


def _parallel(live: LiveEngine) -> str:
    t = live.topology
    return f"tensor ({t.tensor_parallel}) and pipeline ({t.pipeline_parallel}) parallelism"


def _same_kind(live: LiveEngine, checkpoint: Checkpoint) -> bool:
    """Whether the engine's files are like these: with stages 1 and 2 DeepSpeed writes and loads the same."""
    groups = {0: 0, 1: 1, 2: 1, 3: 3}
    same_stage = checkpoint.stage is not None and groups[checkpoint.stage] == groups[live.stage]
    return checkpoint.native and same_stage and checkpoint.dtype == live.dtype


def _why_not_native(live: LiveEngine, checkpoint: Checkpoint, fitted: Fitted, weights_only: bool) -> str:
    """Why DeepSpeed cannot load these files as they are; "" if it can."""
    if weights_only:
        return "weights alone are wanted"
    if not _same_kind(live, checkpoint):
        return "was not saved by such an engine"
    odd = fitted.missing or fitted.unexpected
    if odd or (live.stage and (fitted.fresh or fitted.kept or fitted.regrouped)):
        return "does not hold exactly the engine's parameters in its groups"
    if live.stage == 0:
        return (
            "" if live.topology.expert_parallel == checkpoint.topology.expert_parallel else "spreads experts otherwise"
        )
    if live.topology != checkpoint.topology:
        return "was saved by other ranks"
    config = checkpoint.ds_config.get("zero_optimization")
    config = config if isinstance(config, Mapping) else {}
    if live.stage < 3:
        was = (bool(config.get("round_robin_gradients")), bool(config.get("parameter_alignment")))
        return "" if was == (live.round_robin, live.alignment > 1) else "was partitioned in another order"
    limit = config.get("sub_group_size")
    limit = int(limit) if isinstance(limit, int | float) else SUB_GROUP_SIZE
    for group in fitted.checkpoint.groups if not live.engine.has_moe_layers else ():
        sizes = {p.name: p.numel for p in fitted.checkpoint.parameters if p.name in set(group.parameters)}
        sizes = {name: sizes[name] for name in group.parameters}
        cuts = [
            [len(s.sizes) for s in sub_groups(sizes, live.topology.data_parallel, n)]
            for n in (limit, live.sub_group_size)
        ]
        if cuts[0] != cuts[1]:
            return "was cut into other sub-groups"
    return ""


def _fit(live: LiveEngine, checkpoint: Checkpoint, model: Any, *, strict: bool, weights_only: bool) -> Fitted:
    if not live.engine.has_moe_layers:
        # What the optimizer of stage 0 keeps is DeepSpeed's own affair; names and shapes are compared all the same.
        return fit(checkpoint, model, strict=strict, weights_only=weights_only or not live.stage)
    # Each rank knows its own experts, by numbers of its own: they are taken as they come.
    if live.stage:
        try:
            held = held_by(checkpoint, _shape(live), live.rank)
        except ValueError as error:
            raise PlanError(checkpoint.location, str(error), CONVERT) from error
        ours = [[(name, model.shapes[name]) for name in names] for names in model.groups]
        if held != ours:
            flat, own = ([item for group in groups for item in group] for groups in (held, ours))
            odd = next((b[0] for a, b in zip(flat, own, strict=False) if a != b), "other groups")
            problem = f"trains other parameters than the model of experts, or in another order: {odd}"
            raise PlanError(checkpoint.location, problem, "build the optimizer as it was when it was saved")
    elif weights_only:
        raise PlanError(checkpoint.location, "cannot be spread over an engine's experts without ZeRO", "choose stage 1")
    if any(NATIVE.fullmatch(b.name) for b in checkpoint.buffers):
        problem = "holds buffers of experts, which cannot be handed out"
        raise PlanError(
            checkpoint.location, problem, "ckpttool convert --to zero writes what engine.load_checkpoint reads"
        )
    buffers = {b.name: b.state for b in checkpoint.buffers if b.name in model.buffers}
    fitted = checkpoint
    if weights_only:
        parameters = tuple(p if p.frozen else _without_moments(checkpoint, p) for p in checkpoint.parameters)
        groups = tuple(replace(g, scalars={}) for g in checkpoint.groups)
        fitted = replace(checkpoint, parameters=parameters, groups=groups)
    there = {b.name for b in checkpoint.buffers} | {p.name for p in checkpoint.parameters if p.frozen}
    missing = tuple(n for n in (*model.buffers, *model.frozen) if n not in there and live.stage)
    if strict and missing:
        hint = "pass strict=False, and these keep the values that the model has"
        raise PlanError(checkpoint.location, f"lacks {listed(missing)} of the model", hint)
    return Fitted(checkpoint=fitted, buffers=buffers, missing=missing)


def _without_moments(checkpoint: Checkpoint, p: Parameter) -> Parameter:
    return Parameter(p.name, p.shape, p.group, {MASTER: checkpoint.weights(p)})


# ------------------------------------------------------------------------------------------------------- native road


def _native(
    live: LiveEngine,
    checkpoint: Checkpoint,
    fitted: Fitted | None,
    *,
    strict: bool,
    dry_run: bool,
    reading: Reading,
) -> Prepared:
    from ckpttool.integrations.deepspeed import stage0

    if live.engine.zero_nvme_offload_optimizer() and checkpoint.storage.distant:
        problem = "lies on a distant storage, and what was offloaded to NVMe must be copied from a disk"
        raise PlanError(checkpoint.location, problem, "copy it with ckpttool cp")
    numbers = {file.name: number for number, file in enumerate(checkpoint.files)}
    wanted = [name for name in native_files(live, list(numbers)) if name in numbers]
    nbytes = sum(checkpoint.files[numbers[name]].nbytes for name in wanted)

    def later(name: str) -> Any:
        if name not in numbers:
            raise LayoutError(f"{checkpoint.location}/{name}", "is not there", "restore it from a copy")
        sums = checks_for(source_files(checkpoint), checkpoint, reading.check)
        with Sources(source_files(checkpoint), sums) as sources:
            found = read_objects(StoredFile(sources[numbers[name]], memory=reading.memory), reading.allow)
            sources.finish_checks()
            sources.check_unchanged()
        return found

    # Without ZeRO it may take the weights themselves to tell what the optimizer's numbers stand for.
    by_name = (
        not live.stage and live.model is not None and not live.engine.has_moe_layers and live.optimizer is not None
    )
    files: dict[str, Any] = {}
    if not dry_run or (not live.stage and (not by_name or stage0.needs_weights(live, checkpoint))):
        files = {name: later(name) for name in wanted}
    if by_name and live.model is not None:
        fitted = stage0.prepare_whole(live, checkpoint, live.model, files.get(wanted[0]), strict=strict)
    for held in files.values() if not live.stage and not by_name else ():
        if isinstance(held, dict) and held.get("optimizer") is not None:
            stage0.check_wrapper(live, checkpoint, held)
            stage0.check_places(live, checkpoint, held)
    own = () if fitted is None else fitted.notes
    return Prepared(
        road="native", checkpoint=checkpoint, fitted=fitted, nbytes_read=nbytes, files=files, later=later,
        notes=(*own, *map(str, checkpoint.notes), *checkpoint.remarks),
    )  # fmt: skip


def native_files(live: LiveEngine, names: Sequence[str]) -> list[str]:
    """The files of a checkpoint that DeepSpeed will ask for on this rank.

    Source: DeepSpeed 0.19.8, runtime/engine.py (``_load_checkpoint``, ``_get_all_zero_checkpoint_state_dicts``) and
    runtime/pipe/module.py (``load_state_dir``).
    """
    engine = live.engine
    wanted = [engine._get_ckpt_name("", "")]
    if live.stage:
        bf16 = engine.bfloat16_enabled()
        wanted.append(engine._get_rank_zero_ckpt_name("", "", engine.checkpoint_mp_rank, live.rank, bf16_mode=bf16))
    elif engine.has_moe_layers:
        from deepspeed.utils import groups

        expert_rank = groups._get_expert_parallel_rank(groups._get_max_expert_size_name())
        wanted.append(engine._get_optimizer_ckpt_name("", "", expert_rank))
    if live.model is None:
        grid, module = engine.module._grid, engine.module
        rank, ranks = grid.get_slice_parallel_rank(), grid.get_slice_parallel_world_size()
        for number, layer in enumerate(module.forward_funcs):
            if hasattr(layer, "load_state_dict"):
                files = sorted(fnmatch.filter(names, f"layer_{number + module._local_start:02d}-*model_states.pt"))
                wanted += files[rank * len(files) // ranks :][:1]
    if not (live.stage == 3 and engine.has_moe_layers):
        wanted += [expert.file for expert in own_experts(engine)]
    return [os.path.basename(name) for name in wanted]


@dataclass(frozen=True, slots=True)
class OwnExpert:
    """An expert of this rank."""

    file: str
    """Name of its file."""
    module: str
    """Name of the layer, if its experts are stacked; "" if each is a module by itself."""
    local: int
    """Its number on this rank;"""
    number: int
    """and among all."""


def own_experts(engine: Any) -> Iterator[OwnExpert]:
    """The experts of which DeepSpeed will ask for a file.

    Source: DeepSpeed 0.19.8, runtime/engine.py (``load_moe_state_dict``).
    """
    if not engine.has_moe_layers:
        return
    from deepspeed.utils import groups

    layer = 0
    for name, module in engine.module.named_modules():
        kind = {c.__name__ for c in type(module).__mro__}
        if not kind & {"MoE", "AutoEPMoELayer"}:
            continue
        stacked = "AutoEPMoELayer" in kind
        rank = groups._get_expert_parallel_rank(module.ep_group_name if stacked else module.expert_group_name)
        for local in range(module.num_local_experts):
            number = rank * module.num_local_experts + local
            path = engine._get_expert_ckpt_name("", layer, number, "", checkpoint_mp_rank=engine.checkpoint_mp_rank)
            yield OwnExpert(os.path.basename(path), name if stacked else "", local, number)
        layer += 1


# ------------------------------------------------------------------------------------------------------ planned road


def _shape(live: LiveEngine) -> Shape:
    experts = live.topology.expert_parallel if live.engine.has_moe_layers else None
    return Shape(
        live.topology.data_parallel, live.stage, live.sub_group_size, live.round_robin, live.dtype, experts,
        live.alignment,
    )  # fmt: skip


def _planned(
    live: LiveEngine,
    checkpoint: Checkpoint,
    fitted: Fitted,
    *,
    weights_only: bool,
    dry_run: bool,
    reading: Reading,
) -> Prepared:
    notes = [*fitted.notes, *map(str, checkpoint.notes), *checkpoint.remarks]
    plans: list[CopyPlan] = []
    if live.stage:
        shape = _shape(live)
        plans.append(plan_rank(fitted.checkpoint, shape, live.rank, tag=checkpoint.tag, fresh=fitted.fresh))
        notes += zero_losses(fitted.checkpoint, shape) if live.engine.has_moe_layers else []
    for name in ("random_ltd", "curriculum_learning"):
        enabled = getattr(live.engine, f"{name}_enabled", None)
        if enabled is not None and enabled() and not weights_only:
            notes.append(f"what {name} keeps is not carried over")
    packing, packed = plan_packed(fitted.checkpoint, _alike(live, fitted))
    plans.append(packing)
    whole = packing.files[0].nbytes
    ranks = live.topology.data_parallel
    slice_bytes = max(LEAST_SLICE_BYTES, -(-whole // (ranks * ALIGNMENT)) * ALIGNMENT)
    first = min(whole, live.rank * slice_bytes)
    own = bytearray(0 if dry_run else min(whole, first + slice_bytes) - first)
    replicas = Replicas(packed=packed, nbytes=whole, slice_bytes=slice_bytes, own=own)
    nbytes = plans[0].nbytes_read if live.stage else 0
    nbytes += sum(max(0, min(p.start + p.nbytes, first + slice_bytes) - max(p.start, first)) for p in packed)
    prepared = Prepared(
        road="planned", checkpoint=checkpoint, fitted=fitted, notes=tuple(notes), nbytes_read=nbytes, replicas=replicas
    )
    if dry_run:
        return prepared
    checks = checks_for(source_files(checkpoint), checkpoint, reading.check)
    prepared = replace(prepared, checks=checks)
    with Sources(source_files(checkpoint), checks) as sources:
        if live.rank == 0:
            for problem in failed_proofs(sample_checks(checkpoint), advance=lambda _: None, sources=sources):
                raise problem
        if own:
            with PlannedFile(packing, packing.files[0], sources, memory=reading.memory) as file:
                file.seek(first)
                file.readinto(own)
        read = []
        for target in plans[0].files if live.stage else ():
            with PlannedFile(plans[0], target, sources, memory=reading.memory) as file:
                read.append(read_objects(file, reading.allow))
        sources.check_unchanged()
    if not read:
        return prepared
    optimizer, model = read
    states = optimizer["optimizer_state_dict"]
    _check_partitions(live, checkpoint, states)
    _fill_missing(live, fitted, states, model)
    _complete(live, checkpoint, states)
    return replace(prepared, optimizer=optimizer, model=model)


def _alike(live: LiveEngine, fitted: Fitted) -> dict[str, State]:
    """What all ranks of the engine hold alike: buffers; below stage 3 frozen parameters; without ZeRO all of them."""
    alike = dict(fitted.buffers)
    for p in fitted.checkpoint.parameters:
        if ((p.frozen and live.stage < 3) or not live.stage) and (MASTER in p.states or MODULE in p.states):
            alike[p.name] = p.master_state
    return alike


def _masters(states: Mapping[str, Any]) -> list[Any]:
    return list(
        states["fp32_flat_groups"] if "fp32_flat_groups" in states else states["single_partition_of_fp32_groups"]
    )


def _check_partitions(live: LiveEngine, checkpoint: Checkpoint, states: Mapping[str, Any]) -> None:
    masters = _masters(states)
    paddings = states.get("group_paddings") or [0] * len(masters)
    planned = [m.numel() + padding for m, padding in zip(masters, paddings, strict=True)]
    own = [int(m.numel()) for m in live.masters]
    if planned != own:
        problem = f"partitions of {planned} elements were planned, and the engine of DeepSpeed {version()} has {own}"
        raise LayoutError(checkpoint.location, problem, "ckpttool convert, and use engine.load_checkpoint")


def _fill_missing(live: LiveEngine, fitted: Fitted, states: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Masters that the checkpoint lacks become what the engine has."""
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
    """What the checkpoint does not say, as the engine has it."""
    base = states.get("optimizer_state_dict") or states["base_optimizer_state"]
    groups = zip(base["param_groups"], live.hyperparameters, strict=True)
    base["param_groups"] = [{**own, **saved} for saved, own in groups]
    if not checkpoint.native:
        states.pop("clip_grad", None)
    if not keeps_loss_scale(live, checkpoint):
        states["loss_scaler"] = getattr(live.optimizer, "loss_scaler", states["loss_scaler"])
        states["dynamic_loss_scale"] = getattr(live.optimizer, "dynamic_loss_scale", states["dynamic_loss_scale"])


def keeps_loss_scale(live: LiveEngine, checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint's loss scale is one for this engine: it was saved, and by a run of the same type."""
    return checkpoint.loss_scaler is not None and checkpoint.dtype == live.dtype
