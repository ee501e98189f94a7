"""Load optimizers without ZeRO: match the numbered parameters of the checkpoint by name, in the engine's order.

States from other files are planned as the partition of a single rank, which is then cut into parameters.

Source: DeepSpeed 0.19.8, runtime/fp16/fused_optimizer.py and unfused_optimizer.py (``state_dict``), and
torch.optim.Optimizer (``state_dict``): groups list numbers; only the order of the optimizer relates them to
parameters.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from ckpttool.commit.manifest import find_manifest
from ckpttool.errors import PlanError
from ckpttool.formats import LIVE_ORDER, in_order
from ckpttool.formats.state_dict import is_reduced
from ckpttool.integrations.deepspeed.engine import keeps_loss_scale
from ckpttool.integrations.deepspeed.states import REBUILD
from ckpttool.model import MASTER, MODULE
from ckpttool.model.names import ORDER
from ckpttool.storage import connect
from ckpttool.targets.zero.match import Fitted, fit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.integrations.deepspeed.engine import LiveEngine
    from ckpttool.model import Checkpoint
    from ckpttool.targets.zero.match import LiveModel

LOG = logging.getLogger(__name__)
Names = list[list[str]]
BY_POSITION = "the files do not record which parameter a state of the optimizer belongs to: the order is the engine's"
"""Note on states that are assigned as DeepSpeed does: a run that builds other groups would mix them up."""


def saved_names(checkpoint: Checkpoint) -> Names | None:
    """Return the parameter names of each optimizer group, in order, from the manifest of a checkpoint without ZeRO.

    Raises:
        CkptError: The manifest cannot be read.
    """
    manifest = find_manifest(connect(checkpoint.storage), checkpoint.location)
    if manifest is None or not manifest.groups:
        return None
    return [[checkpoint.aliases.get(n, n) for n in names] for names in manifest.groups]


def live_names(checkpoint: Checkpoint, model: LiveModel) -> Names:
    """Return the checkpoint's names of the parameters of each of the engine's groups."""
    source = _sources(checkpoint, model)
    return [[source[n] for n in names] for names in model.groups]


def needs_weights(live: LiveEngine, checkpoint: Checkpoint) -> bool:
    """Return whether only the optimizer's states, or its fp32 master weights, identify the names."""
    return saved_names(checkpoint) is None and (bool(live.wrapper) or not _is_recorded(checkpoint))


def prepare_whole(
    live: LiveEngine,
    checkpoint: Checkpoint,
    fitted: Fitted,
    model_states: dict[str, Any] | None,
    names: Names | None,
    *,
    strict: bool,
) -> tuple[Checkpoint, Fitted]:
    """Match an optimizer without ZeRO with the engine's, and sort its states into the engine's order.

    Args:
        live: The engine.
        checkpoint: A checkpoint of stage 0, in the engine's dtype.
        fitted: The match of its weights with the engine.
        model_states: The model states; their optimizer is replaced. None if they need not be read.
        names: The parameters of each saved group, if they are recorded.
        strict: As for ``fit``.

    Returns:
        The checkpoint, by the names that were identified, and the match.

    Raises:
        PlanError: Names cannot be identified, or do not fit.
    """
    model = live.model
    if model is None:
        raise PlanError(checkpoint.location, "is of a pipeline", "this is a bug in ckpttool")
    check_wrapper(live, checkpoint, model_states)
    if not checkpoint.groups:
        # The optimizer has its own form of ``state_dict``: it is returned unchanged.
        if names not in (None, live_names(checkpoint, model)):
            problem = "has optimizer states of an unknown form, and other parameter groups than the engine"
            raise PlanError(checkpoint.location, problem, REBUILD)
        fitted = replace(fitted, notes=(*fitted.notes, *([BY_POSITION] if names is None else [])))
    else:
        recorded = names is not None
        fitted, names = fit_whole(live, checkpoint, model, model_states, names, strict=strict)
        if BY_POSITION in fitted.notes and model_states is not None:
            check_places(live, checkpoint, model_states)
        if model_states is not None:
            model_states["optimizer"] = reordered(live, checkpoint, model, fitted, names, model_states)
        if not recorded:
            checkpoint = in_order(checkpoint, [name for members in names for name in members])
            if BY_POSITION not in fitted.notes:
                # The model and the engine agree, or the values of the masters show the order.
                kept = tuple(r for r in checkpoint.remarks if r not in {ORDER, LIVE_ORDER})
                checkpoint = replace(checkpoint, remarks=kept)
    if BY_POSITION in fitted.notes and model_states is not None:
        LOG.log(logging.DEBUG if live.rank else logging.WARNING, "%s: %s", checkpoint.location, BY_POSITION)
    return checkpoint, fitted


def check_wrapper(live: LiveEngine, checkpoint: Checkpoint, model_states: Mapping[str, Any] | None) -> None:
    """Check that the engine's wrapper also saved the fp32 master weights.

    Raises:
        PlanError: The checkpoint lacks them.
    """
    if model_states is None:
        return
    saved = model_states.get("optimizer")
    key = {"FP16_Optimizer": "fp32_groups_flat", "FP16_UnfusedOptimizer": "fp32_groups"}.get(live.wrapper, "")
    if not isinstance(saved, dict) or (key and key not in saved):
        what = key or "optimizer"
        problem = f"has no {what}: the engine's {live.wrapper or type(live.optimizer).__name__} loads it"
        raise PlanError(checkpoint.location, problem, REBUILD)


def fit_whole(
    live: LiveEngine,
    checkpoint: Checkpoint,
    model: LiveModel,
    model_states: Mapping[str, Any] | None,
    names: Names | None,
    *,
    strict: bool,
) -> tuple[Fitted, Names]:
    """Match an optimizer without ZeRO with the engine's, by name.

    Args:
        live: The engine.
        checkpoint: A checkpoint of stage 0, in the engine's dtype.
        model: The engine's names.
        model_states: The model states; None if they need not be read.
        names: The parameters of each saved group, if they are recorded.
        strict: As for ``fit``.

    Returns:
        The match, and the names of each saved group.

    Raises:
        PlanError: Names cannot be identified, or do not fit.
    """
    by_position = False
    if names is None:
        names = _names_from_files(live, checkpoint, model, model_states)
        recorded = [list(g.parameters) for g in checkpoint.groups]
        by_position = not live.wrapper and not (_is_recorded(checkpoint) and names == recorded)
    groups = {name: g for g, names_of_group in enumerate(names) for name in names_of_group}
    unknown = [
        n for n in groups if n not in {p.name for p in checkpoint.parameters} | {b.name for b in checkpoint.buffers}
    ]
    if unknown or len(groups) != sum(map(len, names)) or len(names) != len(checkpoint.groups):
        problem = "has a manifest whose parameter names differ from its files"
        raise PlanError(checkpoint.location, problem, "restore it from a copy, or use another tag")
    parameters = []
    for p in checkpoint.parameters:
        states = {k: v for k, v in p.states.items() if k != MODULE}
        if p.name in groups and (MASTER in p.states or MODULE in p.states):
            parameters.append(replace(p, group=groups[p.name], states={MASTER: p.master_state, **states}, numbers={}))
        else:
            parameters.append(replace(p, group=None, numbers={}))
    known = replace(
        checkpoint,
        parameters=tuple(parameters),
        groups=tuple(
            replace(g, parameters=tuple(names_of_group))
            for g, names_of_group in zip(checkpoint.groups, names, strict=True)
        ),
        nonpartitionable=(),
    )
    fitted = fit(known, model, strict=strict, weights_only=False)
    return replace(fitted, notes=(*fitted.notes, *([BY_POSITION] if by_position else []))), names


def _is_recorded(checkpoint: Checkpoint) -> bool:
    """Return whether shapes and order identify the parameter of each state."""
    named = all(g.parameters for g in checkpoint.groups)
    return named and not any(": optimizer" in u for u in checkpoint.nonpartitionable)


def _doubt(checkpoint: Checkpoint, recorded: Names, engine_names: Names) -> str:
    """Compare the parameters that shapes and the order of the model give with the order of the engine.

    Returns:
        "" if they are equal, or the engine's order does not fit; "order" if it fits the shapes of the states too;
        "shapes" if it has other parameters, which may have states of fewer dimensions than their own.
    """
    shapes = {p.name: p.shape for p in checkpoint.parameters} | {b.name: b.state.shape for b in checkpoint.buffers}
    ours, theirs = ([[shapes.get(n, ()) for n in names] for names in groups] for groups in (recorded, engine_names))
    if recorded == engine_names or list(map(len, ours)) != list(map(len, theirs)):
        return ""
    if ours == theirs:
        return "order"
    pairs = zip(chain.from_iterable(ours), chain.from_iterable(theirs), strict=True)
    others = {*chain.from_iterable(recorded)} != {*chain.from_iterable(engine_names)}
    return "shapes" if others and all(is_reduced(one, other) for one, other in pairs) else ""


def _names_from_files(
    live: LiveEngine, checkpoint: Checkpoint, model: LiveModel, model_states: Mapping[str, Any] | None
) -> Names:
    """Identify names from the files: shapes, order, and fp32 master weights that equal the model's weights.

    Without ZeRO and master weights several orders may fit. Then the states have the order of the engine, as for
    DeepSpeed itself, unless the learning rates of the groups show another one.
    """
    recorded = [list(g.parameters) for g in checkpoint.groups]
    is_recorded = _is_recorded(checkpoint)
    engine_names = live_names(checkpoint, model)
    doubt = _doubt(checkpoint, recorded, engine_names) if is_recorded else "order"
    if not doubt and not live.wrapper:
        return recorded
    if not live.wrapper:
        saved = [group.hyperparameters.get("lr") for group in checkpoint.groups]
        own = [options.get("lr") for options in live.hyperparameters]
        if doubt == "order" and (saved == own or sorted(map(repr, saved)) != sorted(map(repr, own))):
            return engine_names
        problem = "does not record the parameter of each optimizer state, and several orders fit"
        raise PlanError(checkpoint.location, problem, "pass weights_only=True; CheckpointManager records it")
    if model_states is None:
        raise PlanError(checkpoint.location, "was not read", "this is a bug in ckpttool")
    for names in [engine_names] + ([recorded] if is_recorded else []):
        if _masters_fit(live, model_states, names):
            return names
    problem = "does not record the parameter of each fp32 master, and no known order fits the model's weights"
    raise PlanError(checkpoint.location, problem, REBUILD)


def _masters_fit(live: LiveEngine, model_states: Mapping[str, Any], names: Sequence[Sequence[str]]) -> bool:
    """Return whether fp32 master weights, cast to the dtype of the weights, equal the model's weights of that name."""
    module, saved = model_states["module"], model_states["optimizer"]
    if any(name not in module for own in names for name in own):
        return False
    try:
        masters = _masters(live, saved, [[module[n].shape for n in own] for own in names])
    except ValueError:
        return False
    pairs = [(m, module[n]) for group, own in zip(masters, names, strict=True) for m, n in zip(group, own, strict=True)]
    return all(m.shape == w.shape and _same(m.to(w.dtype), w) for m, w in pairs)


def _same(a: Any, b: Any) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _masters(live: LiveEngine, saved: Mapping[str, Any], shapes: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return the fp32 master weights of each group, by parameter.

    Raises:
        ValueError: Sizes differ.
    """
    if live.wrapper != "FP16_Optimizer":
        masters = [list(group) for group in saved["fp32_groups"]]
        if [len(group) for group in masters] != [len(group) for group in shapes]:
            raise ValueError("other groups")
        return masters
    if len(saved["fp32_groups_flat"]) != len(shapes):
        raise ValueError("other groups")
    return [_cut(flat, own) for flat, own in zip(saved["fp32_groups_flat"], shapes, strict=True)]


def _cut(flat: Any, shapes: Sequence[Any]) -> list[Any]:
    """Split a flat tensor into parameters.

    Raises:
        ValueError: The sizes do not add up.
    """
    sizes = [shape.numel() for shape in shapes]
    if flat.numel() != sum(sizes):
        raise ValueError("another size")
    return [piece.view(shape) for piece, shape in zip(flat.detach().split(sizes), shapes, strict=True)]


def reordered(
    live: LiveEngine,
    checkpoint: Checkpoint,
    model: LiveModel,
    fitted: Fitted,
    names: Names,
    model_states: Mapping[str, Any],
) -> dict[str, Any]:
    """Reorder the saved optimizer state to the engine's groups; no copy if the order is the same.

    Raises:
        PlanError: Sizes differ from the named parameters'.
    """
    module, saved = model_states["module"], dict(model_states["optimizer"])
    base = saved["optimizer_state_dict"] if live.wrapper else saved
    source = _sources(checkpoint, model)
    engine_names = [[source[n] for n in group.parameters] for group in fitted.checkpoint.groups]
    options = _options(live, base, fitted, names, engine_names)
    if fitted.regrouped or fitted.fresh:
        try:
            states, masters = _by_name(live, saved, base, names, module)
        except (ValueError, KeyError, IndexError) as error:
            problem = f"has optimizer states that do not fit their recorded parameters: {error}"
            raise PlanError(checkpoint.location, problem, REBUILD) from error
        base, saved = _in_optimizer_format(live, saved, dict(base), engine_names, states, masters, module)
    numbers = [group["params"] for group in base["param_groups"]]
    base = {**base, "param_groups": [{**group, "params": n} for group, n in zip(options, numbers, strict=True)]}
    return {**saved, "optimizer_state_dict": base} if live.wrapper else {**saved, **base}


def _sources(checkpoint: Checkpoint, model: LiveModel) -> dict[str, str]:
    """Return the checkpoint's name of each engine parameter: tied parameters have several names."""
    names: dict[str, list[str]] = {name: [name] for name in model.shapes}
    for alias, name in model.aliases.items():
        names[name].append(alias)
    there = {p.name for p in checkpoint.parameters} | {b.name for b in checkpoint.buffers}
    stored = {n: [checkpoint.aliases.get(one, one) for one in own] for n, own in names.items()}
    return {n: next((one for one in own if one in there), n) for n, own in stored.items()}


def _options(
    live: LiveEngine, base: Mapping[str, Any], fitted: Fitted, names: Names, engine_names: Names
) -> list[dict[str, Any]]:
    """Return the hyperparameters of each engine group; those missing in an older save are the engine's."""
    groups = {name: g for g, engine_options in enumerate(names) for name in engine_options}
    options = []
    for number, (engine_options, members) in enumerate(zip(live.hyperparameters, engine_names, strict=True)):
        g = None if number in fitted.unrestored_groups else next((groups[n] for n in members if n in groups), None)
        options.append(dict(engine_options) if g is None else {**engine_options, **base["param_groups"][g]})
    return options


def _by_name(
    live: LiveEngine, saved: Mapping[str, Any], base: Mapping[str, Any], names: Names, module: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the optimizer states of each parameter, and its fp32 master weights if any."""
    states: dict[str, dict[str, Any]] = {}
    masters: dict[str, Any] = {}
    shapes = [[module[n].shape for n in group_names] for group_names in names]
    if live.wrapper:
        for group_names, group in zip(names, _masters(live, saved, shapes), strict=True):
            masters |= dict(zip(group_names, group, strict=True))
    numbers = {number for group in base["param_groups"] for number in group["params"]}
    if loose := [key for key in base["state"] if key not in numbers]:
        raise ValueError(f"state {loose[0]!r} belongs to no parameter")
    flat = live.wrapper == "FP16_Optimizer"
    for group_names, group, sizes in zip(names, base["param_groups"], shapes, strict=True):
        if flat:
            (number,) = group["params"]
            whole = base["state"].get(number, {})
            total = sum(shape.numel() for shape in sizes)
            cut = {k: _cut(v, sizes) for k, v in whole.items() if _numel(v) == total and not _is_step(k, v)}
            if wrong := [k for k, v in whole.items() if k not in cut and _numel(v) > 1]:
                raise ValueError(f"{wrong[0]} has another size")
            rest = {k: v for k, v in whole.items() if k not in cut}
            states |= {n: {**rest, **{k: c[i] for k, c in cut.items()}} for i, n in enumerate(group_names)}
        else:
            for name, number, shape in zip(group_names, group["params"], sizes, strict=True):
                states[name] = dict(base["state"].get(number, {}))
                if wrong := [k for k, v in states[name].items() if _numel(v) > 1 and v.shape != shape]:
                    raise ValueError(f"{wrong[0]} of {name} has another shape")
    return states, masters


def _numel(value: Any) -> int:
    return int(value.numel()) if isinstance(value, torch.Tensor) else 0


def _is_step(key: str, value: Any) -> bool:
    return key == "step" or value.dim() == 0


def _in_optimizer_format(
    live: LiveEngine,
    saved: dict[str, Any],
    base: dict[str, Any],
    engine_names: Names,
    states: Mapping[str, dict[str, Any]],
    masters: Mapping[str, Any],
    module: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the states in the optimizer's own format, for the engine's groups."""
    master_of = (
        {name: masters.get(name, module[name].float()) for group in engine_names for name in group}
        if live.wrapper
        else {}
    )
    if live.wrapper == "FP16_Optimizer":
        state: dict[int, dict[str, Any]] = {}
        for number, names in enumerate(engine_names):
            sources = [states[n] for n in names if states.get(n)]
            first = sources[0] if sources else {}
            state[number] = {
                key: value
                if _numel(value) <= 1 and module[names[0]].numel() > 1
                else torch.cat([states.get(n, {}).get(key, torch.zeros_like(master_of[n])).reshape(-1) for n in names])
                for key, value in first.items()
            }
        base["param_groups"] = [{"params": [number]} for number in range(len(engine_names))]
        saved["fp32_groups_flat"] = [
            torch.cat([master_of[n].detach().reshape(-1) for n in names]) for names in engine_names
        ]
    else:
        numbers = iter(range(sum(map(len, engine_names))))
        base["param_groups"] = [{"params": [next(numbers) for _ in names]} for names in engine_names]
        order = [n for names in engine_names for n in names]
        state = {number: states[n] for number, n in enumerate(order) if states.get(n)}
        if live.wrapper:
            saved["fp32_groups"] = [[master_of[n] for n in names] for names in engine_names]
    base["state"] = state
    return base, saved


def from_partition(live: LiveEngine, model: LiveModel, fitted: Fitted, states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the engine's optimizer in its own format, with the engine's fp32 master weights.

    Args:
        live: The engine.
        model: The engine's names.
        fitted: The match of the checkpoint with them.
        states: The partition of a single rank at stage 1.
    """
    planned = states["base_optimizer_state"]
    flat = live.wrapper == "FP16_Optimizer"
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for number, group in enumerate(fitted.checkpoint.groups):
        shapes = [torch.Size(model.shapes[n]) for n in group.parameters]
        total = sum(shape.numel() for shape in shapes)
        whole = planned["state"].get(number, {})
        scalars = {k: v for k, v in whole.items() if k in group.scalars}
        buffers = {k: v[:total] for k, v in whole.items() if k not in group.scalars}
        first = sum(len(before["params"]) for before in groups)
        numbers = [number] if flat else list(range(first, first + len(shapes)))
        if flat and whole:
            state[number] = {**scalars, **buffers}
        elif whole:
            cut = {k: _cut(v, shapes) for k, v in buffers.items()}
            for i, name in enumerate(group.parameters):
                if name not in fitted.fresh:
                    # Each parameter needs a step of its own: the optimizer adds to it in place.
                    state[numbers[i]] = copy.deepcopy(scalars) | {k: pieces[i].clone() for k, pieces in cut.items()}
        options = {**live.hyperparameters[number], **planned["param_groups"][number]}
        groups.append({**options, "params": numbers})
    base = {"state": state, "param_groups": groups}
    if not live.wrapper:
        return base
    saved = {**live.optimizer.state_dict(), "optimizer_state_dict": base}
    if keeps_loss_scale(live, fitted.checkpoint) and saved.get("dynamic_loss_scale") == states["dynamic_loss_scale"]:
        scaler = vars(states["loss_scaler"])
        saved |= {key: scaler[key] for key in saved.keys() & scaler.keys()}
    return saved


def check_places(live: LiveEngine, checkpoint: Checkpoint, model_states: Mapping[str, Any]) -> None:
    """Without names, check that each state has the size of the parameter of the same index.

    Raises:
        PlanError: A size differs.
    """
    saved = model_states.get("optimizer")
    if not isinstance(saved, dict):
        return
    base = saved.get("optimizer_state_dict", saved)
    groups = getattr(live.optimizer, "optimizer", live.optimizer).param_groups
    try:
        problem = _difference(live, saved, base, groups)
    except (KeyError, TypeError, AttributeError) as error:
        problem = f"an optimizer of another form ({type(error).__name__}: {error})"
    if problem:
        raise PlanError(checkpoint.location, f"does not fit the engine's optimizer: it has {problem}", REBUILD)


def _difference(live: LiveEngine, saved: Mapping[str, Any], base: Mapping[str, Any], groups: Sequence[Any]) -> str:
    there = [list(group["params"]) for group in base["param_groups"]]
    if [len(numbers) for numbers in there] != [len(group["params"]) for group in groups]:
        return "other numbers of parameters in its groups"
    sizes: dict[str, set[int]] = {}
    for state in base["state"].values():
        for name, value in state.items():
            sizes.setdefault(name, set()).add(_numel(value))
    for numbers, group in zip(there, groups, strict=True):
        for number, p in zip(numbers, group["params"], strict=True):
            state = base["state"].get(number, {})
            # A state of one size for all parameters does not determine their order.
            if not all(_may_belong(v, p) for name, v in state.items() if len(sizes[name]) > 1):
                return "states of other sizes"
    for key in ("fp32_groups_flat", "fp32_groups"):
        if key in saved and _sizes(saved[key]) != _sizes(getattr(live.optimizer, key, [])):
            return "masters of other sizes"
    return ""


def _may_belong(value: Any, parameter: Any) -> bool:
    """Return whether a state may be of a parameter: of its size, or of rows or columns as Adafactor's."""
    if _numel(value) <= 1 or _numel(value) == parameter.numel():
        return True
    return set(value.shape) <= {1, *parameter.shape}


def _sizes(values: Any) -> list[Any]:
    return [_sizes(value) if isinstance(value, list | tuple) else tuple(value.shape) for value in values]
