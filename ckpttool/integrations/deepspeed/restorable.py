"""Check before the first save of an engine that a restore into an engine built alike would succeed.

The captured state is described as the checkpoint that it will be, and matched with the engine as in a restore. No file
is written.
"""

from __future__ import annotations

import logging
import math
import posixpath
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ckpttool.errors import CkptError, PlanError
from ckpttool.integrations.deepspeed import POSITION
from ckpttool.integrations.deepspeed.engine import data_sampler, has_optimizer, parameters_on_nvme, whole_layers
from ckpttool.integrations.deepspeed.match import check_module, match
from ckpttool.integrations.deepspeed.states import optimizer_identity
from ckpttool.integrations.live.options import LoadOptions
from ckpttool.messages import brief
from ckpttool.model import MASTER, MODULE, Buffer, Checkpoint, Parameter, ParamGroup, State
from ckpttool.model.places import Computed
from ckpttool.storage import LOCAL_SPEC

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.integrations.deepspeed.capture import EngineFiles, SavedModel
    from ckpttool.integrations.deepspeed.engine import LiveEngine
    from ckpttool.saving.coordination import Ranks
    from ckpttool.targets.zero.match import LiveModel

LOG = logging.getLogger(__name__)
HINT = "change that, or save with engine.save_checkpoint"


def check_restorable(
    parts: Sequence[tuple[LiveEngine, EngineFiles]], directory: str, ranks: Ranks, *, strict: bool
) -> None:
    """Check that captured files can be restored into their engines; call it on every rank.

    Args:
        parts: Each engine with its files on this rank. If a rank could not capture its own, there is nothing to check.
        directory: Directory of the checkpoint, for errors.
        ranks: The ranks of the run.
        strict: Whether all parameters of the model must be there.

    Raises:
        PlanError: They cannot be restored; the same on every rank.
    """
    ranks.exchange(directory, partial(_told, parts), partial(_check_all, parts, directory, strict))


def _told(parts: Sequence[tuple[LiveEngine, EngineFiles]]) -> list[dict[str, Any]]:
    """Return what differs between ranks, for each engine."""
    return [
        {
            "captured": captured.failed is None,
            "experts": [group.get("name") for group in live.hyperparameters if group.get("moe")],
            "problem": _elastic_problem(live),
        }
        for live, captured in parts
    ]


def _check_all(
    parts: Sequence[tuple[LiveEngine, EngineFiles]],
    directory: str,
    strict: bool,
    messages: Sequence[Sequence[dict[str, Any]]],
) -> None:
    """Check each engine on the first rank; the files of the model are alike on all ranks.

    Raises:
        PlanError: The files cannot be restored.
    """
    for number, (live, captured) in enumerate(parts):
        for lost in (_unsaved_optimizer(live), _compression(live), _sampler(live), _nvme(live)):
            if lost:
                LOG.warning("%s: %s", directory, lost)
        with whole_layers(live.engine):
            _check(live, directory, captured, strict, [message[number] for message in messages])


def _check(
    live: LiveEngine, directory: str, captured: EngineFiles, strict: bool, messages: Sequence[dict[str, Any]]
) -> None:
    """Check one engine.

    Raises:
        PlanError: The files cannot be restored.
    """
    if not all(message["captured"] for message in messages):
        return
    # Source: DeepSpeed 0.19.8, moe/utils.py (``split_params_into_different_moe_groups_for_optimizer``: a set of names).
    orders = "its groups of experts have another order than on other ranks: set PYTHONHASHSEED, the same on all ranks"
    alike = all(message["experts"] == messages[0]["experts"] for message in messages)
    try:
        for problem in filter(None, [*(message["problem"] for message in messages), "" if alike else orders]):
            raise PlanError(directory, problem, "")
        for problem in _lost(live, captured):
            raise PlanError(directory, problem, "")
        saved = captured.model
        if saved is None or live.engine.has_moe_layers:  # whose experts each rank names by local indexes
            check_module(live, directory, strict=strict)
        else:
            match(live, described(live, directory, saved), LoadOptions(strict=strict, dry_run=True))
    except CkptError as failed:
        problem = f"was not saved: it could not be restored: {failed.problem}"
        raise PlanError(directory, problem, HINT) from failed


def described(live: LiveEngine, directory: str, saved: SavedModel) -> Checkpoint:
    """Return the checkpoint that captured files will be, as far as a match needs it: states have no place in a file.

    Args:
        live: The engine.
        directory: Directory of the checkpoint.
        saved: The content of the file of the model.
    """
    model = live.model
    root, tag = posixpath.split(directory)
    return Checkpoint(
        storage=LOCAL_SPEC,
        location=directory,
        root=root,
        tag=tag,
        format="zero",
        stage=live.stage,
        topology=live.topology,
        dtype=live.dtype,
        deepspeed_version=None,
        step=int(live.engine.global_steps),
        skipped_steps=0,
        parameters=() if model is None else _parameters(live, model, saved),
        buffers=() if model is None else _buffers(model, saved),
        aliases={} if model is None else model.aliases,
        groups=tuple(
            ParamGroup(tuple(names), options, {})
            for names, options in zip(() if model is None else model.groups, live.hyperparameters, strict=False)
        ),
        optimizer=optimizer_identity(live),
        ds_config=saved.config,
        files=(),
    )


def _parameters(live: LiveEngine, model: LiveModel, saved: SavedModel) -> tuple[Parameter, ...]:
    """Describe the parameters whose values are saved."""
    there = saved.partitioned if live.stage == 3 else saved.partitioned | saved.module
    there |= {name for alias, name in model.aliases.items() if alias in there}
    groups = {name: number for number, names in enumerate(model.groups) for name in names}
    found = []
    for name, shape in model.shapes.items():
        if name in there or not all(shape):  # a tensor without elements may not be saved
            key = MASTER if live.stage and name in groups else MODULE
            state = State(shape, "F32", Computed(math.prod(shape)))
            found.append(Parameter(name, shape, groups.get(name), {key: state}))
    return tuple(found)


def _buffers(model: LiveModel, saved: SavedModel) -> tuple[Buffer, ...]:
    return tuple(
        Buffer(name, State(shape, "F32", Computed(math.prod(shape))))
        for name, shape in model.buffers.items()
        if name in saved.module
    )


def _lost(live: LiveEngine, captured: EngineFiles) -> list[str]:
    """Return the values that the files lack although they name the parameters."""
    found, saved = [], captured.model
    if live.topology.tensor_parallel > 1 and not captured.tells_slices:
        found.append("no file records how tensor parallelism slices parameters (no universal_checkpoint_info)")
    if saved is None:
        return found
    if saved.quantised:
        name = min(saved.quantised)
        found.append(f"frozen parameter {name} is quantised to 8 bit (ZeRO++), and its scale is not saved")
    if live.model is not None and live.stage == 3:
        trained = {name for names in live.model.groups for name in names}
        stray = [name for name, p in live.parameters().items() if p.requires_grad and name not in trained]
        lost = [name for name in stray if name not in saved.partitioned]
        why = "needs a gradient but is in no group of the optimizer: DeepSpeed saves no values"
        found += [f"{name} {why}" for name in lost]
    return found


def _unsaved_optimizer(live: LiveEngine) -> str:
    """Return which optimizer within the engine's has states that no checkpoint would contain; "" if there is none."""
    inner = live.optimizer.optimizer if live.wrapper and has_optimizer(live.optimizer) else live.optimizer
    if getattr(type(inner), "state_dict", None) is not torch.optim.Optimizer.state_dict:
        return ""  # there is none, or its state dict is its own
    hooks, kept = inner._optimizer_state_dict_post_hooks, {id(state) for state in inner.state.values()}
    for name, held in vars(inner).items() if not hooks else ():
        for one in held if isinstance(held, list | tuple) else [held]:
            if isinstance(one, torch.optim.Optimizer) and any(id(v) not in kept for v in one.state.values() if v):
                return (
                    f"the states of {name} ({type(one).__name__}) are not in the state_dict() of the engine's "
                    f"{type(inner).__name__}: a restore would not restore them"
                )
    return ""


def _compression(live: LiveEngine) -> str:
    """Return which states of an optimizer that compresses communication DeepSpeed does not save; "" for others.

    Source: DeepSpeed 0.19.6, runtime/fp16/onebit/adam.py, lamb.py and zoadam.py, which later releases lack.
    """
    inner = live.optimizer.optimizer if live.wrapper and has_optimizer(live.optimizer) else live.optimizer
    if not hasattr(inner, "comm_backend_handle"):
        return ""
    kind = type(inner).__name__
    lost = f"DeepSpeed saves the compression errors of {kind} on the first rank alone, and its load resets them"
    return f"{lost}, and weights that differ between synchronizations" if kind == "ZeroOneAdam" else lost


def _nvme(live: LiveEngine) -> str:
    """Return that DeepSpeed cannot load into an engine with parameters or optimizer on NVMe; "" for others."""
    if parameters_on_nvme(live):
        return "DeepSpeed cannot load into an engine with parameters on NVMe: a restore needs them on the CPU"
    if live.engine.zero_nvme_offload_optimizer():
        return "DeepSpeed cannot load into an optimizer on NVMe: a restore needs it on the CPU"
    return ""


def _sampler(live: LiveEngine) -> str:
    """Return why a resumed run would read other samples than curriculum learning's; "" if it reads the same.

    Source: DeepSpeed 0.19.8, runtime/data_pipeline/data_sampling/data_sampler.py (``state_dict`` has numpy's global
    generator, not ``np_rng``, which draws the samples).
    """
    sampler = data_sampler(live.engine)
    if sampler is None or hasattr(sampler, POSITION):
        return ""
    return (
        "the state of DeepSpeed's data sampler lacks the generator that draws the samples: a resumed run reads others; "
        "save ckpttool.data.CurriculumPosition in client_state"
    )


def _elastic_problem(live: LiveEngine) -> str:
    """Return why an elastic checkpoint cannot store the states: DeepSpeed keeps a partition's, without padding.

    Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py (``_get_base_optimizer_state``,
    ``_get_state_without_padding``).
    """
    if live.stage not in {1, 2} or not live.engine.zero_elastic_checkpoint():
        return ""
    states, owners = live.optimizer.optimizer.state, {id(owner) for owner in live.masters}
    for key in states:
        if id(key) not in owners:
            return f"elastic_checkpoint leaves out state {brief(key)} of the optimizer, which belongs to no parameter"
    for owner in live.masters:
        for name, value in states.get(owner, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() != owner.numel():
                return f"elastic_checkpoint cuts {name} of the optimizer, which has not the length of a partition"
    return ""
