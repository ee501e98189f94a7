"""The first half of a load: match a checkpoint with the engine, choose a method, and read into host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.commit import has_manifest
from ckpttool.commit.manifest import commit_directory
from ckpttool.errors import PlanError
from ckpttool.execution.checks import checks_for
from ckpttool.execution.sources import Sources
from ckpttool.execution.virtual_file import VirtualFile
from ckpttool.formats.zero.experts import NATIVE
from ckpttool.integrations.deepspeed.engine import expert_sizes, has_optimizer
from ckpttool.integrations.deepspeed.load_native import EXPERT_LAYERS, read_native
from ckpttool.integrations.deepspeed.load_partitions import read_partitions, shape_of
from ckpttool.integrations.torch.objects import read_objects, unknown_class, unknown_classes
from ckpttool.model import MASTER, Parameter
from ckpttool.model.names import with_names_of
from ckpttool.plan import CopyPlan
from ckpttool.plan.builder import CopyBuilder
from ckpttool.storage import connect
from ckpttool.targets.torch import TorchFileBuilder, copy_embedded, lacks_tensors
from ckpttool.targets.zero.experts import TargetExperts
from ckpttool.targets.zero.layout import SUB_GROUP_SIZE, sub_groups
from ckpttool.targets.zero.match import Fitted, check_partitionable, fit, listed
from ckpttool.targets.zero.writer import local_shapes

if TYPE_CHECKING:
    from ckpttool.integrations.deepspeed.engine import LiveEngine
    from ckpttool.integrations.deepspeed.prepared import LoadOptions, NativeState, PlannedState
    from ckpttool.model import Checkpoint

BUILD_ALIKE = "build the model with the shapes of the checkpoint"
CONVERT = "convert it to a universal checkpoint, and load that with load_universal"


def prepare(
    live: LiveEngine,
    checkpoint: Checkpoint,
    options: LoadOptions,
) -> NativeState | PlannedState:
    """Match a checkpoint with an engine, choose the method, and read the state of this rank, without changes to it.

    Args:
        live: The engine.
        checkpoint: Any source.
        options: What to restore, and how to read.

    Raises:
        CkptError: The checkpoint does not fit the engine, or reading failed.
    """
    options = load_options(checkpoint, options)
    if checkpoint.thin and not options.without_optimizer:
        raise thin_error(checkpoint)
    if not options.without_optimizer and live.optimizer is not None and not has_optimizer(live.optimizer):
        problem = "cannot be resumed from: the engine has no optimizer"
        raise PlanError(checkpoint.location, problem, "pass weights_only=True, or an optimizer to deepspeed.initialize")
    if live.model is not None:
        checkpoint = with_names_of(checkpoint, {*live.model.shapes, *live.model.buffers, *live.model.aliases})
    _check_module(live, checkpoint, strict=options.strict)
    if options.without_optimizer:
        bare = replace(checkpoint, client_state={}, scheduler=None)
        prepared = _prepare(live, bare, options)
        return replace(prepared, checkpoint=checkpoint, run_state=_run_state(checkpoint, options))
    for name in unknown_classes([checkpoint.client_state, checkpoint.scheduler], options.allow)[:1]:
        raise unknown_class(checkpoint.location, name)
    return _prepare(live, checkpoint, options)


def _run_state(checkpoint: Checkpoint, options: LoadOptions) -> Mapping[str, Any]:
    """Return the client state and the scheduler's state, without the files of the ranks.

    Raises:
        CkptError: They contain objects of a class that ``allow`` does not name, or reading failed.
    """
    client_state = checkpoint.client_state
    scheduler = None if options.weights_only else checkpoint.scheduler
    unknown = unknown_classes([client_state, scheduler], options.allow)
    if options.weights_only and (unknown or lacks_tensors(checkpoint, client_state)):
        client_state = {}
    elif unknown:
        raise unknown_class(checkpoint.location, unknown[0])
    values = {"client_state": client_state, "scheduler": scheduler}
    if options.dry_run:
        return values
    builder = CopyBuilder(checkpoint)
    file = TorchFileBuilder("run_state.pt", builder)
    target = file.build({name: copy_embedded(file, checkpoint, value) for name, value in values.items()})
    plan = CopyPlan(builder.sources, builder.casts, (target,))
    checks = checks_for(builder.sources, checkpoint, options.check)
    with Sources(builder.sources, checks) as sources:
        with VirtualFile(plan, target, sources, memory=options.memory_bytes) as stream:
            read: Mapping[str, Any] = read_objects(stream, options.allow)
        sources.finish_checks()
        sources.check_unchanged()
    return read


def _prepare(live: LiveEngine, checkpoint: Checkpoint, options: LoadOptions) -> NativeState | PlannedState:
    if live.model is None or live.topology.tensor_parallel > 1:
        fitted = None
        if options.without_optimizer or live.topology != checkpoint.topology or not _same_kind(live, checkpoint):
            problem = f"cannot be re-partitioned for the engine's {_parallel(live)}: only the same ranks can load it"
            raise PlanError(checkpoint.location, problem, CONVERT)
        why_not = ""
    else:
        fitted = _fit(live, checkpoint, live.model, options)
        why_not = _why_not_native(live, checkpoint, fitted, options.without_optimizer)
    groups = len(live.model.groups) if live.model is not None else len(live.hyperparameters)
    if not options.without_optimizer and len(live.hyperparameters) != groups:
        problem = f"cannot be loaded: DeepSpeed has rebuilt the optimizer of {groups} groups with a single group"
        raise PlanError(checkpoint.location, problem, "build the optimizer with one group, or pass weights_only=True")
    if not options.without_optimizer:
        from ckpttool.integrations.deepspeed.states import check_states  # imports torch

        check_states(live, checkpoint)
    if fitted is None or not why_not:
        return read_native(live, checkpoint, fitted, options)
    return _prepare_planned(live, checkpoint, fitted, options, why_not)


def _prepare_planned(
    live: LiveEngine, checkpoint: Checkpoint, fitted: Fitted, options: LoadOptions, why_not: str
) -> PlannedState:
    """Read the state of this rank for an engine of another layout, if all of it can be partitioned again."""
    if not options.without_optimizer:
        check_partitionable(checkpoint)
    if live.stage == 0 and not options.without_optimizer and live.model is not None:
        if live.engine.has_moe_layers:
            problem = f"{why_not}, and the engine has experts but no ZeRO stage"
            raise PlanError(checkpoint.location, problem, "configure stage 1, 2 or 3, or pass weights_only=True")
        if live.optimizer is None:
            raise PlanError(
                checkpoint.location, f"{why_not}, and the engine has no optimizer", "pass weights_only=True"
            )
        fitted = fit(checkpoint, live.model, strict=options.strict, weights_only=False)
    if live.model is not None and live.model.others:
        if options.strict and not options.without_optimizer:
            problem = f"{why_not}, and no other layout can restore {listed(live.model.others)} of the model"
            raise PlanError(checkpoint.location, problem, "pass strict=False, and they keep the model's values")
        fitted = replace(fitted, notes=(*fitted.notes, f"{listed(live.model.others)}: the model keeps its own values"))
    return read_partitions(live, checkpoint, fitted, options)


def _check_module(live: LiveEngine, checkpoint: Checkpoint, *, strict: bool) -> None:
    """Check that files can contain the tensors of the module, and that torch can write into them.

    Source: torch 2.13, aten/src/ATen/MemoryOverlap.cpp (``has_internal_overlap``).

    Raises:
        PlanError: A tensor is of a kind that cannot be restored.
    """
    own = live.buffers()
    for name, value in live.engine.module.state_dict().items() if live.model is not None else ():
        if not hasattr(value, "layout"):  # extra state may be anything
            continue
        problem, hint = "", "register a dense tensor"
        if str(value.layout) != "torch.strided":
            problem = "is a sparse tensor, which ckpttool does not read" if strict else ""
        elif value.is_conj() or value.is_neg():
            problem = "is a conjugate or negated view, which ckpttool does not read" if strict else ""
        elif name in own and any(
            size > 1 and not stride for size, stride in zip(value.shape, value.stride(), strict=True)
        ):
            problem, hint = "is an expanded view, which torch cannot load into", "register a clone() of it"
        if problem:
            raise PlanError(checkpoint.location, f"{name} of the model {problem}", hint)


def thin_error(checkpoint: Checkpoint) -> PlanError:
    """Return the error of a load that wants more than the weights of a thin checkpoint."""
    problem = "is thin: prune has removed its optimizer states, and kept the weights"
    return PlanError(checkpoint.location, problem, "load it with weights_only=True, or choose a whole checkpoint")


def load_options(checkpoint: Checkpoint, options: LoadOptions) -> LoadOptions:
    """Return the options with all checksums to be compared, if a manifest covers every byte."""
    storage = connect(checkpoint.storage)
    committed = has_manifest(storage, commit_directory(storage, checkpoint.location)[0])
    return replace(options, check="full") if committed else options


def _parallel(live: LiveEngine) -> str:
    t = live.topology
    return f"tensor ({t.tensor_parallel}) and pipeline ({t.pipeline_parallel}) parallelism"


def _same_kind(live: LiveEngine, checkpoint: Checkpoint) -> bool:
    """Whether the engine saves files of the same layout; stages 1 and 2 share one."""
    groups = {0: 0, 1: 1, 2: 1, 3: 3}
    same_stage = checkpoint.stage is not None and groups[checkpoint.stage] == groups[live.stage]
    return checkpoint.native and same_stage and checkpoint.dtype == live.dtype


def _is_elastic(checkpoint: Checkpoint) -> bool:
    """Whether the files have no hyper-parameters: the engine's are used."""
    config = checkpoint.ds_config.get("zero_optimization")
    elastic = isinstance(config, Mapping) and bool(config.get("elastic_checkpoint"))
    return elastic and not any(group.hyperparameters.keys() - {"step"} for group in checkpoint.groups)


def _why_not_native(live: LiveEngine, checkpoint: Checkpoint, fitted: Fitted, without_optimizer: bool) -> str:
    """Return why DeepSpeed cannot load these files directly; "" if it can."""
    if without_optimizer:
        return "the optimizer's states are left out"
    if not _same_kind(live, checkpoint):
        return "differs from the engine in stage, dtype or format"
    if checkpoint.renamed:
        return "has the engine's parameters under other names"
    differs: object = fitted.missing or fitted.unexpected
    if not live.stage and live.model is not None:  # untrained parameters may differ
        differs = {*fitted.missing}.intersection(*live.model.groups)
    kept = fitted.unrestored_groups and not _is_elastic(checkpoint)
    if differs or (live.stage and (fitted.fresh or kept or fitted.regrouped)):
        return "does not have exactly the engine's parameters and groups"
    if live.stage == 0:
        return (
            ""
            if live.topology.expert_parallel == checkpoint.topology.expert_parallel
            else "has another expert-parallel size"
        )
    if live.topology != checkpoint.topology:
        return "was saved by other ranks"
    if any(file.kind == "swapped" for file in checkpoint.files):
        return "has optimizer states on NVMe"
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
            return "has other sub-groups"
    return ""


def _fit(live: LiveEngine, checkpoint: Checkpoint, model: Any, options: LoadOptions) -> Fitted:
    # DeepSpeed restores the optimizer itself at stage 0, and from files of the same layout: states that no other layout
    # can store are restored there. Names and shapes are compared nevertheless.
    same = _same_kind(live, checkpoint) and live.topology == checkpoint.topology
    if same or options.without_optimizer:
        parameters = tuple(replace(p, numbers={}) for p in checkpoint.parameters)
        checkpoint = replace(checkpoint, nonpartitionable=(), parameters=parameters)
    if not live.engine.has_moe_layers:
        return fit(checkpoint, model, strict=options.strict, weights_only=options.without_optimizer or not live.stage)
    # Each rank names its experts by local indexes.
    if live.stage:
        _check_experts(live, checkpoint)
        try:
            planned = local_shapes(checkpoint, shape_of(live), live.rank)
        except ValueError as error:
            raise PlanError(checkpoint.location, str(error), CONVERT) from error
        ours = [[(name, model.shapes[name]) for name in names] for names in model.groups]
        for name, shape in (item for group in planned for item in group):
            if model.shapes.get(name, shape) != shape:
                problem = f"{name} has shape {list(shape)}, but {list(model.shapes[name])} in the model"
                raise PlanError(checkpoint.location, problem, BUILD_ALIKE)
        if len(expert_sizes(live.engine)) > 1:
            both = [group.hyperparameters for group in checkpoint.groups], live.hyperparameters
            saved, own = ([options.get("name") for options in each if options.get("moe")] for each in both)
            if saved != own:
                names, others = (", ".join(map(str, each)) for each in (saved, own))
                alike = sorted(map(str, saved)) == sorted(map(str, own))
                hint = "set PYTHONHASHSEED as in the saved run" if alike else "spread each layer over the same ranks"
                raise PlanError(checkpoint.location, f"has groups of experts {names}, but the engine {others}", hint)
        if planned != ours:
            flat, actual = ([item for group in groups for item in group] for groups in (planned, ours))
            difference = next((b[0] for a, b in zip(flat, actual, strict=False) if a != b), "other groups")
            problem = f"differs from the model in the trained parameters of experts, or in their order: {difference}"
            raise PlanError(checkpoint.location, problem, "build the optimizer with the groups of the saved run")
    elif options.without_optimizer:
        raise PlanError(
            checkpoint.location, "cannot be distributed over an engine's experts without ZeRO", "choose stage 1"
        )
    if any(NATIVE.fullmatch(b.name) for b in checkpoint.buffers):
        problem = "holds buffers of experts, which cannot be distributed over ranks"
        raise PlanError(checkpoint.location, problem, "convert it to zero, and use engine.load_checkpoint")
    buffers = {b.name: b.state for b in checkpoint.buffers if b.name in model.buffers}
    fitted = checkpoint
    if options.without_optimizer:
        parameters = tuple(p if p.frozen else _without_moments(checkpoint, p) for p in checkpoint.parameters)
        groups = tuple(replace(g, scalars={}) for g in checkpoint.groups)
        fitted = replace(checkpoint, parameters=parameters, groups=groups)
    stored = {b.name for b in checkpoint.buffers} | {p.name for p in checkpoint.parameters if p.frozen}
    missing = tuple(n for n in (*model.buffers, *model.frozen) if n not in stored and live.stage)
    if options.strict and missing:
        hint = "pass strict=False, and they keep the model's values"
        raise PlanError(checkpoint.location, f"lacks {listed(missing)} of the model", hint)
    return Fitted(checkpoint=fitted, buffers=buffers, missing=missing)


def _check_experts(live: LiveEngine, checkpoint: Checkpoint) -> None:
    """Check that the layers of the engine's model have as many experts as in the checkpoint.

    Raises:
        PlanError: The numbers differ.
    """
    layers = TargetExperts(checkpoint, live.topology.data_parallel, parallel=1).layers
    modules = (
        (name, int(module.num_experts))
        for name, module in live.engine.module.named_modules()
        if {c.__name__ for c in type(module).__mro__} & EXPERT_LAYERS
    )
    for layer, (name, count) in zip(layers, modules, strict=False):
        if layer.experts != count:
            problem = f"has {layer.experts} experts in {name}, but the model has {count}"
            raise PlanError(checkpoint.location, problem, BUILD_ALIKE)


def _without_moments(checkpoint: Checkpoint, p: Parameter) -> Parameter:
    return Parameter(p.name, p.shape, p.group, {MASTER: checkpoint.weights(p)})
