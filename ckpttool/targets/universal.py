"""Checkpoint -> plan of a universal checkpoint that DeepSpeed loads at stages 1, 2 and 3 alike, on any number of ranks.

DeepSpeed's own converter writes one form for stages 1 and 2 and another for stage 3, and neither loads where the other
does. This is the union of what the loaders look at: whole tensors in dictionaries, a step for each parameter, the
parameter groups in both places where they are looked for, and model states under both names.

Source: DeepSpeed 0.19, checkpoint/universal_checkpoint.py (``load_hp_checkpoint_state``), runtime/base_optimizer.py
(``load_hp_checkpoint_state_from_checkpoint_dir``), runtime/zero/stage3.py
(``load_hp_checkpoint_state_from_checkpoint_dir_stage3``) and runtime/engine.py (``_load_checkpoint``).
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any

from ckpttool.casts import castable
from ckpttool.containers.values import Opaque, OrderedDict, Size, TensorRef, walk
from ckpttool.errors import PlanError
from ckpttool.formats.locate import LATEST_UNIVERSAL
from ckpttool.formats.universal import FOLDER, OPTIMIZER, STEP
from ckpttool.messages import brief
from ckpttool.model import AHEAD, MASTER, MODULE, UNKNOWN_GROUP, ScalarState, State, one_extent
from ckpttool.plan import CopyPlan
from ckpttool.plan.builder import CopyBuilder
from ckpttool.targets.torch_file import TorchFileBuilder, plain_file, view
from ckpttool.targets.zero.writer import carried, sliced_by_autotp

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from ckpttool.model import Checkpoint, Parameter
    from ckpttool.plan import Proofs, TargetFile

MODEL = "mp_rank_00_model_states.pt"
"""What engines of stages 1 and 2 look for."""
MODEL_STAGE3 = "zero_pp_rank_0_mp_rank_00_model_states.pt"
"""What every rank of an engine of stage 3 looks for."""
FIRST_RELEASE = "0.7.0"
"""The first DeepSpeed with universal checkpoints; the loader asks for 0.3.17 at least."""
STAGE3_RELEASE = "0.19.4"
"""The first DeepSpeed whose stage 3 takes tensors in dictionaries, as stages 1 and 2 always did."""
STAGE3_STATES = frozenset({"exp_avg", "exp_avg_sq"})
"""The optimizer's states that the loader of stage 3 reads, whatever the optimizer."""
MAX_NAME_BYTES = 255
"""A file system's limit for one name."""

_NATIVE_EXPERT = ".deepspeed_experts."
_AUTOEP_EXPERT = re.compile(r".*\.experts\.w[123]")  # Source: DeepSpeed 0.19, runtime/engine.py
_LOSS_SCALERS = frozenset({"LossScaler", "DynamicLossScaler"})


def plan_universal(checkpoint: Checkpoint, *, tag: str, proofs: Proofs | None = None) -> CopyPlan:
    """Plan ``latest_universal`` and the directory that it names.

    Parallelism of every kind is merged: tensors are whole. A target with tensor parallelism by DeepSpeed's AutoTP knows
    how to cut them; for a target like Megatron, which does not, the files tell it as far as the source does.

    Args:
        checkpoint: What to convert.
        tag: Name of the directory.
        proofs: What must hold first.

    Raises:
        PlanError: It holds no optimizer's states, does not say which group a parameter is in, or has a name that no
            directory can have.
    """
    _check_tag(tag)
    groups = _check_groups(checkpoint)
    builder = CopyBuilder(checkpoint)
    files = [
        *_parameter_files(checkpoint, builder, tag, groups),
        _optimizer_file(checkpoint, builder, f"{tag}/{OPTIMIZER}"),
        _model_file(checkpoint, builder, f"{tag}/{MODEL}", groups, whole=True),
        _model_file(checkpoint, builder, f"{tag}/{MODEL_STAGE3}", groups, whole=False),
        plain_file(LATEST_UNIVERSAL, tag.encode()),
    ]
    return CopyPlan(builder.sources, builder.casts, tuple(files), proofs)


# ------------------------------------------------------------------------------------------------- what can be written


def _check_tag(tag: str) -> None:
    if not tag.isprintable() or tag != tag.strip() or any(not _is_name(part) for part in tag.split("/")):
        raise PlanError(repr(tag), "cannot name a directory", "choose another tag", ("tag",))


def _is_name(name: str) -> bool:
    """Whether a directory can hold a file of that name."""
    if name in {"", ".", ".."} or "/" in name or "\0" in name:
        return False
    try:
        return len(name.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:
        return False


def _check_groups(checkpoint: Checkpoint) -> dict[str, int]:
    """The group of each trained parameter, once all of them are known and named as files can be."""
    trained = [p for p in checkpoint.parameters if not p.frozen or MASTER in p.states]
    if not checkpoint.groups or not trained:
        problem = "holds no parameter groups of an optimizer, without which DeepSpeed resumes nothing"
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


def _optimizer_states(parameter: Parameter) -> dict[str, State]:
    return {key: state for key, state in parameter.states.items() if key not in {MASTER, MODULE, STEP}}


# ------------------------------------------------------------------------------------------------- states


def _parameter_files(
    checkpoint: Checkpoint, builder: CopyBuilder, tag: str, groups: Mapping[str, int]
) -> Iterator[TargetFile]:
    experts, bare = _spreads_experts(checkpoint), _bare(checkpoint)
    for parameter in checkpoint.parameters:
        extra = _expert(parameter) if experts else {}
        folder = f"{tag}/{FOLDER}/{parameter.name}"
        if parameter.name in groups:
            extra |= _slicing(parameter)
            # Masters that the run kept in 16 bit stay so, as DeepSpeed's converter leaves them.
            dtype = parameter.states[MASTER].dtype if MASTER in parameter.states else "F32"
            told = None if bare and not _expert(parameter) else extra
            yield _state_file(builder, f"{folder}/{MASTER}.pt", checkpoint.weights(parameter), dtype, told)
            for key, state in _optimizer_states(parameter).items():
                yield _state_file(builder, f"{folder}/{key}.pt", state, state.dtype, told)
            step = checkpoint.groups[groups[parameter.name]].scalars.get(STEP)
        elif parameter.numel == 0 and _is_name(parameter.name):
            # DeepSpeed saves it as if it were frozen, but looks for its states if it is not.
            nothing = State(parameter.shape, "F32", one_extent(0, 0, 0))
            keys = {key: None for p in checkpoint.parameters for key in _optimizer_states(p)}
            for key in (MASTER, *keys):
                yield _state_file(builder, f"{folder}/{key}.pt", nothing, "F32", extra)
            steps = [group.scalars.get(STEP) for group in checkpoint.groups]
            step = steps[0] if all(s == steps[0] for s in steps) else None
        else:
            continue
        if step is not None:
            file = TorchFileBuilder(f"{folder}/{STEP}.pt", builder)
            yield file.build(_number(file, step))


def _state_file(
    builder: CopyBuilder, name: str, state: State, dtype: str, extra: Mapping[str, Any] | None
) -> TargetFile:
    """One state of one parameter, with what an engine must know; None for a tensor of one dimension and no more."""
    file = TorchFileBuilder(name, builder)
    if extra is None:
        return file.build(view(file.whole(state, dtype).storage, dtype, 0, (state.numel,)))
    return file.build({"param": file.whole(state, dtype), "cat_dim": 0, **extra})


def _spreads_experts(checkpoint: Checkpoint) -> bool:
    section = checkpoint.ds_config.get("expert_parallel")
    configured = isinstance(section, dict) and section.get("enabled") is True
    return configured or checkpoint.topology.expert_parallel > 1


def _bare(checkpoint: Checkpoint) -> bool:
    """Whether states of all but experts have no description, as DeepSpeed's own converter has it for AutoEP at stage 3.

    Other sources of stage 3 keep theirs, which every stage loads.

    Source: DeepSpeed 0.19.8, checkpoint/ds_to_universal.py (``merge_zero3_slices``,
    ``_save_zero3_autoep_universal_tensor``).
    """
    return checkpoint.stage == 3 and _spreads_experts(checkpoint) and any(_expert(p) for p in checkpoint.parameters)


def _slicing(parameter: Parameter) -> dict[str, Any]:
    """What tells an engine how to slice a parameter, unless its own layers know it, as those of AutoTP do.

    Source: DeepSpeed 0.19, checkpoint/ds_to_universal.py (``merge_tp_slices``) and checkpoint/universal_checkpoint.py
    (``load_hp_checkpoint_state``), which without a view fails to cut a scalar even over a single rank.
    """
    how = parameter.slicing
    told: dict[str, Any] = {"cat_dim": how.dim} if how.dim else {}
    if how.parts > 1:
        told["param_n_sub_params"] = how.parts
    view = how.view if parameter.shape else (1,)
    if view:
        shape = Opaque("deepspeed.checkpoint.universal_checkpoint", "SubparamShape", "new")
        shape.stated, shape.state = True, {"patterns": [], "shape": view, "partition_dim": how.dim}
        told["sub_param_shape"] = shape
    if how.vocabulary:
        told["vocab_tensor"] = True
    return told


def _expert(parameter: Parameter) -> dict[str, Any]:
    """What an engine that spreads a stack of experts over its ranks must know."""
    if not _AUTOEP_EXPERT.fullmatch(parameter.name) or len(parameter.shape) < 2:
        return {}
    return {"is_expert_param": True, "ep_num_experts": parameter.shape[0]}


def _number(file: TorchFileBuilder, scalar: ScalarState) -> Any:
    """A number in the form it was saved in: a tensor, as torch's optimizers want it, or plain."""
    if scalar.dtype is None:
        return scalar.value
    return file.scalar(scalar_bytes(scalar.value, scalar.dtype), scalar.dtype, scalar.shape)


def scalar_bytes(value: float | int | bool, dtype: str) -> bytes:
    """One element of a type."""
    import numpy as np

    from ckpttool.dtypes import numpy_dtype

    if dtype == "F32":
        return struct.pack("<f", value)
    return np.array([value], dtype=numpy_dtype(dtype)).tobytes()


# ------------------------------------------------------------------------------------------------- what is kept once


def _optimizer_file(checkpoint: Checkpoint, builder: CopyBuilder, name: str) -> TargetFile:
    """What the loaders read once: stages 1 and 2 the groups, stage 3 the first group and the first step."""
    file = TorchFileBuilder(name, builder)
    groups = [
        {**file.hyperparameters(without_tensors(dict(group.hyperparameters))), "params": [g]}
        for g, group in enumerate(checkpoint.groups)
    ]
    state = {
        g: {STEP: _number(file, group.scalars[STEP])}
        for g, group in enumerate(checkpoint.groups)
        if STEP in group.scalars
    }
    root: dict[str, Any] = {
        "ds_version": _release(checkpoint.deepspeed_version),
        "param_groups": groups,
        "optimizer_state_dict": {"state": state, "param_groups": groups},
    }
    scaler = checkpoint.loss_scaler
    if _carried(scaler):
        root["loss_scaler"] = scaler
        root["dynamic_loss_scale"] = scaler.name == "DynamicLossScaler"
    return file.build(root)


def _carried(scaler: object) -> bool:
    """Whether a loss scaler can take the place of the engine's own, as it will."""
    return isinstance(scaler, Opaque) and scaler.name in _LOSS_SCALERS and not _holds_tensors(scaler)


def _release(version: str | None) -> str:
    """The release that saved it, if one that could have written a universal checkpoint."""
    return version if version and _numbers(version) >= _numbers(FIRST_RELEASE) else FIRST_RELEASE


def _numbers(version: str) -> tuple[int, ...]:
    """What versions are compared by."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _model_file(
    checkpoint: Checkpoint, builder: CopyBuilder, name: str, groups: Mapping[str, int], *, whole: bool
) -> TargetFile:
    """The model states: counters, scheduler, client state; the weights too, or at stage 3 something in their place.

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
            else view(file.storage(checkpoint.dtype, 0, []), checkpoint.dtype, 0, (0,))  # as stage 3 has it
        )
        if parameter.name not in groups:
            frozen[parameter.name] = module[parameter.name]
    for buffer in checkpoint.buffers:
        module[buffer.name] = file.whole(buffer.state)
    for alias, stored in checkpoint.aliases.items():
        if stored in module:
            module[alias] = module[stored]
    ours = {p.name: Size(p.shape) for p in checkpoint.parameters if p.name in frozen}
    root: dict[str, Any] = {
        "module": module,
        "buffer_names": [b.name for b in checkpoint.buffers],
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": OrderedDict(ours) if whole else None,
        "shared_params": dict(checkpoint.aliases),
        "frozen_param_fragments": frozen if whole else None,
        "lr_scheduler": _kept(checkpoint, file, checkpoint.scheduler),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": checkpoint.skipped_steps,
        "global_steps": checkpoint.step or 0,
        "dp_world_size": checkpoint.topology.data_parallel,
        "mp_world_size": 1,
        "ds_config": without_tensors(dict(checkpoint.ds_config)),
        "ds_version": checkpoint.deepspeed_version or FIRST_RELEASE,
    }
    return file.build({**_kept(checkpoint, file, dict(checkpoint.client_state)), **root})


def _weights(checkpoint: Checkpoint, file: TorchFileBuilder, parameter: Parameter) -> TensorRef:
    """What the model computes with: the master, cast; frozen parameters, and copies that are newer, as they are."""
    copy = parameter.states.get(MODULE)
    if copy is not None and (checkpoint.ahead or MASTER not in parameter.states):
        return file.whole(copy)
    dtype = copy.dtype if copy is not None else checkpoint.dtype
    master = parameter.states[MASTER]
    return file.whole(master, dtype if castable(master.dtype, dtype) else master.dtype)


# ------------------------------------------------------------------------------------------------- tensors among data


def _holds_tensors(value: object) -> bool:
    return any(isinstance(v, TensorRef) for v in walk(value))


def _lost_tensors(checkpoint: Checkpoint, value: object) -> bool:
    """Whether there are tensors in it whose bytes the reader has not located."""
    return any(isinstance(v, TensorRef) and v.storage.key not in checkpoint.carried for v in walk(value))


def _kept(checkpoint: Checkpoint, file: TorchFileBuilder, value: Any) -> Any:
    """Data of the user or the scheduler, with the tensors in it as far as they can be found."""
    return carried(file, checkpoint, without_tensors(value, keep=checkpoint.carried))


def without_tensors(value: Any, within: frozenset[int] = frozenset(), keep: Collection[str] = ()) -> Any:
    """The same without tensors, which lie in files of the source that a new file cannot refer to.

    Args:
        value: Plain data.
        within: Identities of what it lies in.
        keep: Keys of storages that can be copied.
    """
    if not any(isinstance(v, TensorRef) and v.storage.key not in keep for v in walk(value)):
        return value

    def stays(item: object) -> bool:
        return not (isinstance(item, TensorRef) and item.storage.key not in keep) and id(item) not in within

    within |= {id(value)}
    if isinstance(value, dict):
        return {k: without_tensors(v, within, keep) for k, v in value.items() if stays(v)}
    if isinstance(value, list | tuple):
        kept = [without_tensors(v, within, keep) for v in value if stays(v)]
        return kept if isinstance(value, list) else tuple(kept)
    return None  # an object that is not whole without them


# ------------------------------------------------------------------------------------------------- what DeepSpeed loses


def universal_losses(checkpoint: Checkpoint) -> tuple[str, ...]:
    """What DeepSpeed itself will not restore from a universal checkpoint of this one, a sentence each.

    Source: DeepSpeed 0.19, runtime/engine.py (``_load_checkpoint``, which skips the module) and runtime/zero/stage3.py
    (``load_hp_checkpoint_state_from_checkpoint_dir_stage3``).
    """
    return tuple(_losses(checkpoint))


def _losses(checkpoint: Checkpoint) -> Iterator[str]:
    trained = [p for p in checkpoint.parameters if not p.frozen or MASTER in p.states]
    frozen = [p for p in checkpoint.parameters if p.frozen and MASTER not in p.states and p.numel]
    for what, count in (("buffers", len(checkpoint.buffers)), ("frozen parameters", len(frozen))):
        if count:
            yield f"DeepSpeed's universal load leaves {what} ({count}) at their initial values; --to zero restores them"
    if _bare(checkpoint):
        yield "states of all but experts are bare tensors, as DeepSpeed has them: it loads them at stage 3 alone"
    if checkpoint.ahead:
        yield f"{AHEAD}: masters are made of them, as ZenFlow itself does when it selects columns anew"
    groups = checkpoint.groups
    if any(dict(g.hyperparameters) != dict(groups[0].hyperparameters) for g in groups[1:]):
        yield (
            f"at stage 3 DeepSpeed's universal load gives all {len(groups)} parameter groups the hyper-parameters of "
            "the first; --to zero keeps each group's own"
        )
    steps = [g.scalars[STEP] for g in groups if STEP in g.scalars]
    if any(step.value != steps[0].value for step in steps):
        yield (
            "at stage 3 DeepSpeed's universal load gives all parameter groups the step of the first; --to zero keeps "
            "each group's own"
        )
    version = checkpoint.deepspeed_version
    if version and _numbers(version) < _numbers(STAGE3_RELEASE):
        yield (
            f"DeepSpeed {version}, which saved this, loads it at stages 1 and 2 alone: such a one loads at "
            f"stage 3 since {STAGE3_RELEASE}; --to zero works there"
        )
    keys = {key for p in trained for key in _optimizer_states(p)}
    missing = sorted(STAGE3_STATES - {key for key in keys if all(key in p.states for p in trained if p.numel)})
    if missing:
        yield (
            f"at stage 3 DeepSpeed's universal load fails, for it wants {' and '.join(missing)} of every parameter; "
            "--to zero works there"
        )
    elif extra := sorted(keys - STAGE3_STATES):
        yield f"at stage 3 DeepSpeed's universal load leaves out {', '.join(extra)}; --to zero restores them"
    if any(g.hyperparameters.get("use_muon") for g in groups):
        yield (
            "at stages 1 and 2 on several ranks Muon needs the momentum of whole matrices, of which DeepSpeed's "
            "universal load gives each rank its part: the next step fails; use --to zero"
        )
    for key in sorted({key for g in groups for key in g.scalars} - {STEP}):
        yield f"DeepSpeed's universal load has no place for {key}; --to zero keeps it"
    for what in checkpoint.unsliceable:
        yield f"{what}: belongs to no parameter, so that a universal checkpoint cannot hold it; --to zero may keep it"
    zero = checkpoint.ds_config.get("zero_optimization")
    if isinstance(zero, dict) and zero.get("round_robin_gradients"):
        yield (
            "an engine with round_robin_gradients on several ranks, as this run had, scrambles a universal checkpoint "
            "while loading; turn it off to load, or use --to zero"
        )
    if checkpoint.loss_scaler is not None and not _carried(checkpoint.loss_scaler):
        yield "the state of the loss scaler is not of the kind that ZeRO loads, and starts anew; see --to zero"
    yield from _slices_lost(checkpoint)
    if any(_NATIVE_EXPERT in p.name for p in trained):
        yield (
            "DeepSpeed's universal load takes each rank's experts for the first ones: load it with an expert-parallel "
            "size of 1, or use --to zero"
        )
    lost = [key for key, value in checkpoint.client_state.items() if _lost_tensors(checkpoint, value)]
    if lost:
        yield f"tensors in the client state are left out ({', '.join(map(str, lost))}); copy them from the source"


def _slices_lost(checkpoint: Checkpoint) -> Iterator[str]:
    """What tensor parallelism that is not AutoTP's cannot load.

    Source: DeepSpeed 0.19, runtime/zero/stage3.py (``load_hp_checkpoint_state``) and checkpoint/universal_checkpoint.py
    (``load_hp_checkpoint_state``: ``full_param_numel``).
    """
    if sliced_by_autotp(checkpoint):
        return
    padded = [p.name for p in checkpoint.parameters if p.slicing.vocabulary]
    if padded:
        yield (
            f"at stage 3 DeepSpeed's universal load does not pad the vocabulary ({_few(padded)}), and scrambles a "
            "model that does without a word: load it there with a model of as many rows, or at stages 1 and 2"
        )
    ranks = checkpoint.topology.tensor_parallel
    if ranks == 1:
        return
    yield (
        "at stage 3 DeepSpeed's universal load slices tensors for AutoTP alone: other tensor parallelism, as this run "
        "had, loads it at stages 1 and 2"
    )
    sizes = {p.name: p.slicing.view[p.slicing.dim] for p in checkpoint.parameters if p.slicing.view}
    uneven = [name for name, parts in sizes.items() if isinstance(parts, tuple) and any(n % ranks for n in parts)]
    if uneven:
        yield (
            f"over {ranks} tensor-parallel ranks DeepSpeed's universal load fails, for it takes only slices of one "
            f"size ({_few(uneven)}): load it without tensor parallelism"
        )


def _few(names: Sequence[str]) -> str:
    return ", ".join([*names[:3], "..."] if len(names) > 3 else names)
