"""Decide whether and how an engine can be loaded from a checkpoint, by descriptions of both; no tensor is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.errors import PlanError
from ckpttool.formats import in_order
from ckpttool.formats.strided import is_expanded
from ckpttool.formats.zero.experts import NATIVE
from ckpttool.integrations.deepspeed.engine import OFFLOAD, expert_sizes, has_optimizer
from ckpttool.integrations.deepspeed.load_native import EXPERT_LAYERS
from ckpttool.integrations.deepspeed.load_partitions import shape_of
from ckpttool.integrations.live.run import thin_error
from ckpttool.integrations.torch.objects import unknown_class, unknown_classes
from ckpttool.model import MASTER, Parameter
from ckpttool.model.names import ORDER, with_names_of
from ckpttool.targets.zero.experts import TargetExperts
from ckpttool.targets.zero.layout import SUB_GROUP_SIZE, sub_groups
from ckpttool.targets.zero.match import Fitted, check_partitionable, fit, listed
from ckpttool.targets.zero.writer import local_shapes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpttool.integrations.deepspeed.engine import LiveEngine
    from ckpttool.integrations.live.options import LoadOptions
    from ckpttool.model import Checkpoint

BUILD_ALIKE = "build the model with the shapes of the checkpoint"
CONVERT = "convert it to a universal checkpoint, and load that with load_universal"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Match:
    """How an engine can be loaded from a checkpoint."""

    checkpoint: Checkpoint
    """The checkpoint, by the engine's names."""
    fitted: Fitted | None
    """Its parameters matched with the engine's; None for a model with tensor or pipeline parallelism."""
    reasons: tuple[str, ...] = ()
    """Why DeepSpeed cannot load the files as they are; empty if it can."""

    @property
    def method(self) -> Literal["native", "planned"]:
        """Native if DeepSpeed gets the content of its own files, "planned" if each rank reads its own ranges."""
        return "planned" if self.reasons else "native"


def match(live: LiveEngine, checkpoint: Checkpoint, options: LoadOptions) -> Match:
    """Match a checkpoint with an engine, and choose the method.

    Args:
        live: The engine.
        checkpoint: Any source; or a description of a save, whose states have no place in a file.
        options: What to restore.

    Raises:
        PlanError: The engine cannot be loaded from it.
    """
    if checkpoint.thin and not options.without_optimizer:
        raise thin_error(checkpoint)
    if not options.without_optimizer and live.optimizer is not None and not has_optimizer(live.optimizer):
        problem = "cannot be resumed from: the engine has no optimizer"
        raise PlanError(checkpoint.location, problem, "pass weights_only=True, or an optimizer to deepspeed.initialize")
    if live.model is not None:
        checkpoint = with_names_of(checkpoint, {*live.model.shapes, *live.model.buffers, *live.model.aliases})
    check_module(live, checkpoint.location, strict=options.strict)
    source = checkpoint
    if options.without_optimizer:
        source = replace(checkpoint, client_state={}, scheduler=None)  # read apart
    for name in unknown_classes([source.client_state, source.scheduler], options.allow)[:1]:
        raise unknown_class(checkpoint.location, name)
    fitted = _fitted(live, source, options)
    groups = len(live.model.groups) if live.model is not None else len(live.hyperparameters)
    if not options.without_optimizer and len(live.hyperparameters) != groups:
        problem = f"cannot be loaded: DeepSpeed has rebuilt the optimizer of {groups} groups with a single group"
        raise PlanError(checkpoint.location, problem, "build the optimizer with one group, or pass weights_only=True")
    if not options.without_optimizer:
        from ckpttool.integrations.deepspeed.states import check_states  # imports torch

        check_states(live, checkpoint)
    reasons = () if fitted is None else tuple(_differences(live, source, fitted, options))
    if not options.staged:
        _check_in_place(live, checkpoint, fitted, options)
        reasons = reasons or ("is read straight into the engine",)
    if live.model is not None and reasons and ORDER in checkpoint.remarks and not options.without_optimizer:
        from ckpttool.integrations.deepspeed.stage0 import live_names  # imports torch

        again = in_order(checkpoint, [name for names in live_names(checkpoint, live.model) for name in names])
        if again is not checkpoint:
            return match(live, again, options)
    if fitted is not None and reasons:
        fitted = _partitionable(live, source, fitted, options, reasons[0])
    return Match(checkpoint=checkpoint, fitted=fitted, reasons=reasons)


def _fitted(live: LiveEngine, checkpoint: Checkpoint, options: LoadOptions) -> Fitted | None:
    """Match the names and shapes of parameters; None if this rank does not have all of them.

    Raises:
        PlanError: They do not fit.
    """
    if live.model is not None and live.topology.tensor_parallel == 1:
        return _fit(live, checkpoint, live.model, options)
    if options.without_optimizer or live.topology != checkpoint.topology or not _same_kind(live, checkpoint):
        problem = f"cannot be re-partitioned for the engine's {_parallel(live)}: only the same ranks can load it"
        raise PlanError(checkpoint.location, problem, CONVERT)
    return None


def _differences(live: LiveEngine, checkpoint: Checkpoint, fitted: Fitted, options: LoadOptions) -> Iterator[str]:
    """Yield why DeepSpeed cannot load these files as they are; nothing if it can."""
    if options.without_optimizer:
        yield "the optimizer's states are left out"
        return
    if not _same_kind(live, checkpoint):
        yield "differs from the engine in stage, dtype or format"
        return
    if checkpoint.renamed:
        yield "has the engine's parameters under other names"
    if _has_other_names(live, checkpoint, fitted):
        yield "does not have exactly the engine's parameters and groups"
    if live.stage == 0:
        if live.topology.expert_parallel != checkpoint.topology.expert_parallel:
            yield "has another expert-parallel size"
        return
    if live.stage == 3 and fitted.untied:  # DeepSpeed loads frozen parameters by name, from a list of their own
        yield f"has {listed(fitted.untied)} in another parameter"
    if live.topology != checkpoint.topology:
        yield "was saved by other ranks"
    if any(file.kind == "swapped" for file in checkpoint.files):
        yield "has optimizer states on NVMe"
    zero = checkpoint.ds_config.get("zero_optimization")
    settings = zero if isinstance(zero, Mapping) else {}
    if live.stage < 3:
        was = bool(settings.get("round_robin_gradients")), bool(settings.get("parameter_alignment"))
        if was != (live.round_robin, live.alignment > 1):
            yield "was partitioned in another order"
    elif not live.engine.has_moe_layers and _has_other_sub_groups(live, fitted, settings.get("sub_group_size")):
        yield "has other sub-groups"


def _check_in_place(live: LiveEngine, checkpoint: Checkpoint, fitted: Fitted | None, options: LoadOptions) -> None:
    """Check that the state can be read straight into the engine.

    Raises:
        PlanError: It cannot.
    """
    trained = {name for group in live.model.groups for name in group} if live.model is not None else set()
    why = ""
    if fitted is None:
        why = f"{_parallel(live)} pass whole files to DeepSpeed"
    elif live.wrapper == OFFLOAD:
        why = "it has ZeRO-3 without an optimizer"
    elif not live.stage and not options.without_optimizer:
        why = "it has an optimizer without ZeRO, whose states DeepSpeed copies"
    elif kept := [name for name in fitted.missing if name in trained]:
        why = f"it keeps its values of {listed(kept)}, which the checkpoint lacks"
    if why:
        problem = f"cannot be read straight into the engine: {why}"
        raise PlanError(checkpoint.location, problem, "leave out staged=False")


def _has_other_names(live: LiveEngine, checkpoint: Checkpoint, fitted: Fitted) -> bool:
    """Return whether parameters, or their groups, differ between checkpoint and engine."""
    if not live.stage and live.model is not None:  # untrained parameters may differ
        return bool({*fitted.missing}.intersection(*live.model.groups))
    kept = fitted.unrestored_groups and not _is_elastic(checkpoint)
    return bool(fitted.missing or fitted.unexpected or fitted.fresh or kept or fitted.regrouped)


def _has_other_sub_groups(live: LiveEngine, fitted: Fitted, saved: Any) -> bool:
    """Return whether a ``sub_group_size`` of the saved run cuts the groups otherwise than the engine's."""
    limits = int(saved) if isinstance(saved, int | float) else SUB_GROUP_SIZE, live.sub_group_size
    elements = {p.name: p.numel for p in fitted.checkpoint.parameters}
    for group in fitted.checkpoint.groups:
        sizes = {name: elements[name] for name in group.parameters}
        cuts = [[len(s.sizes) for s in sub_groups(sizes, live.topology.data_parallel, limit)] for limit in limits]
        if cuts[0] != cuts[1]:
            return True
    return False


def _partitionable(
    live: LiveEngine, checkpoint: Checkpoint, fitted: Fitted, options: LoadOptions, reason: str
) -> Fitted:
    """Return the match for an engine of another layout, if all of the checkpoint can be partitioned again.

    Raises:
        PlanError: A part of it cannot.
    """
    from ckpttool.integrations.deepspeed.states import check_form  # imports torch

    if not options.without_optimizer:
        check_partitionable(checkpoint)
    if live.stage == 0 and not options.without_optimizer and live.model is not None:
        if live.engine.has_moe_layers:
            problem = f"{reason}, and the engine has experts but no ZeRO stage"
            raise PlanError(checkpoint.location, problem, "configure stage 1, 2 or 3, or pass weights_only=True")
        if live.optimizer is None:
            problem = f"{reason}, and the engine has no optimizer"
            raise PlanError(checkpoint.location, problem, "pass weights_only=True")
        fitted = fit(checkpoint, live.model, strict=options.strict, weights_only=False)
    if live.model is not None and live.model.others:
        if options.strict and not options.without_optimizer:
            problem = f"{reason}, and no other layout can restore {listed(live.model.others)} of the model"
            raise PlanError(checkpoint.location, problem, "pass strict=False, and they keep the model's values")
        fitted = replace(fitted, notes=(*fitted.notes, f"{listed(live.model.others)}: the model keeps its own values"))
    if not options.without_optimizer:
        check_form(live, checkpoint, ("state", "param_groups"))
    parameters = live.parameters()
    stray = [p.name for p in fitted.checkpoint.parameters if p.frozen and parameters[p.name].requires_grad]
    if stray and live.stage == 3 and not options.without_optimizer:  # DeepSpeed loads fragments of frozen ones alone
        why = f"holds {stray[0]}, which needs a gradient but is in no group of the optimizer: ZeRO-3 cannot load it"
        raise PlanError(checkpoint.location, why, "add it to the optimizer, freeze it, or choose stage 0 to 2")
    return fitted


def check_module(live: LiveEngine, location: str, *, strict: bool) -> None:
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
        elif name in own and is_expanded(value.shape, value.stride()):
            problem, hint = "is an expanded view, which torch cannot load into", "register a clone() of it"
        if problem:
            raise PlanError(location, f"{name} of the model {problem}", hint)


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
