"""A directory of DeepSpeed's files -> Checkpoint: reads every model-parallel rank's part and merges them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.commit import has_manifest
from ckpttool.errors import LayoutError
from ckpttool.formats.reports import RESTORE, WEIGHTS_ALONE
from ckpttool.formats.zero.file_set import read_zero_files
from ckpttool.formats.zero.identity import agreed_facts, mixed_types, trusted_names
from ckpttool.formats.zero.model_rank import ModelPart, read_model_rank
from ckpttool.formats.zero.module import common_facts, zenflow
from ckpttool.formats.zero.partitions import check_agreement, check_same_group
from ckpttool.messages import brief
from ckpttool.model import (
    MASTER,
    MODULE,
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
    from collections.abc import Sequence

    from ckpttool.formats.locate import Location
    from ckpttool.formats.reports import Report
    from ckpttool.formats.zero.pipeline import Layers
    from ckpttool.formats.zero.rank_files import AllFiles, RankFile, ZeroFiles
    from ckpttool.storage import Storage


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
        ranks = [f._replace(recorded=recorded) for f in found.slices[stage * tensor : (stage + 1) * tensor]]
        slices = _read_slices(ranks, layers, stage, report)
        stages.append(slices[0] if tensor == 1 else _merge_tensor_parallel(slices, report))
    replicas = [twin for own in layers if own for twin in own.replicas]
    remarks = [remark for own in layers if own for remark in own.remarks]
    whole = stages[0] if pipeline == 1 else _merge_pipeline(stages, report)
    files = found.slices[0]
    first = files.model[0]
    step = first.fields.optional("global_steps", int) or 0
    facts = common_facts(first)
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
        files=_with_stages(found, layers),
        notes=(
            *found.notes,
            *_step_notes(files, whole.groups, step - facts["skipped_steps"]),
            *_group_notes(files, whole),
        ),
        remarks=(
            *([WEIGHTS_ALONE] if files.optimizer and _is_weights_alone(whole) else []),
            *dict.fromkeys((*whole.remarks, *remarks, *_data_remarks(first))),
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
    """Return all files; those of layers with the model-parallel rank of their pipeline stage."""
    if len(found.slices) == 1:
        return found.files
    ranks = {index: rank for own in layers if own for index, rank in own.model_ranks.items()}
    return tuple(replace(file, model_rank=ranks.get(i, file.model_rank)) for i, file in enumerate(found.files))


def _recorded(storage: Storage, location: Location) -> tuple[tuple[str, ...], ...]:
    """Return the parameters of each group from the checkpoint's manifest; empty without a manifest."""
    if not has_manifest(storage, location.directory):
        return ()
    from ckpttool.commit.manifest import read_manifest  # most checkpoints have no manifest

    return read_manifest(storage, location.directory).groups


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
        # although none of them holds a slice.
        # Source: DeepSpeed 0.19.5, runtime/sequence_parallel/parallel_state_sp.py (``get_model_parallel_world_size``).
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
        parameters[name] = Parameter(name, cut.shape, parameter.group, states, cut.slicing)
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
            problem = f"its {what} differ from those of the first tensor-parallel rank ({brief(odd[0], 200)})"
            error = LayoutError(s.files.model[0].path, problem, RESTORE)
            report(error)
            raise error


# ------------------------------------------------------------------------------------------------------------ notes


def _step_notes(files: ZeroFiles, groups: Sequence[ParamGroup], expected: int) -> list[LayoutError]:
    """Compare the optimizer's own count of steps with the engine's.

    DeepSpeed writes model states first: if a save is killed and its tag existed before (as with Lightning and
    Accelerate), it leaves new model states with old optimizer files.
    """
    if zenflow(files.model[0]):  # ZenFlow counts micro steps
        return []
    for i, group in enumerate(groups):
        step = group.scalars.get("step")
        # Up to about 0.9, and at stage 0, DeepSpeed also counts the first step without gradients, an initialisation.
        if files.optimizer and step is not None and step.value not in {expected, expected + 1}:
            problem = f"group {i} took {step.value} steps, but the model states are of step {expected}"
            hint = "two saves are mixed, unless training was resumed without the optimizer's states"
            return [LayoutError(files.optimizer[0].path, problem, hint)]
    return []


def _data_remarks(first: RankFile) -> list[str]:
    """Return remarks on states of DeepSpeed's data pipeline, which are not read.

    Source: DeepSpeed 0.8.0 to 0.19.8, runtime/engine.py (``data_sampler``, ``random_ltd``).
    """
    kinds = {"data_sampler": "curriculum learning's data sampler", "random_ltd": "random layerwise token dropping"}
    held = [what for key, what in kinds.items() if first.fields.values.get(key) is not None]
    return [f"the state of {what} is not read, and no conversion keeps it" for what in held]


def _is_weights_alone(whole: ModelPart) -> bool:
    """Return whether the files hold neither optimizer states nor hyper-parameters, as conversions of weights write."""
    if any(group.hyperparameters for group in whole.groups):
        return False
    return not any(parameter.optimizer_states for parameter in whole.parameters.values())


def _group_notes(files: ZeroFiles, whole: ModelPart) -> list[LayoutError]:
    """Return notes on parameter groups without hyper-parameters: DeepSpeed loads them and fails at the first step.

    Elastic checkpoints (a list in place of the optimizer's state dict) have no groups: the run keeps its own. So has a
    run that loads weights alone.

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
