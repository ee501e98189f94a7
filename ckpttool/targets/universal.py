"""Checkpoint -> plan of a universal checkpoint for DeepSpeed at stages 1 to 3, and the state that it does not load.

DeepSpeed's own converter writes one form for stages 1 and 2, another for stage 3, and neither loads the other's. This
is the union of both forms, for any number of ranks: whole tensors in dictionaries, a step for each parameter, the
parameter groups at both places of the loaders, and model states under both names.

Source: DeepSpeed 0.19, checkpoint/universal_checkpoint.py (``load_hp_checkpoint_state``), runtime/base_optimizer.py
(``load_hp_checkpoint_state_from_checkpoint_dir``), runtime/zero/stage3.py
(``load_hp_checkpoint_state_from_checkpoint_dir_stage3``) and runtime/engine.py (``_load_checkpoint``, which skips the
module).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ckpttool.containers.values import Opaque, OrderedDict, Size, TensorRef
from ckpttool.dtypes import castable
from ckpttool.errors import PlanError
from ckpttool.formats.universal import FOLDER, OPTIMIZER, STEP
from ckpttool.formats.zero.module import DATA_KEYS
from ckpttool.messages import brief
from ckpttool.model import MASTER, MODULE, NEWER_COPIES, UNKNOWN_GROUP, State
from ckpttool.model.places import Contiguous
from ckpttool.plan import CopyPlan
from ckpttool.plan.builder import CopyBuilder
from ckpttool.storage import LATEST_UNIVERSAL
from ckpttool.targets.torch import (
    TorchFileBuilder,
    copy_embedded,
    holds_tensors,
    lacks_tensors,
    plain_file,
    view,
    without_tensors,
)
from ckpttool.targets.zero.layout import sliced_by_autotp
from ckpttool.targets.zero.match import check_partitionable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.model import Checkpoint, Parameter
    from ckpttool.plan import ConsistencyChecks, TargetFile


STAGE3_RELEASE = "0.19.4"
"""The first DeepSpeed whose stage 3 accepts tensors in dictionaries, as stages 1 and 2 always did."""
STAGE3_STATES = frozenset({"exp_avg", "exp_avg_sq"})
"""The optimizer's states that the loader of stage 3 reads, whatever the optimizer."""

_NATIVE_EXPERT = ".deepspeed_experts."


def universal_losses(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return one sentence per loss when DeepSpeed loads a universal checkpoint made from this one."""
    trained = [p for p in checkpoint.parameters if p.trained]
    return tuple(sentence for rule in _RULES for sentence in rule(checkpoint, trained))


def _not_loaded(checkpoint: Checkpoint, _trained: Sequence[Parameter]) -> Iterator[str]:
    """Tensors that the optimizer does not train."""
    frozen = [p for p in checkpoint.parameters if not p.trained and p.numel]
    for what, count in (("buffers", len(checkpoint.buffers)), ("frozen parameters", len(frozen))):
        if count:
            yield (
                f"DeepSpeed's universal load leaves {what} ({count}) at their initial values; "
                "a zero checkpoint restores them"
            )


def _bare_states(checkpoint: Checkpoint, _trained: Sequence[Parameter]) -> Iterator[str]:
    if has_bare_states(checkpoint):
        yield "states other than experts' are bare tensors, as DeepSpeed writes them: they load only at stage 3"


def _newer_copies(checkpoint: Checkpoint, _trained: Sequence[Parameter]) -> Iterator[str]:
    if checkpoint.has_newer_copies:
        yield f"{NEWER_COPIES}: the masters are computed from the copies, as ZenFlow does when it selects new columns"


def _several_groups(checkpoint: Checkpoint, _trained: Sequence[Parameter]) -> Iterator[str]:
    """Parameter groups that differ."""
    groups = checkpoint.groups
    if any(dict(g.hyperparameters) != dict(groups[0].hyperparameters) for g in groups[1:]):
        yield (
            f"at stage 3 DeepSpeed's universal load gives all {len(groups)} parameter groups the hyper-parameters of "
            "the first; a zero checkpoint keeps each group's own"
        )
    steps = [g.scalars[STEP] for g in groups if STEP in g.scalars]
    if any(step.value != steps[0].value for step in steps):
        yield (
            "at stage 3 DeepSpeed's universal load gives all parameter groups the step of the first; a zero "
            "checkpoint keeps each group's own"
        )


def _old_release(checkpoint: Checkpoint, _trained: Sequence[Parameter]) -> Iterator[str]:
    version = checkpoint.deepspeed_version
    if version and release_numbers(version) < release_numbers(STAGE3_RELEASE):
        yield (
            f"DeepSpeed {version}, which saved this, loads a universal checkpoint only at stages 1 and 2; stage 3 "
            f"needs {STAGE3_RELEASE} or later, or a zero checkpoint"
        )


def _other_states(_checkpoint: Checkpoint, trained: Sequence[Parameter]) -> Iterator[str]:
    """Optimizers with other states than Adam's."""
    keys = {key for p in trained for key in optimizer_states(p)}
    missing = sorted(STAGE3_STATES - {key for key in keys if all(key in p.states for p in trained if p.numel)})
    if missing:
        yield (
            f"at stage 3 DeepSpeed's universal load fails without {' and '.join(missing)} of every parameter; "
            "a zero checkpoint works there"
        )
    elif extra := sorted(keys - STAGE3_STATES):
        yield f"at stage 3 DeepSpeed's universal load leaves out {', '.join(extra)}; a zero checkpoint restores them"


def _muon(checkpoint: Checkpoint, _trained: Sequence[Parameter]) -> Iterator[str]:
    if any(g.hyperparameters.get("use_muon") for g in checkpoint.groups):
        yield (
            "at stages 1 and 2 on several ranks Muon needs the momentum of whole matrices, but DeepSpeed's universal "
            "load gives each rank only a part: the next step fails; use a zero checkpoint"
        )


def _dropped_scalars(checkpoint: Checkpoint, _trained: Sequence[Parameter]) -> Iterator[str]:
    """Scalars of a group other than the step."""
    for key in sorted({key for g in checkpoint.groups for key in g.scalars} - {STEP}):
        yield f"DeepSpeed's universal load drops {key}; a zero checkpoint keeps it"


def _round_robin(checkpoint: Checkpoint, _trained: Sequence[Parameter]) -> Iterator[str]:
    zero = checkpoint.ds_config.get("zero_optimization")
    if isinstance(zero, dict) and zero.get("round_robin_gradients"):
        yield (
            "an engine with round_robin_gradients on several ranks, as this run had, loads a universal checkpoint in "
            "the wrong order; turn the option off to load, or use a zero checkpoint"
        )


def _scaler(checkpoint: Checkpoint, _trained: Sequence[Parameter]) -> Iterator[str]:
    if checkpoint.loss_scaler is not None and not takes_scaler(checkpoint.loss_scaler):
        yield "ZeRO cannot load the state of this loss scaler, which is reset; a zero checkpoint may keep it"


def _slices(checkpoint: Checkpoint, _trained: Sequence[Parameter]) -> Iterator[str]:
    """Tensor parallelism other than AutoTP's.

    Source: DeepSpeed 0.19, runtime/zero/stage3.py (``load_hp_checkpoint_state``) and checkpoint/universal_checkpoint.py
    (``load_hp_checkpoint_state``: ``full_param_numel``).
    """
    if sliced_by_autotp(checkpoint):
        return
    padded = [p.name for p in checkpoint.parameters if p.slicing.vocabulary]
    if padded:
        yield (
            f"at stage 3 DeepSpeed's universal load does not pad the vocabulary ({_few(padded)}), and loads "
            "wrong values into a padded model without an error: use a model with that number of rows, or stages 1 and 2"
        )
    ranks = checkpoint.topology.tensor_parallel
    if ranks == 1:
        return
    yield (
        "at stage 3 DeepSpeed's universal load slices tensors only for AutoTP; the tensor parallelism of this run "
        "loads at stages 1 and 2"
    )
    sizes = {p.name: p.slicing.view[p.slicing.dim] for p in checkpoint.parameters if p.slicing.view}
    uneven = [name for name, parts in sizes.items() if isinstance(parts, tuple) and any(n % ranks for n in parts)]
    if uneven:
        yield (
            f"over {ranks} tensor-parallel ranks DeepSpeed's universal load fails, because it takes only slices of one "
            f"size ({_few(uneven)}): load it without tensor parallelism"
        )


def _experts(_checkpoint: Checkpoint, trained: Sequence[Parameter]) -> Iterator[str]:
    if any(_NATIVE_EXPERT in p.name for p in trained):
        yield (
            "DeepSpeed's universal load gives every rank the first experts: load it with an expert-parallel size of 1, "
            "or use a zero checkpoint"
        )


def _client_tensors(checkpoint: Checkpoint, _trained: Sequence[Parameter]) -> Iterator[str]:
    keys = [key for key, value in checkpoint.client_state.items() if lacks_tensors(checkpoint, value)]
    if keys:
        yield f"tensors in the client state are left out ({', '.join(map(str, keys))}); copy them from the source"


def _few(names: Sequence[str]) -> str:
    return ", ".join([*names[:3], "..."] if len(names) > 3 else names)


_Rule = Callable[["Checkpoint", Sequence["Parameter"]], Iterator[str]]

_RULES: tuple[_Rule, ...] = (
    _not_loaded,
    _bare_states,
    _newer_copies,
    _several_groups,
    _old_release,
    _other_states,
    _muon,
    _dropped_scalars,
    _round_robin,
    _scaler,
    _slices,
    _experts,
    _client_tensors,
)
"""The rules; each yields its sentences if it applies."""


MODEL = "mp_rank_00_model_states.pt"
"""Model states that engines of stages 1 and 2 load."""
MODEL_STAGE3 = "zero_pp_rank_0_mp_rank_00_model_states.pt"
"""Model states that every rank of a stage 3 engine loads."""
FIRST_RELEASE = "0.7.0"
"""The first DeepSpeed with universal checkpoints; the loader asks for 0.3.17 at least."""
MAX_NAME_BYTES = 255
"""A file system's limit for one name."""

_AUTOEP_EXPERT = re.compile(r".*\.experts\.w[123]")  # Source: DeepSpeed 0.19, runtime/engine.py
_LOSS_SCALERS = frozenset({"LossScaler", "DynamicLossScaler"})


def plan_universal(checkpoint: Checkpoint, *, tag: str, consistency: ConsistencyChecks | None = None) -> CopyPlan:
    """Plan ``latest_universal`` and the directory that it names.

    Tensors are whole: all kinds of parallelism are merged. AutoTP slices them when it loads them. Targets without such
    rules (Megatron) slice them by the metadata in the files, as far as the source has it.

    Args:
        checkpoint: The source.
        tag: Name of the directory.
        consistency: Consistency checks to make before the first write.

    Raises:
        PlanError: The checkpoint contains no optimizer states, or states that no other layout stores; it lacks the
            group of a parameter, or has a name that is not a valid directory name.
    """
    _check_tag(tag)
    groups = _check_groups(checkpoint)
    check_partitionable(checkpoint, "write its weights with ckpttool consolidate")
    builder = CopyBuilder(checkpoint)
    files = [
        *_parameter_files(checkpoint, builder, tag, groups),
        _optimizer_file(checkpoint, builder, f"{tag}/{OPTIMIZER}"),
        _model_file(checkpoint, builder, f"{tag}/{MODEL}", groups, whole=True),
        _model_file(checkpoint, builder, f"{tag}/{MODEL_STAGE3}", groups, whole=False),
        plain_file(LATEST_UNIVERSAL, tag.encode()),
    ]
    return CopyPlan(builder.sources, builder.casts, tuple(files), consistency)


# ------------------------------------------------------------------------------------------------- checks


def _check_tag(tag: str) -> None:
    if not tag.isprintable() or tag != tag.strip() or any(not _is_name(part) for part in tag.split("/")):
        raise PlanError(repr(tag), "cannot name a directory", "choose another tag", ("tag",))


def _is_name(name: str) -> bool:
    """Whether ``name`` is a valid file name."""
    if name in {"", ".", ".."} or "/" in name or "\0" in name:
        return False
    try:
        return len(name.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:
        return False


def _check_groups(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the group of each trained parameter; check that all are known and have valid file names."""
    trained = [p for p in checkpoint.parameters if p.trained]
    if not checkpoint.groups or not trained:
        problem = "holds no parameter groups of an optimizer, without which DeepSpeed cannot resume"
        raise PlanError(checkpoint.location, problem, "write its weights with ckpttool consolidate")
    result: dict[str, int] = {}
    for parameter in trained:
        group = parameter.group
        if group is None or group == UNKNOWN_GROUP:
            if len(checkpoint.groups) > 1:
                problem = f"does not say in which parameter group {parameter.name} is"
                raise PlanError(checkpoint.location, problem, "convert the checkpoint that it was made from")
            group = 0
        result[parameter.name] = group
        value = checkpoint.weights(parameter)
        if not castable(value.dtype, "F32"):
            problem = f"{parameter.name} is {value.dtype}, which cannot be cast to fp32"
            raise PlanError(checkpoint.location, problem, "it cannot be part of a universal checkpoint")
        for name in (parameter.name, *(f"{key}.pt" for key in parameter.states)):
            if not _is_name(name):
                problem = f"{brief(name, 300)} cannot name a directory, as universal checkpoints need"
                raise PlanError(checkpoint.location, problem, "convert it to zero")
    return result


def optimizer_states(parameter: Parameter) -> dict[str, State]:
    """Return the optimizer states of a parameter that get files of their own."""
    return {key: state for key, state in parameter.optimizer_states.items() if key != STEP}


# ------------------------------------------------------------------------------------------------- states


def _parameter_files(
    checkpoint: Checkpoint, builder: CopyBuilder, tag: str, groups: Mapping[str, int]
) -> Iterator[TargetFile]:
    experts, bare = _spreads_experts(checkpoint), has_bare_states(checkpoint)
    for parameter in checkpoint.parameters:
        extra = _expert(parameter) if experts else {}
        folder = f"{tag}/{FOLDER}/{parameter.name}"
        if parameter.name in groups:
            extra |= _slicing(parameter)
            # Masters that the run kept in 16 bit are written in 16 bit, as by DeepSpeed's converter.
            dtype = parameter.states[MASTER].dtype if MASTER in parameter.states else "F32"
            metadata = None if bare and not _expert(parameter) else extra
            yield _state_file(builder, f"{folder}/{MASTER}.pt", checkpoint.weights(parameter), dtype, metadata)
            for key, state in optimizer_states(parameter).items():
                yield _state_file(builder, f"{folder}/{key}.pt", state, state.dtype, metadata)
            step = checkpoint.groups[groups[parameter.name]].scalars.get(STEP)
        elif parameter.numel == 0 and _is_name(parameter.name):
            # DeepSpeed saves it like a frozen parameter, but loads its states if it is trained.
            empty = State(parameter.shape, "F32", Contiguous(0, 0, 0))
            keys = {key: None for p in checkpoint.parameters for key in optimizer_states(p)}
            for key in (MASTER, *keys):
                yield _state_file(builder, f"{folder}/{key}.pt", empty, "F32", extra)
            steps = [group.scalars.get(STEP) for group in checkpoint.groups]
            step = steps[0] if all(s == steps[0] for s in steps) else None
        else:
            continue
        if step is not None:
            file = TorchFileBuilder(f"{folder}/{STEP}.pt", builder)
            yield file.build(file.scalar(step))


def _state_file(
    builder: CopyBuilder, name: str, state: State, dtype: str, extra: Mapping[str, Any] | None
) -> TargetFile:
    """Return the file of one state of one parameter, with its slicing metadata; without metadata, a bare 1-d tensor."""
    file = TorchFileBuilder(name, builder)
    if extra is None:
        return file.build(view(file.whole(state, dtype).storage, dtype, 0, (state.numel,)))
    return file.build({"param": file.whole(state, dtype), "cat_dim": 0, **extra})


def _spreads_experts(checkpoint: Checkpoint) -> bool:
    section = checkpoint.ds_config.get("expert_parallel")
    configured = isinstance(section, dict) and section.get("enabled") is True
    return configured or checkpoint.topology.expert_parallel > 1


def has_bare_states(checkpoint: Checkpoint) -> bool:
    """Whether only states of experts have metadata, as in the output of DeepSpeed's converter for AutoEP at stage 3.

    Other sources of stage 3 keep theirs, which every stage loads.

    Source: DeepSpeed 0.19.8, checkpoint/ds_to_universal.py (``merge_zero3_slices``,
    ``_save_zero3_autoep_universal_tensor``).
    """
    return checkpoint.stage == 3 and _spreads_experts(checkpoint) and any(_expert(p) for p in checkpoint.parameters)


def _slicing(parameter: Parameter) -> dict[str, Any]:
    """Return the slicing metadata of a parameter, for engines whose layers do not know it (AutoTP's layers do).

    Source: DeepSpeed 0.19, checkpoint/ds_to_universal.py (``merge_tp_slices``) and checkpoint/universal_checkpoint.py
    (``load_hp_checkpoint_state``), which without a view fails to cut a scalar even over a single rank.
    """
    slicing = parameter.slicing
    metadata: dict[str, Any] = {"cat_dim": slicing.dim} if slicing.dim else {}
    if slicing.parts > 1:
        metadata["param_n_sub_params"] = slicing.parts
    view = slicing.view if parameter.shape else (1,)
    if view:
        shape = Opaque("deepspeed.checkpoint.universal_checkpoint", "SubparamShape", "new")
        shape.stated, shape.state = True, {"patterns": [], "shape": view, "partition_dim": slicing.dim}
        metadata["sub_param_shape"] = shape
    if slicing.vocabulary:
        metadata["vocab_tensor"] = True
    return metadata


def _expert(parameter: Parameter) -> dict[str, Any]:
    """Return the metadata of a stack of experts, for an engine that distributes it over ranks."""
    if not _AUTOEP_EXPERT.fullmatch(parameter.name) or len(parameter.shape) < 2:
        return {}
    return {"is_expert_param": True, "ep_num_experts": parameter.shape[0]}


# ------------------------------------------------------------------------------------------------- shared files


def _optimizer_file(checkpoint: Checkpoint, builder: CopyBuilder, name: str) -> TargetFile:
    """Return the file of the optimizer: the groups for stages 1 and 2, the first group and the step for stage 3."""
    file = TorchFileBuilder(name, builder)
    groups = [
        {**file.hyperparameters(without_tensors(dict(group.hyperparameters))), "params": [g]}
        for g, group in enumerate(checkpoint.groups)
    ]
    state = {
        g: {STEP: file.scalar(group.scalars[STEP])}
        for g, group in enumerate(checkpoint.groups)
        if STEP in group.scalars
    }
    root: dict[str, Any] = {
        "ds_version": _release(checkpoint.deepspeed_version),
        "param_groups": groups,
        "optimizer_state_dict": {"state": state, "param_groups": groups},
    }
    scaler = checkpoint.loss_scaler
    if takes_scaler(scaler):
        root["loss_scaler"] = scaler
        root["dynamic_loss_scale"] = scaler.name == "DynamicLossScaler"
    return file.build(root)


def takes_scaler(scaler: object) -> bool:
    """Whether the loss scaler can replace the engine's own."""
    return isinstance(scaler, Opaque) and scaler.name in _LOSS_SCALERS and not holds_tensors(scaler)


def _release(version: str | None) -> str:
    """Return the release that saved it, if that release supports universal checkpoints."""
    return version if version and release_numbers(version) >= release_numbers(FIRST_RELEASE) else FIRST_RELEASE


def release_numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, for comparison."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _model_file(
    checkpoint: Checkpoint, builder: CopyBuilder, name: str, groups: Mapping[str, int], *, whole: bool
) -> TargetFile:
    """Return the model states: counters, scheduler, client state, and weights (for stage 3: placeholders).

    Source: DeepSpeed 0.19, runtime/engine.py (``_save_checkpoint``).
    """
    file = TorchFileBuilder(name, builder)
    module: OrderedDict = OrderedDict()
    frozen: OrderedDict = OrderedDict()
    shapes: list[OrderedDict] = [OrderedDict() for _ in checkpoint.groups]
    for g, group in enumerate(checkpoint.groups):
        sizes = {p.name: p.shape for p in checkpoint.parameters if groups.get(p.name) == g}
        ordered = [n for n in group.parameters if n in sizes]
        shapes[g].update((n, Size(sizes[n])) for n in dict.fromkeys([*ordered, *sizes]))
    for parameter in checkpoint.parameters:
        module[parameter.name] = (
            _weights(checkpoint, file, parameter)
            if whole
            else view(file.storage(checkpoint.dtype, 0, []), checkpoint.dtype, 0, (0,))  # as in the files of stage 3
        )
        if parameter.name not in groups:
            frozen[parameter.name] = module[parameter.name]
    for buffer in checkpoint.buffers:
        module[buffer.name] = file.whole(buffer.state)
    for alias, stored in checkpoint.aliases.items():
        if stored in module:
            module[alias] = module[stored]
    frozen_shapes = {p.name: Size(p.shape) for p in checkpoint.parameters if p.name in frozen}
    root: dict[str, Any] = {
        "module": module,
        "buffer_names": [b.name for b in checkpoint.buffers],
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": OrderedDict(frozen_shapes) if whole else None,
        "shared_params": dict(checkpoint.aliases),
        "frozen_param_fragments": frozen if whole else None,
        "lr_scheduler": _plain_data(checkpoint, file, checkpoint.scheduler),
        **{key: _plain_data(checkpoint, file, checkpoint.data_states.get(key)) for key in DATA_KEYS},
        "skipped_steps": checkpoint.skipped_steps,
        "global_steps": checkpoint.step or 0,
        **({} if checkpoint.samples is None else {"global_samples": checkpoint.samples}),
        "dp_world_size": checkpoint.topology.data_parallel,
        "mp_world_size": 1,
        "ds_config": without_tensors(dict(checkpoint.ds_config)),
        "ds_version": checkpoint.deepspeed_version or FIRST_RELEASE,
    }
    return file.build({**_plain_data(checkpoint, file, dict(checkpoint.client_state)), **root})


def _weights(checkpoint: Checkpoint, file: TorchFileBuilder, parameter: Parameter) -> TensorRef:
    """Return the compute weights: cast fp32 master weights; frozen parameters and newer copies unchanged."""
    weights = checkpoint.weights(parameter)
    if weights is parameter.states.get(MODULE):
        return file.whole(weights)
    dtype = parameter.states[MODULE].dtype if MODULE in parameter.states else checkpoint.dtype
    return file.whole(weights, dtype if castable(weights.dtype, dtype) else weights.dtype)


def _plain_data(checkpoint: Checkpoint, file: TorchFileBuilder, value: Any) -> Any:
    """Return data of the user or the scheduler; tensors whose bytes the reader has not located are removed."""
    return copy_embedded(file, checkpoint, without_tensors(value, keep=checkpoint.embedded))
