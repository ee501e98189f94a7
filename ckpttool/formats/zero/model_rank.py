"""Read the part of the model that one model-parallel rank holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpttool.errors import LayoutError
from ckpttool.formats.reports import RESTORE
from ckpttool.formats.torch_tensors import whole_tensor
from ckpttool.formats.zero import stage3, stage12
from ckpttool.formats.zero.experts import Experts, with_experts
from ckpttool.formats.zero.module import (
    TensorNames,
    read_aliases,
    read_buffer_names,
    read_module,
    read_param_shapes,
    without_groups,
    zenflow,
)
from ckpttool.formats.zero.partitions import Partitions
from ckpttool.model import MASTER, MODULE, NEWER_COPIES, UNKNOWN_GROUP, Parameter, ParamGroup, Replica, State

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from ckpttool.containers.values import TensorRef
    from ckpttool.formats.reports import Report
    from ckpttool.formats.zero.rank_files import ZeroFiles

PIPELINE_STAGE0 = (
    "the optimizer only numbers its parameters, and no file assigns the numbers to layers: masters and moments are "
    "left out, and weights are the model's own copies"
)
"""Remark on a pipeline without ZeRO."""


class ModelPart(NamedTuple):
    """The part of the model that one model-parallel rank holds."""

    files: ZeroFiles
    """Its files."""
    parameters: dict[str, Parameter]
    """By name, in the order of the module."""
    buffers: dict[str, State]
    """By name, in the order of the module."""
    aliases: dict[str, str]
    """Tied names."""
    groups: list[ParamGroup]
    """Parameter groups, of this part only."""
    nonpartitionable: list[str]
    """States that cannot be assigned to parameters."""
    replicas: list[Replica]
    """Pairs of states that must be equal."""
    dtype: str
    """Compute dtype of the module."""
    remarks: list[str]
    """Remarks for the user."""


def read_model_rank(
    files: ZeroFiles,
    layers: Mapping[str, State],
    pipeline: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    report: Report,
) -> ModelPart:
    """Read the layout of one model-parallel rank.

    Args:
        files: Its files.
        layers: In a pipeline, the tensors of its layers, which are in separate files.
        pipeline: In a pipeline, shapes of the tensors of all its stages.
        tied: Ties of the first tensor-parallel rank: only the first rank records them.
        report: Takes findings.
    """
    first = files.model[0]
    module = read_module(first)
    experts = Experts(files)
    copies = dict(layers)
    if files.stage != 3:
        copies |= {name: whole_tensor(first.torch, first.file_index, ref) for name, ref in module.items()}
    expert_copies = experts.modules()
    buffer_names = read_buffer_names(first, module)
    partitions = _partitions(files, module, pipeline, copies, expert_copies, buffer_names, report)
    copies |= expert_copies
    dtype = _module_dtype(module, copies, partitions, buffer_names)
    aliases, duplicates = _aliases(files, module, partitions, copies, buffer_names, tied)
    names = with_experts([*module, *layers], [n for n in [*expert_copies, *partitions.states] if experts.own(n)])
    names = list(dict.fromkeys(n for n in names if n not in aliases))
    frozen = _frozen_names(files, names, copies, partitions, {*buffer_names, *aliases}, dtype)
    parameters = _parameters(files, names, copies, partitions, frozen)
    others = [n for n in names if n in buffer_names or n not in parameters]
    excluded = files.stage >= 2 and not frozen and first.fields.values.get("frozen_param_shapes", ()) is None
    lost = _lost(files, module, others, buffer_names, excluded=excluded)
    others = [n for n in others if n not in set(lost)]
    _check_values_are_there(files, module, others, buffer_names)
    newer_copies = zenflow(first) and files.stage != 3
    return ModelPart(
        files,
        parameters,
        {n: copies[n] if n in copies else whole_tensor(first.torch, first.file_index, module[n]) for n in others},
        aliases,
        list(partitions.groups),
        list(partitions.nonpartitionable),
        [
            *_replicas(parameters, aliases, duplicates, partitions.guessed, newer_copies=newer_copies),
            *partitions.replicas,
        ],
        dtype,
        [
            *partitions.remarks,
            *_lost_remarks(lost, excluded=excluded),
            *_untied(files, others, buffer_names),
            *_zenflow_remarks(files),
        ],
    )


def _lost_remarks(lost: Sequence[str], *, excluded: bool) -> list[str]:
    """Return remarks on frozen parameters that were not saved."""
    names = f"{', '.join(lost[:5])}{', ...' if len(lost) > 5 else ''}"
    if not excluded:
        return [f"frozen parameters were not saved at stage 3 before DeepSpeed 0.9.1: {names}"] if lost else []
    left_out = "were left out when it was saved (exclude_frozen_parameters)"
    if lost:
        return [f"frozen parameters {left_out}: {names}"]
    return [f"frozen parameters, if there were any, {left_out}"]


def _zenflow_remarks(files: ZeroFiles) -> list[str]:
    if not zenflow(files.model[0]):
        return []
    if files.stage == 3:
        return ["at stage 3 only ZenFlow's masters are saved: they are the weights"]
    return [f"{NEWER_COPIES}: the copies are the weights"]


def _partitions(
    files: ZeroFiles,
    module: Mapping[str, TensorRef],
    pipeline: Mapping[str, tuple[int, ...]],
    copies: Mapping[str, State],
    experts: Mapping[str, State],
    buffer_names: set[str],
    report: Report,
) -> Partitions:
    """Read the optimizer's part with the reader of its stage."""
    if files.stage == 3:
        return stage3.read_partitions(files, report)
    if files.stage:
        return stage12.read_partitions(files, module, pipeline, report)
    if pipeline:
        return Partitions(nonpartitionable=("the optimizer",), unassigned=True, remarks=(PIPELINE_STAGE0,))
    from ckpttool.formats.zero import stage0  # imported only for the few checkpoints that need it

    return stage0.read_partitions(files, module, copies, experts, buffer_names, report)


def _aliases(
    files: ZeroFiles,
    module: Mapping[str, TensorRef],
    partitions: Partitions,
    copies: Mapping[str, State],
    buffer_names: set[str],
    tied: Mapping[str, str],
) -> tuple[dict[str, str], dict[str, State]]:
    """Return tied names, and second copies stored under them; see ``read_aliases``."""
    found = read_aliases(
        files.model[0],
        module,
        TensorNames(
            _stored_names(files, module, partitions, buffer_names), partitions.states, partitions.frozen, buffer_names
        ),
        placeholders=files.stage == 3,
    )
    aliases, duplicates = dict(found.names), dict(found.copies)
    for alias, name in tied.items():
        if alias in module and alias not in partitions.states and alias not in partitions.frozen:
            aliases.setdefault(alias, name)
    for alias, name in Experts(files).router_aliases(module, partitions.states).items():
        aliases[alias] = name
        if alias in copies:
            duplicates[alias] = copies[alias]
    return aliases, duplicates


def _stored_names(
    files: ZeroFiles, module: Mapping[str, TensorRef], partitions: Partitions, buffer_names: set[str]
) -> set[str]:
    """Return the names under which tensors are stored, so that other names can be tied to them."""
    shared = files.model[0].fields.optional("shared_params", dict)
    own = set(partitions.states) | set(partitions.frozen) | buffer_names
    # Other ranks write an empty mapping; at stage 3 that of an old release may lack ties that its placeholders show.
    if shared is not None and files.model_rank == 0:
        own |= {name for name in module if name not in shared}
    return own


def _frozen_names(
    files: ZeroFiles,
    names: Sequence[str],
    copies: Mapping[str, State],
    partitions: Partitions,
    others: set[str],
    dtype: str,
) -> set[str]:
    """Return the names of the frozen parameters.

    Stages 2 and 3 list them (since 0.9.1, unless the save left them out); stages 0 and 1 have them in the module
    unmarked. There, tensors of the model's dtype count as frozen parameters: other tensors of a state dict (scales of a
    quantised layer, ``_extra_state``) must keep their dtype.
    """
    listed = files.model[0].fields.optional("frozen_param_shapes", dict)
    if files.stage in {1, 2} and without_groups(files) and "buffer_names" not in files.model[0].fields:
        every = read_param_shapes(files)[0]
        return {n for n in names if n in every and n not in partitions.states and n not in others}
    if files.stage == 3 or listed is not None:
        return {n for n in [*partitions.frozen, *(listed or {})] if isinstance(n, str)} - others
    return {n for n in names if n not in partitions.states and n not in others and copies[n].dtype == dtype}


def _untied(files: ZeroFiles, names: Sequence[str], buffer_names: set[str]) -> list[str]:
    """Return remarks on further names of modules that are registered several times, in a mixture of experts.

    DeepSpeed clones every tensor that it saves with expert files, so that storages do not show ties.

    Source: DeepSpeed 0.19.8, runtime/engine.py (``_save_moe_checkpoint``, ``_get_shared_params``).
    """
    stray = [n for n in names if n not in buffer_names and not n.endswith("_extra_state")]
    if not files.experts or not stray or "buffer_names" not in files.model[0].fields:
        return []
    shown = f"{', '.join(stray[:3])}{', ...' if len(stray) > 3 else ''}"
    return [
        f"{len(stray)} tensors are neither listed parameters nor buffers, such as other names of a module that is "
        f"registered several times: checkpoints with experts do not record their ties, so they are kept unchanged, "
        f"without the experts of other ranks: {shown}"
    ]


def _lost(
    files: ZeroFiles,
    module: Mapping[str, TensorRef],
    names: Sequence[str],
    buffer_names: set[str],
    *,
    excluded: bool,
) -> list[str]:
    """Return the frozen parameters for which stage 3 saved only a placeholder (of one element, up to 0.5.10).

    Releases before 0.9.1 did so. With ``exclude_frozen_parameters`` DeepSpeed removes one name of each from the state
    dict; further names of a module that is registered several times under one parent stay.

    Source: DeepSpeed 0.19, runtime/engine.py (``module_state_dict``, by ``named_parameters``).
    """
    if files.stage != 3 or ("frozen_param_shapes" in files.model[0].fields and not excluded):
        return []
    empty = {(0,)} if excluded else {(0,), (1,)}
    return [n for n in names if n not in buffer_names and module[n].shape in empty]


def _check_values_are_there(
    files: ZeroFiles, module: Mapping[str, TensorRef], names: Sequence[str], buffer_names: set[str]
) -> None:
    """Check that the ranks hold values of every parameter: at stage 3 the module has only placeholders."""
    for name in names:
        if files.stage == 3 and name not in buffer_names and module[name].numel == 0:
            raise LayoutError(
                files.model[0].path,
                f"names parameter {name}, but no rank holds its values",
                f"the save left out its weights; {RESTORE}",
            )


def _parameters(
    files: ZeroFiles, names: Iterable[str], copies: Mapping[str, State], partitions: Partitions, frozen: set[str]
) -> dict[str, Parameter]:
    """Return every parameter once, in the order of the module."""
    first = files.model[0]
    group_of = {name: g for g, group in enumerate(partitions.groups) for name in group.parameters}
    # A parameter without a name in the module was excluded: its masters are still its weights.
    ordered = [n for n in names if n in partitions.states or n in frozen]
    placed = set(ordered)
    ordered += [n for n in partitions.states if n not in placed]
    result: dict[str, Parameter] = {}
    for name in ordered:
        states: dict[str, State] = dict(partitions.states.get(name, {}))
        if name in partitions.frozen:
            states[MODULE] = partitions.frozen[name]
        elif name in copies:
            states[MODULE] = copies[name]
        shape = next(iter(states.values())).shape
        for key, state in states.items():
            if state.shape != shape:
                raise LayoutError(
                    first.path, f"{name} has shape {shape}, but its {key} copy {state.shape}", "two saves are mixed"
                )
        group = group_of.get(name, UNKNOWN_GROUP if partitions.unassigned else None)
        result[name] = Parameter(name, shape, group, states)
    return result


def _replicas(
    parameters: Mapping[str, Parameter],
    aliases: Mapping[str, str],
    duplicates: Mapping[str, State],
    guessed: Container[str],
    *,
    newer_copies: bool,
) -> Iterator[Replica]:
    """Yield pairs of states that must be equal; a copy newer than its master equals only copies under other names."""
    for name, parameter in parameters.items():
        master, copy = parameter.states.get(MASTER), parameter.states.get(MODULE)
        if master is not None and copy is not None and not newer_copies:
            yield Replica(name, master, copy, guessed=name in guessed)
    for alias, copy in duplicates.items():
        if aliases[alias] in parameters:
            states = parameters[aliases[alias]].states
            own = states.get(MODULE) if newer_copies else None
            master = own or next(iter(states.values()))
            yield Replica(alias, master, copy, guessed=own is None and aliases[alias] in guessed)


def _module_dtype(
    module: Mapping[str, TensorRef], copies: Mapping[str, State], partitions: Partitions, buffer_names: set[str]
) -> str:
    """Return the dtype of the module's trained weights; at stage 3 that of their placeholders."""
    dtypes = {name: ref.dtype for name, ref in module.items()} | {name: s.dtype for name, s in copies.items()}
    for name in partitions.states:
        if name in dtypes:
            return dtypes[name]
    return next((dtype for name, dtype in dtypes.items() if name not in buffer_names), "F32")
