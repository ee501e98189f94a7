"""A directory of ZeRO files -> Checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.errors import LayoutError
from ckpttool.formats import zero3, zero12
from ckpttool.formats.zero_files import RESTORE, RankFile, ZeroFiles, read_zero_files
from ckpttool.formats.zero_module import (
    client_state,
    read_aliases,
    read_buffer_names,
    read_module,
    whole_tensor,
)
from ckpttool.formats.zero_partitions import check_agreement
from ckpttool.model import MODULE, Buffer, Checkpoint, Parameter, State, Topology

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.containers.values import TensorRef
    from ckpttool.formats.locate import Location
    from ckpttool.formats.zero_files import Report
    from ckpttool.formats.zero_partitions import Partitions
    from ckpttool.storage import LocalStorage


def read_zero(storage: LocalStorage, location: Location, report: Report) -> Checkpoint:
    """Read the layout of a ZeRO checkpoint of stage 1, 2 or 3; no tensor bytes but the optimizer's step.

    Raises:
        CkptError: What is wrong, unless ``report`` collects it and reading can go on.
    """
    files = read_zero_files(storage, location, report)
    first = files.model[0]
    _check_ranks_agree(files, report)
    partitions = zero3.read_partitions(files, report) if files.stage == 3 else zero12.read_partitions(files, report)
    module = read_module(first)
    dtype = _module_dtype(module, partitions)
    buffer_names = read_buffer_names(first)
    own = _stored_names(module, partitions, buffer_names, first)
    aliases, duplicates = read_aliases(first, module, own, partitions.states)
    frozen = _frozen_names(files, module, partitions, {*buffer_names, *aliases}, dtype)
    parameters = _parameters(files, module, partitions, frozen)
    accounted = {*partitions.states, *frozen, *aliases}
    others = [n for n in module if n in buffer_names or n not in accounted]
    _check_values_are_there(files, module, others, buffer_names)
    step = first.fields.optional("global_steps", int) or 0
    skipped = first.fields.optional("skipped_steps", int) or 0
    return Checkpoint(
        location=location.directory,
        root=location.root,
        tag=location.tag,
        stage=files.stage,
        topology=Topology(data_parallel=files.ranks),
        dtype=dtype,
        deepspeed_version=first.fields.optional("ds_version", str),
        step=step,
        skipped_steps=skipped,
        parameters=parameters,
        buffers=tuple(Buffer(name, whole_tensor(first, module[name])) for name in others),
        aliases=aliases,
        groups=tuple(partitions.groups),
        unsliceable=tuple(partitions.unsliceable),
        scheduler=first.fields.values.get("lr_scheduler"),
        loss_scaler=files.states(0).values.get("loss_scaler"),
        client_state=client_state(first),
        ds_config=first.fields.optional("ds_config", dict) or {},
        duplicates=duplicates,
        files=files.files,
        notes=(*files.notes, *_step_notes(files, partitions, step - skipped)),
        remarks=_remarks(files, frozen),
    )


def _check_ranks_agree(files: ZeroFiles, report: Report) -> None:
    for key in ("global_steps", "ds_version"):
        check_agreement(files.model, key, [f.fields.values.get(key) for f in files.model], report)
    check_agreement(files.optimizer, "ds_version", [f.fields.values.get("ds_version") for f in files.optimizer], report)


def _stored_names(
    module: Mapping[str, TensorRef], partitions: Partitions, buffer_names: set[str], file: RankFile
) -> set[str]:
    """Names that stand for tensors of their own, so that another name can be tied to them."""
    shared = file.fields.optional("shared_params", dict) or {}
    own = set(partitions.states) | set(partitions.frozen) | buffer_names
    if "shared_params" in file.fields:
        own |= {name for name in module if name not in shared}
    return own


def _frozen_names(
    files: ZeroFiles, module: Mapping[str, TensorRef], partitions: Partitions, others: set[str], dtype: str
) -> set[str]:
    """Names of the frozen parameters.

    Stages 2 and 3 list them (since 0.9.1, unless they were left out); stage 1 keeps them in the module without a word.
    There, what is of the model's own type is taken for one: a state dict may hold other tensors (scales of a quantised
    layer, ``_extra_state``), which must keep their type.
    """
    listed = files.model[0].fields.optional("frozen_param_shapes", dict)
    if files.stage == 3 or listed is not None:
        return {n for n in [*partitions.frozen, *(listed or {})] if isinstance(n, str)} - others
    return {n for n, ref in module.items() if n not in partitions.states and n not in others and ref.dtype == dtype}


def _check_values_are_there(
    files: ZeroFiles, module: Mapping[str, TensorRef], names: Sequence[str], buffer_names: set[str]
) -> None:
    """At stage 3 the module holds an empty placeholder for every parameter; each must be found on the ranks."""
    for name in names:
        if files.stage == 3 and name not in buffer_names and module[name].numel == 0:
            raise LayoutError(
                files.model[0].path,
                f"names parameter {name}, but no rank holds its values",
                f"its weights were left out when it was saved; {RESTORE}",
            )


def _parameters(
    files: ZeroFiles, module: Mapping[str, TensorRef], partitions: Partitions, frozen: set[str]
) -> tuple[Parameter, ...]:
    """Every parameter once, in the order of the module."""
    first = files.model[0]
    group_of = {name: g for g, group in enumerate(partitions.groups) for name in group.parameters}
    # A parameter that the module does not name was excluded there: its masters are still its weights.
    names = [n for n in module if n in partitions.states or n in frozen]
    names += [n for n in partitions.states if n not in module]
    result = []
    for name in names:
        states: dict[str, State] = dict(partitions.states.get(name, {}))
        if name in partitions.frozen:
            states[MODULE] = partitions.frozen[name]
        elif files.stage != 3 and name in module:
            states[MODULE] = whole_tensor(first, module[name])
        shape = next(iter(states.values())).shape
        for key, state in states.items():
            if state.shape != shape:
                raise LayoutError(
                    first.path, f"{name} has shape {shape}, but its {key} copy {state.shape}", "two saves are mixed"
                )
        result.append(Parameter(name, shape, group_of.get(name), states))
    return tuple(result)


def _step_notes(files: ZeroFiles, partitions: Partitions, expected: int) -> list[LayoutError]:
    """The optimizer's own count of steps held against the engine's.

    DeepSpeed writes model states first: a save that was killed under a tag that is used again and again (Lightning's
    and Accelerate's are) leaves new model states beside old optimizer files.
    """
    for i, group in enumerate(partitions.groups):
        step = group.scalars.get("step")
        if step is not None and step.value != expected:
            problem = f"group {i} took {step.value} steps, but the model states are of step {expected}"
            hint = "two saves are mixed, unless training was resumed without the optimizer's states"
            return [LayoutError(files.optimizer[0].path, problem, hint)]
    return []


def _remarks(files: ZeroFiles, frozen: set[str]) -> tuple[str, ...]:
    fields = files.model[0].fields
    if files.stage >= 2 and not frozen and fields.values.get("frozen_param_shapes", ()) is None:
        return ("frozen parameters, if there were any, were left out when it was saved (exclude_frozen_parameters)",)
    return ()


def _module_dtype(module: Mapping[str, TensorRef], partitions: Partitions) -> str:
    """What the trainable weights are in; at stage 3 their empty placeholders still tell."""
    for name in partitions.states:
        if name in module:
            return module[name].dtype
    return next(iter(module.values())).dtype if module else "F32"
