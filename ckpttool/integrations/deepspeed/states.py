"""Compare the optimizer states of an engine with a checkpoint's."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ckpttool.errors import PlanError
from ckpttool.integrations.deepspeed.engine import has_optimizer, replaced_parameters
from ckpttool.integrations.torch.optimizers import trial
from ckpttool.model import MASTER, MODULE

STEP = "step"
"""Name of the step: some optimizers count it per parameter, others per group, others not at all."""
REBUILD = "build the same optimizer as in the saved run, or pass weights_only=True"
_OF_NO_CLASS = frozenset(
    {
        "params",
        "param_names",
        "name",
        "lr",
        "initial_lr",
        "max_lr",
        "min_lr",
        "max_momentum",
        "base_momentum",
        "step",
        "moe",
        "use_muon",
        "bias_correction",
        "decoupled_weight_decay",
        "foreach",
        "maximize",
        "capturable",
        "differentiable",
        "fused",
    }
)
"""Keys that schedulers, DeepSpeed, users and later releases of torch add to groups."""
_OF_DEEPSPEED = dict.fromkeys(("DeepSpeedCPUAdam", "FusedAdam", "FusedLamb"), ("exp_avg", "exp_avg_sq"))
"""States of optimizers that cannot run a trial step: they count steps outside of Python."""

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ckpttool.integrations.deepspeed.engine import LiveEngine
    from ckpttool.model import Checkpoint


def check_states(live: LiveEngine, checkpoint: Checkpoint) -> None:
    """Compare the names of the states of each parameter, per element or scalar.

    If a manifest records the optimizer that the engine has, there is nothing to compare: a trial step shows the states
    of a fresh optimizer, not all that training may add.

    Raises:
        PlanError: The optimizers keep different states: their classes or their settings differ.
    """
    if live.optimizer is None or not checkpoint.groups:
        return
    alike = checkpoint.optimizer and checkpoint.optimizer == optimizer_identity(live)
    if alike and (checkpoint.stage == 0) == (live.stage == 0):  # states of flat partitions may differ from others
        return
    saved = {key for p in checkpoint.parameters if not p.frozen for key in p.states} - {MASTER, MODULE}
    # Non-partitionable states count too, such as the blocks of 8-bit optimizers.
    known = saved | {text.rpartition(": ")[2] for text in checkpoint.nonpartitionable}
    untold = any(not g.parameters for g in checkpoint.groups)
    kept = _engine_states(live)
    stepped = bool(checkpoint.step) and checkpoint.step != checkpoint.skipped_steps
    if kept is None or (not saved and (untold or not stepped)):
        # The checkpoint has no states, or was saved before the first step without an overflow.
        _check_options(live, checkpoint)
        return
    needed, made, held = kept.tensors, kept.first, kept.all
    if any("use_muon" in options for options in live.hyperparameters):  # matrices have states of their own
        lacking, surplus = (needed, saved) if needed and saved and not held & known else (set(), set())
    else:
        lacking, surplus = needed - known, saved - held
        numbers = {key for p in checkpoint.parameters for key in checkpoint.numbers(p)}
        if numbers:  # without any this is unknown
            numbers -= {STEP}
            lacking, surplus = lacking | made - needed - known - numbers - {STEP}, surplus | numbers - held
            saved, needed = saved | numbers, needed | made - {STEP}
    # Without a trial step it is unknown which states training adds later.
    other = (lacking or surplus) if kept.tried else lacking and surplus
    if other or ((lacking or surplus) and not _same_options(live, checkpoint)):
        there, here = ", ".join(sorted(saved)) or "no states", ", ".join(sorted(needed)) or "no states"
        problem = f"holds {there}, but the engine's optimizer keeps {here}"
        raise PlanError(checkpoint.location, problem, REBUILD)


def check_form(live: LiveEngine, checkpoint: Checkpoint, saved: Collection[Any]) -> None:
    """Check that saved states have all keys that the ``state_dict`` of the engine's optimizer has.

    Args:
        live: The engine.
        checkpoint: The checkpoint, for errors.
        saved: The keys of the state dict that the optimizer will load.

    Raises:
        PlanError: A key is missing: the optimizer's own load would fail halfway.
    """
    if strays := replaced_parameters(live.optimizer):
        raise PlanError(checkpoint.location, f"cannot be loaded: {strays}", "choose ZeRO stage 1 to 3")
    if not has_optimizer(live.optimizer):
        return
    inner = live.optimizer.optimizer if live.wrapper else live.optimizer  # a user's may drive another one
    plain = type(inner).state_dict is torch.optim.Optimizer.state_dict
    lacking = [str(key) for key in (("state", "param_groups") if plain else _form(inner)) if key not in saved]
    if lacking:
        problem = f"holds no {', '.join(lacking)}, which the state dict of the engine's {type(inner).__name__} has"
        raise PlanError(checkpoint.location, problem, f"resume on the same ranks and stage, or {REBUILD}")


def _form(optimizer: Any) -> list[Any]:
    """Return the keys of the state dict of an optimizer."""
    try:
        return list(optimizer.state_dict())
    except KeyError:  # the states of ZeRO-3 are of other tensors than its groups have: torch looks for their numbers
        kept, optimizer.state = optimizer.state, defaultdict(dict)
        try:
            return list(optimizer.state_dict())
        finally:
            optimizer.state = kept


def _same_options(live: LiveEngine, checkpoint: Checkpoint) -> bool:
    """Return whether files that record no optimizer have its hyper-parameters: most other classes have others."""
    saved = [group.hyperparameters.keys() - _OF_NO_CLASS for group in checkpoint.groups]
    own = [options.keys() - _OF_NO_CLASS for options in live.hyperparameters]
    return not checkpoint.optimizer and any(saved) and {*map(frozenset, saved)} == {*map(frozenset, own)}


def _check_options(live: LiveEngine, checkpoint: Checkpoint) -> None:
    """Compare the hyperparameters of the groups: they differ by optimizer class, even without states.

    Raises:
        PlanError: Each has a hyperparameter that is missing in the other, apart from later additions of torch.
    """
    saved = {key for group in checkpoint.groups for key in group.hyperparameters}
    own = {key for options in live.hyperparameters for key in options}
    lacking, surplus = sorted(own - saved - _OF_NO_CLASS), sorted(saved - own - _OF_NO_CLASS)
    if lacking and surplus:
        problem = f"has an optimizer with {', '.join(surplus)}, but the engine's has {', '.join(lacking)}"
        raise PlanError(checkpoint.location, problem, REBUILD)


class _Kept(NamedTuple):
    """The names of the states that an optimizer keeps."""

    tensors: set[str]
    """Per-element states that the first step makes."""
    first: set[str]
    """All states that the first step makes."""
    all: set[str]
    """Also the states that later steps make."""
    tried: bool
    """True if trial steps have shown them, false if they are the states that the engine has now."""


def _engine_states(live: LiveEngine) -> _Kept | None:
    """Return the names of the states that an engine's optimizer keeps; None if unknown."""
    inner = getattr(live.optimizer, "optimizer", live.optimizer)
    owners = live.masters if live.stage else [p for group in inner.param_groups for p in group["params"]]
    if not owners:
        return None
    there = [(p, inner.state[p]) for p in owners if inner.state.get(p)]
    own = {key for _, state in there for key in state}
    known = [_OF_DEEPSPEED[c.__name__] for c in type(inner).__mro__ if c.__name__ in _OF_DEEPSPEED]
    if known and not there:
        return _Kept(set(known[0]), set(known[0]), set(known[0]), tried=True)
    tried = _trial_steps(inner, owners)
    if tried is not None:
        return tried._replace(all=tried.all | own)
    needed = {key for p, state in there for key, value in state.items() if _is_flat(value, p)}
    return _Kept(needed, own, own, tried=False) if there else None


def optimizer_identity(live: LiveEngine) -> str:
    """Return the class of an engine's optimizer, and the defaults that decide about its states; "" without one.

    Engines that are built alike have the same, however long they have trained.
    """
    if live.optimizer is None or not has_optimizer(live.optimizer):
        return ""
    inner = getattr(live.optimizer, "optimizer", live.optimizer)
    defaults = getattr(inner, "defaults", {})
    settings = [_setting(key, defaults[key]) for key in sorted(defaults.keys() - _OF_NO_CLASS - {"weight_decay"})]
    return f"{type(inner).__module__}.{type(inner).__qualname__}({', '.join(settings)})"


def _setting(key: str, value: object) -> str:
    """Return a default as text: a switch with its value, a number by whether it is 0."""
    if value is None or isinstance(value, bool | str):
        return f"{key}={value}"
    return f"{key}=0" if isinstance(value, int | float) and not value else key


def _is_flat(value: Any, parameter: Any) -> bool:
    # States of a scalar parameter look like step counters, which are scalars too.
    return bool(parameter.dim() and getattr(value, "shape", None) == parameter.shape)


def _trial_steps(optimizer: Any, owners: Sequence[Any]) -> _Kept | None:
    """Run trial steps of an optimizer of this class, on a small parameter for each number of dimensions.

    Returns:
        The names of their states; None if the optimizer cannot run.
    """
    parameters = [torch.nn.Parameter(torch.zeros((2,) * n)) for n in sorted({int(p.dim()) for p in owners})]
    if (tried := trial(optimizer, optimizer.param_groups[0], parameters)) is None:
        return None
    states = zip(parameters, tried.first, strict=True)
    needed = {key for p, state in states for key, value in state.items() if _is_flat(value, p)}
    first, last = ({key for state in states for key in state} for states in (tried.first, tried.last))
    return _Kept(needed, first, last, tried=True)
