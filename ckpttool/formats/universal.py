"""A universal checkpoint -> Checkpoint: whole tensors, one file for each state of each parameter.

Source: DeepSpeed 0.7.0 to 0.19.8, checkpoint/ds_to_universal.py (``main``), checkpoint/universal_checkpoint.py
(``load_hp_checkpoint_state``) and runtime/zero/stage3.py (``load_hp_checkpoint_state_from_checkpoint_dir_stage3``).
"""

from __future__ import annotations

import math
import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.containers.values import TensorRef
from ckpttool.errors import LayoutError
from ckpttool.formats.fields import MAX_DIMENSIONS, RESTORE, Fields
from ckpttool.formats.tensors import whole_tensor
from ckpttool.formats.zero.experts import Experts, with_experts
from ckpttool.formats.zero.files import MAX_RANKS, RankFile, ZeroFiles
from ckpttool.formats.zero.module import (
    TensorNames,
    common_facts,
    read_aliases,
    read_buffer_names,
    read_module,
    read_param_shapes,
    zenflow,
)
from ckpttool.formats.zero.open_files import (
    Opener,
    agreed_facts,
    check_listed,
    check_model_ranks,
    copied_states,
    model_names,
    trusted_names,
)
from ckpttool.formats.zero.partitions import check_agreement, read_group
from ckpttool.formats.zero.stage3 import read_frozen
from ckpttool.model import (
    BY_ROWS,
    MASTER,
    MODULE,
    Buffer,
    Checkpoint,
    Parameter,
    ParamGroup,
    Replica,
    ScalarState,
    Slicing,
    State,
    Topology,
)
from ckpttool.storage import LATEST_UNIVERSAL

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckpttool.formats.fields import Report
    from ckpttool.formats.location import Location
    from ckpttool.storage import Storage

FOLDER = "zero"
"""Directory of the parameters' states."""
OPTIMIZER = f"{FOLDER}/optimizer_state.pt"
"""File of the states shared by all parameters."""
STEP = "step"
"""Name of the step, a scalar state."""


@dataclass(frozen=True, slots=True, eq=False)
class _Trained:
    """The trained parameters."""

    states: Mapping[str, Mapping[str, State]]
    """States of each parameter, by its name."""
    steps: Mapping[str, ScalarState]
    """Step of each parameter, by its name."""
    slicings: Mapping[str, Slicing]
    """Slicing metadata of each parameter, by its name."""


@dataclass(frozen=True, slots=True, eq=False)
class _Module:
    """The module side: parameters and buffers by the model states."""

    tensors: Mapping[str, TensorRef]
    """Its state dict."""
    buffers: set[str]
    """Names of buffers."""
    frozen: Mapping[str, State]
    """Frozen parameters whose values are partitioned (stage 3)."""
    copies: Mapping[str, State]
    """The model's own copies, if the file has them whole."""
    aliases: Mapping[str, str]
    """Tied names."""
    duplicates: Mapping[str, State]
    """Second copies of tied tensors, by alias."""
    names: Sequence[str]
    """All names except tied ones, in the order of the module."""


def read_universal(storage: Storage, location: Location, report: Report) -> Checkpoint:
    """Read the layout of a universal checkpoint: no tensor bytes except the optimizer's scalars.

    Raises:
        CkptError: The checkpoint is damaged, unless ``report`` collects the finding and reading can continue.
    """
    opener = Opener(storage, location, report)
    files = _model_files(opener)
    first = files[0].model[0]
    for fact in agreed_facts(files):
        check_agreement(fact.files, fact.name, fact.values, report)
    folders = _folders(opener)
    shapes = [read_param_shapes(f) if _lists_shapes(f) else [] for f in files]
    trained = _read_trained(opener, folders, shapes)
    if len(files) == 1 and not _lists_shapes(files[0]):
        check_listed(first, read_module(first), (n for n in trained.states if ".experts." not in n))
    module = _read_module_side(files, trained.states, folders, report)
    optimizer = opener.read(OPTIMIZER, "optimizer", numbers=True)
    if optimizer is None:
        raise opener.errors[0]
    group_of, groups = _groups(optimizer, files, shapes, trained, report)
    _check_states_are_there(opener, groups, folders)
    parameters, buffers = _located(opener, files, set(folders), trained, module, group_of)
    if opener.errors:
        raise opener.errors[0]
    newer_copies = zenflow(first)
    computed = (ref.dtype for n, ref in module.tensors.items() if n in trained.states)
    return Checkpoint(
        **common_facts(first),
        storage=storage.spec,
        location=location.directory,
        root=location.root,
        tag=location.tag,
        format="universal",
        latest=LATEST_UNIVERSAL,
        stage=None,
        topology=Topology(),
        dtype=next(computed, None) or _configured_dtype(first),
        step=first.fields.optional("global_steps", int),
        parameters=tuple(parameters),
        buffers=tuple(buffers),
        aliases={a: n for a, n in module.aliases.items() if n in trained.states or n in module.names},
        groups=tuple(groups),
        loss_scaler=optimizer.fields.values.get("loss_scaler"),
        replicas=tuple(_replicas(trained.states, module, newer_copies=newer_copies)),
        has_newer_copies=newer_copies,
        files=tuple(opener.files),
        remarks=(*_remarks(files, first), *trusted_names(opener.renamed)),
    )


def _read_trained(
    opener: Opener, folders: Mapping[str, Sequence[str]], shapes: Sequence[list[dict[str, tuple[int, ...]]]]
) -> _Trained:
    """Read the states of the trained parameters: those in the model states' list, else those with moments."""
    slices = {name: shape for groups in shapes for group in groups for name, shape in group.items()}
    names = list(slices) or [name for name, keys in folders.items() if set(keys) - {MASTER}]
    masters = [f"{FOLDER}/{name}/{MASTER}.pt" for name in names if MASTER not in folders.get(name, ())]
    opener.missing(masters, "a state")
    if opener.errors:
        raise opener.errors[0]
    opener.prefetch((f"{FOLDER}/{name}/{key}.pt", key == STEP) for name in names for key in folders[name])
    states: dict[str, dict[str, State]] = {}
    steps: dict[str, ScalarState] = {}
    slicings: dict[str, Slicing] = {}
    for name in names:
        opened = _open_states(opener, name, folders[name])
        step = opened.pop(STEP, None)
        if step is not None:
            steps[name] = _step_of(step)
        if MASTER in opened:
            slicings[name] = _slicing(opened[MASTER].torch.root)
        states[name] = _states_of(opener, name, opened, slices.get(name))
    moments = [
        (n, k, f)
        for n in names
        for k in folders[n]
        if k not in {MASTER, STEP} and (f := opener.files_by_name.get(f"{FOLDER}/{n}/{k}.pt"))
    ]
    if not opener.location.trust_names and (error := copied_states(opener.storage, moments)) is not None:
        opener.report(error)
    return _Trained(states, steps, slicings)


def _read_module_side(
    files: Sequence[ZeroFiles],
    states: Mapping[str, Mapping[str, State]],
    folders: Mapping[str, Sequence[str]],
    report: Report,
) -> _Module:
    """Read the module from the model states of the first model-parallel rank."""
    first = files[0].model[0]
    tensors = read_module(first)
    buffers = {n for f in files for n in read_buffer_names(f.model[0], read_module(f.model[0]))}
    own = {*states, *(n for n in tensors if n not in (first.fields.optional("shared_params", dict) or {}))}
    experts = Experts(files[0])
    placeholders, whole = files[0].stage == 3, len(files) == 1
    frozen = read_frozen(files[0].model, report) if placeholders and whole else {}
    ties = read_aliases(first, tensors, TensorNames(own, states, frozen, buffers), placeholders=placeholders)
    aliases = {**ties.names, **experts.router_aliases(tensors, states)}
    copies = {}
    if whole and not placeholders:
        copies = {n: whole_tensor(first.torch, first.file_index, ref) for n, ref in tensors.items()}
        copies = _without_padded(first, states, copies)
    names = with_experts(list(tensors), [n for n in states if experts.own(n)])
    ordered = [n for n in dict.fromkeys([*names, *states, *folders]) if n not in aliases]
    return _Module(tensors, buffers, frozen, copies, aliases, ties.copies, ordered)


def _located(
    opener: Opener,
    files: Sequence[ZeroFiles],
    folders: set[str],
    trained: _Trained,
    module: _Module,
    group_of: Mapping[str, int],
) -> tuple[list[Parameter], list[Buffer]]:
    """Return every parameter and buffer, with values from the states, the model states or a converted copy.

    Raises:
        LayoutError: No file contains the values of a parameter in the model states.
    """
    first = files[0].model[0]
    parameters: list[Parameter] = []
    buffers: list[Buffer] = []
    for name in module.names:
        if name in trained.states:
            states = dict(trained.states[name])
            if name in module.copies:
                states[MODULE] = module.copies[name]
            slicing = trained.slicings[name]
            parameters.append(Parameter(name, states[MASTER].shape, group_of.get(name), states, slicing))
        elif name in module.buffers and name in module.tensors:
            buffers.append(Buffer(name, whole_tensor(first.torch, first.file_index, module.tensors[name])))
        elif name in module.buffers:
            buffers.append(Buffer(name, _converted(opener, name)))
        elif (state := module.frozen.get(name) or module.copies.get(name)) is not None:
            parameters.append(Parameter(name, state.shape, None, {MODULE: state}))
        elif name in folders:
            state = _converted(opener, name)
            parameters.append(Parameter(name, state.shape, None, {MODULE: state}))
        elif module.frozen and len(files) == 1:
            raise LayoutError(first.path, f"names parameter {name}, but no file holds its values", "convert again")
    return parameters, buffers


def _replicas(states: Mapping[str, Mapping[str, State]], module: _Module, *, newer_copies: bool) -> Iterator[Replica]:
    """Yield pairs of states that must be equal: master and copy, and tied tensors stored twice."""
    for name in states:
        if name in module.copies and not newer_copies:
            yield Replica(name, states[name][MASTER], module.copies[name])
    for alias, copy in module.duplicates.items():
        stored = module.aliases[alias]
        if stored in states:
            newest = module.copies.get(stored) if newer_copies else None
            yield Replica(alias, newest or states[stored][MASTER], copy)


def _model_files(opener: Opener) -> list[ZeroFiles]:
    """Open the copied model states: one file for each model-parallel rank, and at stage 3 each data-parallel rank."""
    by_rank: dict[int, list[RankFile]] = {}
    partitioned = False
    names = [n for n in opener.names if n.kind == "model"]
    # With files for both stage 1 and stage 3, those without a data-parallel rank are whole.
    names = [n for n in names if n.data_rank is None] or names
    for name in sorted(names, key=lambda n: (n.model_rank, n.data_rank or 0)):
        file = opener.open(name)
        partitioned |= name.data_rank is not None
        if file is not None:
            by_rank.setdefault(name.model_rank, []).append(file)
    if opener.errors:
        raise opener.errors[0]
    if not by_rank:
        problem = "is a universal checkpoint without model states"
        raise LayoutError(
            opener.location.directory, problem, "copy the *_model_states.pt of the source into the directory of zero/"
        )
    stage = 3 if partitioned else 1
    result = [ZeroFiles(opener.location, stage, rank, files, []) for rank, files in sorted(by_rank.items())]
    check_model_ranks(opener, result)
    present = {n.name for n in opener.names}
    for files in result:
        count = files.model[0].fields.optional("dp_world_size", int) or 1
        expected = model_names(stage, min(count, MAX_RANKS), files.model_rank)
        opener.missing([n for n in expected if n not in present], f"saved by {count} data-parallel ranks")
    if opener.errors:
        raise opener.errors[0]
    return result


def _lists_shapes(files: ZeroFiles) -> bool:
    return files.model[0].fields.values.get("param_shapes") is not None


def _folders(opener: Opener) -> dict[str, list[str]]:
    """Return the names of each parameter's states, from the names of folders and files."""
    result: dict[str, list[str]] = {}
    root = posixpath.join(opener.location.directory, FOLDER)
    opener.storage.list_tree(root)
    for entry in opener.storage.listing(root):
        if entry.is_dir:
            names = [e.name for e in opener.storage.listing(posixpath.join(root, entry.name)) if not e.is_dir]
            states = [name.removesuffix(".pt") for name in names if name.endswith(".pt")]
            # The master is first, as in other formats.
            result[entry.name] = sorted(states, key=lambda s: (s != MASTER, s))
    return result


def _open_states(opener: Opener, name: str, keys: Sequence[str]) -> dict[str, RankFile]:
    """Open the files of a parameter's states; report unreadable files and leave them out."""
    files = {key: opener.read(f"{FOLDER}/{name}/{key}.pt", "state", numbers=key == STEP) for key in keys}
    return {key: file for key, file in files.items() if file is not None}


def _step_of(file: RankFile) -> ScalarState:
    number = file.scalar(file.torch.root)
    if number is None:
        raise LayoutError(file.path, "does not hold a number", RESTORE)
    return number


def _states_of(
    opener: Opener, name: str, files: Mapping[str, RankFile], shape: tuple[int, ...] | None
) -> dict[str, State]:
    """Return all states of one parameter.

    Raises:
        LayoutError: The states have different shapes, or a state has a reserved name.
    """
    if MODULE in files:
        raise LayoutError(files[MODULE].path, "is not an optimizer state", "remove it")
    result = {key: _tensor(file, name, shape) for key, file in files.items()}
    shapes = {state.shape for state in result.values()}
    if len(shapes) > 1:
        folder = f"{opener.location.directory}/{FOLDER}/{name}"
        raise LayoutError(
            folder, f"its states have shapes {sorted(shapes)}", "two conversions are mixed: convert again"
        )
    return result


def _without_padded(
    file: RankFile, states: Mapping[str, Mapping[str, State]], copies: Mapping[str, State]
) -> dict[str, State]:
    """Return the model's copies except those with vocabulary padding, which the states lack.

    Raises:
        LayoutError: The shape of a copy differs from the shape of the states.
    """
    result = dict(copies)
    for name in [n for n in copies if MASTER in states.get(n, {})]:
        ours, theirs = states[name][MASTER].shape, copies[name].shape
        if ours == theirs:
            continue
        if len(ours) != len(theirs) or ours[1:] != theirs[1:] or ours[0] > theirs[0]:
            raise LayoutError(file.path, f"gives {name} shape {theirs}, but its states have {ours}", "convert again")
        del result[name]
    return result


def _check_states_are_there(opener: Opener, groups: Sequence[ParamGroup], folders: Mapping[str, Sequence[str]]) -> None:
    """Report missing states: states that other parameters in the same group have."""
    for group in groups:
        keys = dict.fromkeys(key for name in group.parameters for key in folders[name])
        gone = [f"{FOLDER}/{n}/{key}.pt" for n in group.parameters for key in keys if key not in folders[n]]
        opener.missing(gone, "other parameters of its group have that state")
    if opener.errors:
        raise opener.errors[0]


def _tensor(file: RankFile, name: str, shape: tuple[int, ...] | None) -> State:
    """Locate the tensor of a file; stage 3 saves it flat, and the model states have its shape."""
    value = file.torch.root
    if isinstance(value, dict):
        value = value.get("param")
    if not isinstance(value, TensorRef):
        raise LayoutError(file.path, f"holds no tensor of {name}", RESTORE)
    state = whole_tensor(file.torch, file.file_index, value)
    if isinstance(file.torch.root, TensorRef) and shape is not None and state.shape != shape:
        if math.prod(shape) != state.numel:
            problem = f"has {state.numel} elements, but the model states give {name} shape {shape}"
            raise LayoutError(file.path, problem, RESTORE)
        state = State(shape, state.dtype, state.place)
    return state


def _slicing(root: object) -> Slicing:
    """Read the slicing metadata of a parameter; ignore invalid values, because reading does not need them."""
    metadata = root if isinstance(root, dict) else {}
    dim, parts = metadata.get("cat_dim"), metadata.get("param_n_sub_params")
    view: tuple[Any, ...] = ()
    described = getattr(metadata.get("sub_param_shape"), "state", None)
    if isinstance(described, dict) and isinstance(described.get("shape"), tuple):
        dim, view = described.get("partition_dim"), described["shape"]
    sizes = [n for item in view for n in (item if isinstance(item, tuple) else (item,))]
    if not all(type(n) is int for n in sizes) or not (type(dim) is int and 0 <= dim < max(len(view), MAX_DIMENSIONS)):
        return BY_ROWS
    return Slicing(
        dim=dim,
        parts=parts if type(parts) is int and parts > 1 else 1,
        view=view if view != (1,) else (),  # the view of a scalar has no information
        vocabulary=metadata.get("vocab_tensor") is True,
    )


def _converted(opener: Opener, name: str) -> State:
    """Return the converter's fp32 copy of a tensor that is not trained."""
    file = opener.read(f"{FOLDER}/{name}/{MASTER}.pt", "state")
    if file is None:
        raise opener.errors[0]
    return _tensor(file, name, None)


def _groups(
    file: RankFile,
    files: Sequence[ZeroFiles],
    shapes: Sequence[list[dict[str, tuple[int, ...]]]],
    trained: _Trained,
    report: Report,
) -> tuple[dict[str, int], list[ParamGroup]]:
    """Read the parameter groups that the converter kept."""
    inner = file.fields.values.get("optimizer_state_dict")
    inner = inner if isinstance(inner, dict) else {}
    listed = file.fields.values.get("param_groups", inner.get("param_groups"))
    members: list[list[str]] = [
        [n for groups in shapes for n in (groups[g] if g < len(groups) else ())]
        for g in range(max(map(len, shapes), default=0))
    ]
    result: list[ParamGroup] = []
    group_of: dict[str, int] = {}
    for g, values in enumerate(listed if isinstance(listed, list) else ()):
        if not isinstance(values, dict):
            raise file.fields.error("param_groups", f"lacks group {g}")
        numbers = values.get("params")
        numbers = numbers if files[0].stage == 3 and isinstance(numbers, list) else [g]
        if not all(isinstance(i, int) and 0 <= i < len(members) for i in numbers):
            continue  # the converter of stage 3 wrote it, but the files are of another stage: parameters are unknown
        names = tuple(dict.fromkeys(n for i in numbers for n in members[i]))
        steps = [trained.steps[n] for n in names if n in trained.steps] or _step(file, inner, numbers)
        if any(step != steps[0] for step in steps):
            raise LayoutError(file.path, f"the parameters of group {g} took different steps", "convert again")
        scalars = {STEP: steps[0]} if steps else {}
        fields = Fields(file.path, f"param_groups[{g}]", values)
        group_of |= dict.fromkeys(names, len(result))
        result.append(read_group([file], [fields], names, scalars, f"group {g}", report))
    if not result:
        result = [ParamGroup(tuple(trained.states), {}, {})]
        group_of = dict.fromkeys(trained.states, 0)
    return group_of, result


def _step(file: RankFile, inner: Mapping[Any, Any], numbers: Sequence[int]) -> list[ScalarState]:
    """Return the step at stage 3, from the optimizer's own state."""
    states = inner.get("state")
    steps = [states[i].get(STEP) for i in numbers if isinstance(states, dict) and isinstance(states.get(i), dict)]
    return [number for value in steps if (number := file.scalar(value)) is not None]


def _configured_dtype(first: RankFile) -> str:
    """Return the dtype of a pipeline's module from the configuration: the converter omits the files of its tensors."""
    config = first.fields.optional("ds_config", dict) or {}
    for key, dtype in (("bf16", "BF16"), ("bfloat16", "BF16"), ("fp16", "F16")):
        section = config.get(key)
        if isinstance(section, dict) and section.get("enabled"):
            return dtype
    return "F32"


def _remarks(files: Sequence[ZeroFiles], first: RankFile) -> tuple[str, ...]:
    info = first.fields.values.get("universal_checkpoint_info")
    version = info.get("universal_checkpoint_version") if isinstance(info, dict) else None
    remarks = [f"universal checkpoint of version {version}"] if version is not None else []
    if first.fields.values.get("module", ()) is None:
        remarks.append("frozen parameters and buffers of a pipeline are not part of a universal checkpoint")
    elif len(files) > 1:
        remarks.append("frozen parameters are in fp32: the converter casts tensors that are not trained")
    return tuple(remarks)
