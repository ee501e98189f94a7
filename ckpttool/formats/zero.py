"""A directory of ZeRO files -> Checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.errors import LayoutError
from ckpttool.formats import zero3, zero12
from ckpttool.formats.zero_files import RESTORE, RankFile, ZeroFiles, read_zero_files
from ckpttool.formats.zero_module import client_state, read_aliases, read_buffers, read_module, whole_tensor
from ckpttool.formats.zero_partitions import check_agreement
from ckpttool.model import MODULE, Buffer, Checkpoint, Parameter, State, Topology

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    buffers = read_buffers(first, module)
    aliases, duplicates = read_aliases(
        first, module, _stored_names(module, partitions, buffers, first), partitions.states
    )
    parameters = _parameters(files, module, partitions, buffers, aliases)
    return Checkpoint(
        location=location.directory,
        root=location.root,
        tag=location.tag,
        stage=files.stage,
        topology=Topology(data_parallel=files.ranks),
        dtype=_module_dtype(module, partitions),
        deepspeed_version=first.fields.optional("ds_version", str),
        step=first.fields.optional("global_steps", int) or 0,
        skipped_steps=first.fields.optional("skipped_steps", int) or 0,
        parameters=parameters,
        buffers=buffers,
        aliases=aliases,
        groups=tuple(partitions.groups),
        unsliceable=tuple(partitions.unsliceable),
        scheduler=first.fields.values.get("lr_scheduler"),
        loss_scaler=files.states(0).values.get("loss_scaler"),
        client_state=client_state(first),
        ds_config=first.fields.optional("ds_config", dict) or {},
        duplicates=duplicates,
        files=files.files,
        notes=files.notes,
    )


def _check_ranks_agree(files: ZeroFiles, report: Report) -> None:
    for key in ("global_steps", "ds_version"):
        check_agreement(files.model, key, [f.fields.values.get(key) for f in files.model], report)
    check_agreement(files.optimizer, "ds_version", [f.fields.values.get("ds_version") for f in files.optimizer], report)


def _stored_names(
    module: Mapping[str, TensorRef], partitions: Partitions, buffers: tuple[Buffer, ...], file: RankFile
) -> set[str]:
    """Names that stand for tensors of their own, so that another name can be tied to them."""
    shared = file.fields.optional("shared_params", dict) or {}
    own = set(partitions.states) | set(partitions.frozen) | {b.name for b in buffers}
    if "shared_params" in file.fields:
        own |= {name for name in module if name not in shared}
    return own


def _parameters(
    files: ZeroFiles,
    module: Mapping[str, TensorRef],
    partitions: Partitions,
    buffers: tuple[Buffer, ...],
    aliases: Mapping[str, str],
) -> tuple[Parameter, ...]:
    """Every parameter once, in the order of the module."""
    first = files.model[0]
    group_of = {name: g for g, group in enumerate(partitions.groups) for name in group.parameters}
    not_parameters = {b.name for b in buffers} | set(aliases)
    # A parameter that the module does not name was excluded there: its masters are still its weights.
    names = [n for n in module if n not in not_parameters] + [n for n in partitions.states if n not in module]
    result = []
    for name in names:
        states: dict[str, State] = dict(partitions.states.get(name, {}))
        if name in partitions.frozen:
            states[MODULE] = partitions.frozen[name]
        elif files.stage != 3 and name in module:
            states[MODULE] = whole_tensor(first, module[name])
        if not states:
            raise LayoutError(
                first.path,
                f"names parameter {name}, but no rank holds its values",
                "its weights were left out when it was saved (exclude_frozen_parameters?); " + RESTORE,
            )
        shape = next(iter(states.values())).shape
        for key, state in states.items():
            if state.shape != shape:
                raise LayoutError(
                    first.path, f"{name} has shape {shape}, but its {key} copy {state.shape}", "two saves are mixed"
                )
        result.append(Parameter(name, shape, group_of.get(name), states))
    return tuple(result)


def _module_dtype(module: Mapping[str, TensorRef], partitions: Partitions) -> str:
    """What the trainable weights are in; at stage 3 their empty placeholders still tell."""
    for name in partitions.states:
        if name in module:
            return module[name].dtype
    return next(iter(module.values())).dtype if module else "F32"
