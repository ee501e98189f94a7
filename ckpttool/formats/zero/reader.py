"""A directory of DeepSpeed's files -> Checkpoint: reads the part of each model-parallel rank and merges the parts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.commit import has_manifest
from ckpttool.errors import LayoutError
from ckpttool.formats.fields import RESTORE, WEIGHTS_ALONE
from ckpttool.formats.tensors import whole_tensor
from ckpttool.formats.zero import stage3, stage12
from ckpttool.formats.zero.experts import Experts, with_experts
from ckpttool.formats.zero.module import (
    TensorNames,
    common_facts,
    read_aliases,
    read_buffer_names,
    read_module,
    read_param_shapes,
    without_groups,
    zenflow,
)
from ckpttool.formats.zero.open_files import agreed_facts, mixed_types, read_zero_files, trusted_names
from ckpttool.formats.zero.partitions import Partitions, check_agreement, check_same_group
from ckpttool.messages import brief
from ckpttool.model import (
    MASTER,
    MODULE,
    NEWER_COPIES,
    UNKNOWN_GROUP,
    Buffer,
    Checkpoint,
    CheckpointFile,
    Parameter,
    ParamGroup,
    Replica,
    State,
    Topology,
)
from ckpttool.storage import LATEST

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from ckpttool.containers.values import TensorRef
    from ckpttool.formats.fields import Report
    from ckpttool.formats.location import Location
    from ckpttool.formats.zero.files import AllFiles, RankFile, ZeroFiles
    from ckpttool.formats.zero.pipeline import Layers
    from ckpttool.storage import Storage


PIPELINE_STAGE0 = (
    "the optimizer only numbers its parameters, and no file assigns the numbers to layers: masters and moments are "
    "left out, and weights are the model's own copies"
)
"""Remark on a pipeline without ZeRO."""


MODULE_ONLY = "the files of the optimizer are missing: the weights are the model's own copies"
"""Remark on a checkpoint of stage 1 or 2 that is read from the file of the model alone."""


class ModelPart(NamedTuple):
    """The part of the model on one model-parallel rank."""

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
    excludes_frozen: bool
    """Whether the frozen parameters were not saved."""


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
        excluded,
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
    if files.model[0].fields.values.get("param_shapes") is not None:
        return Partitions(remarks=(MODULE_ONLY,))
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
    # Other ranks write an empty mapping; at stage 3 the mapping of an old release may lack ties that its placeholders
    # show.
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
    dict; further names of a module that is registered several times under one parent are kept.

    Source: DeepSpeed 0.19, runtime/engine.py (``module_state_dict``, by ``named_parameters``).
    """
    if files.stage != 3 or ("frozen_param_shapes" in files.model[0].fields and not excluded):
        return []
    empty = {(0,)} if excluded else {(0,), (1,)}
    return [n for n in names if n not in buffer_names and module[n].shape in empty]


def _check_values_are_there(
    files: ZeroFiles, module: Mapping[str, TensorRef], names: Sequence[str], buffer_names: set[str]
) -> None:
    """Check that the ranks store values of every parameter: at stage 3 the module has only placeholders."""
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
        result[name] = Parameter(name, shape, group, states, numbers=partitions.numbers.get(name, {}))
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
    """Return the dtype of the module's trained weights; at stage 3 the dtype of their placeholders."""
    dtypes = {name: ref.dtype for name, ref in module.items()} | {name: s.dtype for name, s in copies.items()}
    for name in partitions.states:
        if name in dtypes:
            return dtypes[name]
    return next((dtype for name, dtype in dtypes.items() if name not in buffer_names), "F32")


def read_zero(storage: Storage, location: Location, report: Report) -> Checkpoint:
    """Read the layout of DeepSpeed's own checkpoint: no tensor bytes except the optimizer's scalars.

    Raises:
        CkptError: The checkpoint is damaged, unless ``report`` collects the finding and reading can continue.
    """
    found = read_zero_files(storage, location, report)
    _check_ranks_agree(found.slices, report)
    if (mixed := mixed_types([layer.file for layer in found.layers])) is not None:
        report(mixed)
    pipeline, tensor = _degrees(found)
    recorded = _recorded(storage, location) if not found.slices[0].stage else ()
    layers = [_layers(found, rank, tensor) for rank in range(tensor)]
    stages = []
    for stage in range(pipeline):
        ranks = [
            f._replace(recorded=recorded, order=location.order)
            for f in found.slices[stage * tensor : (stage + 1) * tensor]
        ]
        slices = _read_slices(ranks, layers, stage, report)
        stages.append(slices[0] if tensor == 1 else _merge_tensor_parallel(slices, report))
    replicas = [twin for own in layers if own for twin in own.replicas]
    remarks = [remark for own in layers if own for remark in own.remarks]
    whole = stages[0] if pipeline == 1 else _merge_pipeline(stages, report)
    files = found.slices[0]
    first = files.model[0]
    step = first.fields.optional("global_steps", int) or 0
    facts = common_facts(first)
    of_one_save = getattr(storage, "manifest", None) is not None  # the bytes read are compared with its checksums
    return Checkpoint(
        **facts,
        storage=storage.spec,
        location=location.directory,
        root=location.root,
        tag=location.tag,
        format="zero",
        latest=LATEST,
        stage=files.stage,
        topology=Topology(_data_parallel(files), tensor, pipeline, _expert_parallel(files)),
        dtype=whole.dtype,
        step=step,
        parameters=tuple(whole.parameters.values()),
        buffers=tuple(Buffer(name, state) for name, state in whole.buffers.items()),
        aliases=whole.aliases,
        groups=tuple(whole.groups),
        nonpartitionable=tuple(whole.nonpartitionable),
        loss_scaler=files.states(0).values.get("loss_scaler") if files.optimizer else _scaler(first),
        replicas=(*whole.replicas, *replicas),
        has_newer_copies=zenflow(first) and files.stage != 3,
        excludes_frozen=whole.excludes_frozen,
        files=_with_stages(found, layers),
        notes=(
            *found.notes,
            *(_step_notes(files, whole.groups, step, facts["skipped_steps"]) if not of_one_save else ()),
            *_group_notes(files, whole),
        ),
        remarks=(
            *([WEIGHTS_ALONE] if files.optimizer and _is_weights_alone(whole) else []),
            *_steps_of_the_loop(whole.groups, step),
            *dict.fromkeys((*whole.remarks, *remarks)),
            *_removed_systems(facts["ds_config"]),
            *trusted_names(found.renamed),
        ),
    )


def _read_slices(
    ranks: Sequence[ZeroFiles], layers: Sequence[Layers | None], stage: int, report: Report
) -> list[ModelPart]:
    """Read the tensor-parallel ranks of one pipeline stage."""
    slices: list[ModelPart] = []
    for files, own in zip(ranks, layers, strict=True):
        tied = slices[0].aliases if slices else {}
        in_stage, shapes = (own.of_stage[stage], own.shapes) if own else ({}, {})
        slices.append(read_model_rank(files, in_stage, shapes, tied, report))
    return slices


def _layers(found: AllFiles, rank: int, tensor: int) -> Layers | None:
    """Return the layer files of one tensor-parallel rank; None without a pipeline."""
    if not found.layers and found.slices[0].model[0].fields.values.get("module", ()) is not None:
        return None
    from ckpttool.formats.zero.pipeline import Layers  # imported only for the few checkpoints that need it

    return Layers(found.layers, found.slices[rank::tensor], rank)


def _with_stages(found: AllFiles, layers: Sequence[Layers | None]) -> tuple[CheckpointFile, ...]:
    """Return all files; files of layers have the model-parallel rank of their pipeline stage."""
    if len(found.slices) == 1:
        return found.files
    ranks = {index: rank for own in layers if own for index, rank in own.model_ranks.items()}
    return tuple(replace(file, model_rank=ranks.get(i, file.model_rank)) for i, file in enumerate(found.files))


def _recorded(storage: Storage, location: Location) -> tuple[tuple[str, ...], ...]:
    """Return the parameters of each group from the checkpoint's manifest; empty without a manifest."""
    if not has_manifest(storage, location.directory) and not has_manifest(storage, location.root):
        return ()
    from ckpttool.commit.manifest import find_manifest  # most checkpoints have no manifest

    manifest = find_manifest(storage, location.directory)
    return manifest.groups if manifest is not None else ()


def _check_ranks_agree(slices: Sequence[ZeroFiles], report: Report) -> None:
    """Report values that differ between the files of a save."""
    for fact in agreed_facts(slices):
        check_agreement(fact.files, fact.name, fact.values, report)


# ------------------------------------------------------------------------------------------------------- topology


def _degrees(found: AllFiles) -> tuple[int, int]:
    """Return the number of pipeline stages and of tensor-parallel ranks.

    Source: DeepSpeed 0.19, runtime/engine.py (``checkpoint_parallel_dimensions``, since 0.19.5) and
    runtime/pipe/topology.py: ranks of one stage have consecutive numbers.
    """
    ranks = len(found.slices)
    fields = found.slices[0].model[0].fields
    recorded = fields.optional("checkpoint_parallel_dimensions", dict) or {}
    in_layers = len({layer.tensor_rank for layer in found.layers})
    tensor = in_layers or recorded.get("tp_degree") or ranks
    if not isinstance(tensor, int):
        raise fields.error("checkpoint_parallel_dimensions", "has a tp_degree that is not a number")
    alone = ranks == 1 and fields.optional("mp_world_size", int) == 1
    if alone and tensor > 1 and _data_parallel(found.slices[0]) % tensor == 0:
        # Under sequence parallelism (Ulysses) the sequence's ranks are called model-parallel: tp_degree counts them,
        # although they do not have slices. Source: DeepSpeed 0.19.5, runtime/sequence_parallel/parallel_state_sp.py
        # (``get_model_parallel_world_size``).
        tensor = 1
    if tensor < 1 or ranks % tensor:
        raise LayoutError(
            fields.path,
            f"is one of {ranks} model-parallel ranks, not divisible by {brief(tensor, 40)} tensor-parallel ranks",
            RESTORE,
        )
    return ranks // tensor, tensor


def _data_parallel(files: ZeroFiles) -> int:
    return files.ranks or files.model[0].fields.optional("dp_world_size", int) or 1


def _expert_parallel(files: ZeroFiles) -> int:
    if files.expert_optimizer:
        return len(files.expert_optimizer)
    if not files.optimizer:
        return 1
    states = files.states(0).values
    counts = states.get("partition_count")
    groups = states.get("ds_zero_partition_groups")
    if isinstance(groups, list):
        counts = [g.get("partition_count") for g in groups if isinstance(g, dict)]
    counts = [c for c in counts if isinstance(c, int) and c > 0] if isinstance(counts, list) else []
    return files.ranks // min(counts, default=files.ranks)


def _scaler(file: RankFile) -> object:
    """Return the loss scale at stage 0, from the optimizer's own mapping."""
    optimizer = file.fields.values.get("optimizer")
    keys = ("dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
    found = {k: optimizer[k] for k in keys if k in optimizer} if isinstance(optimizer, dict) else {}
    return found or None


# --------------------------------------------------------------------------------------------------------- merging


def _merge_tensor_parallel(slices: Sequence[ModelPart], report: Report) -> ModelPart:
    """Merge the tensor-parallel ranks of one pipeline stage."""
    from ckpttool.formats.zero.tensor_parallel import TensorParallel, merge

    first = slices[0]
    rules = TensorParallel([s.files for s in slices])
    replicas = [twin for s in slices for twin in s.replicas]
    _check_same_names(slices, "parameters", [list(s.parameters) for s in slices], report)
    parameters: dict[str, Parameter] = {}
    for name, parameter in first.parameters.items():
        own = [s.parameters[name] for s in slices]
        cut = rules.cut(name, [p.shape for p in own])
        states = {}
        for key in parameter.states:
            held = [p.states.get(key) for p in own]
            # If copies differ, the weights are the mean of the masters, and no rank has a 16-bit copy of the mean.
            if any(h is None for h in held) or (cut.averaged and key == MODULE and MASTER in parameter.states):
                continue
            states[key], pairs = merge(cut, [h for h in held if h is not None])
            replicas += [Replica(name, a, b) for a, b in pairs]
        parameters[name] = Parameter(name, cut.shape, parameter.group, states, cut.slicing, parameter.numbers)
    replicas += [
        Replica(name, state, s.buffers[name])
        for name, state in first.buffers.items()
        for s in slices[1:]
        if name in s.buffers
    ]
    groups = _merge_groups(slices, report)
    nonpartitionable = list(dict.fromkeys(u for s in slices for u in s.nonpartitionable))
    aliases = {a: n for s in reversed(slices) for a, n in s.aliases.items()}
    return first._replace(
        parameters=parameters,
        replicas=replicas,
        groups=groups,
        nonpartitionable=nonpartitionable,
        aliases=aliases,
    )


def _merge_pipeline(stages: Sequence[ModelPart], report: Report) -> ModelPart:
    """Merge the stages of a pipeline; a module on several stages is tied: its values must be equal."""
    first = stages[0]
    replicas = [twin for s in stages for twin in s.replicas]
    parameters: dict[str, Parameter] = {}
    buffers: dict[str, State] = {}
    for stage in stages:
        for name, parameter in stage.parameters.items():
            known = parameters.setdefault(name, parameter)
            if known is parameter:
                continue
            for key, state in parameter.states.items():
                if key not in known.states:
                    known = parameters[name] = replace(known, states={**known.states, key: state})
                elif known.shape == state.shape:
                    replicas.append(Replica(name, known.states[key], state))
                else:
                    problem = f"{name} has shape {known.shape} on one pipeline stage and {state.shape} on another"
                    raise LayoutError(stage.files.model[0].path, problem, RESTORE)
        buffers.update(stage.buffers)
    groups = _merge_groups(stages, report)
    nonpartitionable = list(dict.fromkeys(u for s in stages for u in s.nonpartitionable))
    aliases = {a: n for s in stages for a, n in s.aliases.items()}
    remarks = list(dict.fromkeys(r for s in stages for r in s.remarks))
    return first._replace(
        parameters=parameters,
        buffers=buffers,
        replicas=replicas,
        groups=groups,
        nonpartitionable=nonpartitionable,
        aliases=aliases,
        remarks=remarks,
    )


def _merge_groups(parts: Sequence[ModelPart], report: Report) -> list[ParamGroup]:
    """Merge the parameter groups of the parts of the model."""
    first = parts[0]
    counts = [len(p.groups) for p in parts]
    if len(set(counts)) > 1:
        problem = f"the parts of the model have {counts} parameter groups"
        raise LayoutError(first.files.model[0].path, problem, RESTORE)
    result = []
    for g, group in enumerate(first.groups):
        check_same_group(first.files.model[0], f"group {g}", [p.groups[g] for p in parts], report)
        names = dict.fromkeys(n for p in parts for n in p.groups[g].parameters)
        result.append(replace(group, parameters=tuple(names)))
    return result


def _check_same_names(slices: Sequence[ModelPart], what: str, names: Sequence[list[str]], report: Report) -> None:
    for s, own in zip(slices, names, strict=True):
        if set(own) != set(names[0]):
            odd = sorted(set(own) ^ set(names[0]))
            problem = f"its {what} differ from the first tensor-parallel rank's ({brief(odd[0], 200)})"
            error = LayoutError(s.files.model[0].path, problem, RESTORE)
            report(error)
            raise error


# ------------------------------------------------------------------------------------------------------------ notes


def _step_notes(files: ZeroFiles, groups: Sequence[ParamGroup], step: int, skipped: int) -> list[LayoutError]:
    """Compare the optimizer's own count of steps with the engine's, unless the engine counts none.

    DeepSpeed writes model states first: if a save is killed and its tag existed before (as with Lightning and
    Accelerate), it leaves new model states with old optimizer files.
    """
    if zenflow(files.model[0]) or not step:  # ZenFlow counts micro steps
        return []
    expected = step - skipped
    for i, group in enumerate(groups):
        taken = group.scalars.get("step")
        # Up to about 0.9, and at stage 0, DeepSpeed also counts the first step without gradients, an initialisation.
        if files.optimizer and taken is not None and taken.value not in {expected, expected + 1}:
            problem = f"group {i} took {taken.value} steps, but the model states are of step {expected}"
            hint = (
                "two saves are mixed, unless training was resumed without the optimizer's states, or the loop called "
                "optimizer.step() and not engine.step()"
            )
            return [LayoutError(files.optimizer[0].path, problem, hint)]
    return []


def _steps_of_the_loop(groups: Sequence[ParamGroup], step: int) -> list[str]:
    """Return a remark on an engine that counted no steps, while its optimizer took some.

    Source: Ray 2.60, the script of "Get Started with DeepSpeed", which calls ``optimizer.step()``.
    """
    counts = [group.scalars["step"].value for group in groups if "step" in group.scalars]
    if step or not counts or max(counts) <= 1:
        return []
    taken = int(max(counts))
    return [f"the optimizer took {taken:,} steps, and the engine counted none: the loop does not call engine.step()"]


def _removed_systems(config: Mapping[str, object]) -> list[str]:
    """Return a remark on systems that recompute their state from the count of steps, and that DeepSpeed has removed.

    Source: DeepSpeed 0.19.6, runtime/engine.py (``_common_checkpoint_state``), and 0.19.8, runtime/config.py
    (``_REMOVED_TOP_LEVEL_CONFIG_KEYS``).
    """
    kinds = ("compression_training", "quantize_training", "eigenvalue", "sparse_attention", "progressive_layer_drop")
    blocks = {key: config.get(key) for key in (*kinds, "curriculum_learning")}
    used = [key for key, block in blocks.items() if isinstance(block, dict) and block.get("enabled", bool(block))]
    if not used:
        return []
    return [
        f"the run used {', '.join(used)}: beside its configuration, buffers and the count of steps DeepSpeed saves no "
        "state of that, and DeepSpeed 0.19.8 refuses the configuration"
    ]


def _is_weights_alone(whole: ModelPart) -> bool:
    """Return whether the files lack optimizer states and hyper-parameters, as conversions of weights do."""
    if any(group.hyperparameters for group in whole.groups):
        return False
    return not any(parameter.optimizer_states for parameter in whole.parameters.values())


def _group_notes(files: ZeroFiles, whole: ModelPart) -> list[LayoutError]:
    """Return notes on parameter groups without hyper-parameters: DeepSpeed loads them and fails at the first step.

    Elastic checkpoints (a list in place of the optimizer's state dict) have no groups: the run keeps its own. So does a
    run that loads only weights.

    Source: DeepSpeed 0.19, runtime/zero/stage_1_and_2.py (``load_state_dict``: ``ckpt_is_rigid``).
    """
    if not files.optimizer or isinstance(files.states(0).values.get("base_optimizer_state"), list):
        return []
    if _is_weights_alone(whole):
        return []
    for i, group in enumerate(whole.groups):
        if group.parameters and not group.hyperparameters:
            problem = f"group {i} has no hyper-parameters: a run that loads it cannot take a step"
            return [LayoutError(files.optimizer[0].path, problem, "convert its source again, or use ckpttool.load")]
    return []
