"""The layout of ZeRO stage 3: every parameter is split over all ranks, and its parts are in sub-groups.

Source: DeepSpeed 0.19, runtime/zero/stage3.py (``_create_fp16_partitions_with_defragmentation``, ``_rigid_state_dict``)
and utils/zero_to_fp32.py (``zero3_partitioned_param_info``).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ckpttool.errors import LayoutError
from ckpttool.formats.fields import RESTORE, Fields, shape_of
from ckpttool.formats.zero.experts import Experts
from ckpttool.formats.zero.module import read_param_shapes, without_groups
from ckpttool.formats.zero.open_files import SWAPPED
from ckpttool.formats.zero.partitions import (
    STEP,
    EqualParts,
    Partitioned,
    Partitions,
    StoredPartitions,
    check_agreement,
    find_swapped,
    flat_state,
    local_hyperparameters,
    locate_states,
    merge_partitions,
    read_flat_buffer,
    read_group,
    states_of_no_parameter,
)
from ckpttool.messages import brief
from ckpttool.model import ParamGroup, State

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.containers.values import TensorRef
    from ckpttool.formats.fields import Report
    from ckpttool.formats.zero.files import RankFile, ZeroFiles
    from ckpttool.formats.zero.partitions import Stored


def read_partitions(files: ZeroFiles, report: Report) -> Partitions:
    """Assign every element of the sub-groups' flat buffers to its parameter.

    Raises:
        LayoutError: The lengths do not add up, or two ranks disagree.
    """
    param_shapes = read_param_shapes(files)
    check_agreement(files.model, "param_shapes", [f.fields.values.get("param_shapes") for f in files.model], report)
    states = [files.states(r) for r in range(files.ranks)]
    masters = [s.tensors("fp32_flat_groups") for s in states]
    check_agreement(files.optimizer, "number of sub-groups", [len(m) for m in masters], report)
    if without_groups(files):
        param_shapes = _in_sub_groups(files, param_shapes[0], [m.numel for m in masters[0]])
    if len(param_shapes) != len(masters[0]):
        raise LayoutError(
            files.model[0].path,
            f"param_shapes lists {len(param_shapes)} sub-groups, but the optimizer files hold {len(masters[0])}",
            RESTORE,
        )
    sub_groups: list[Partitions] = []
    for i, shapes in enumerate(param_shapes):
        parts = [_part(files, ranks) for ranks in _sharing_ranks(states, i)]
        read = [_read_sub_group(part, i, shapes, report) for part in parts]
        sub_groups.append(read[0] if len(read) == 1 else Experts(files).joined(read, f"sub-group {i}", report))
    in_sub_groups = [part.groups[0] for part in sub_groups]
    base = [s.child("optimizer_state_dict") for s in states]
    merged = merge_partitions(
        [
            *sub_groups,
            _groups(files, base, in_sub_groups, report),
            states_of_no_parameter(base, len(sub_groups)),
        ]
    )
    groups = merged.groups[len(sub_groups) :]
    return merged._replace(groups=groups, frozen=read_frozen(files.model, report))


def _in_sub_groups(
    files: ZeroFiles, shapes: Mapping[str, tuple[int, ...]], lengths: Sequence[int]
) -> list[dict[str, tuple[int, ...]]]:
    """Return the parameters of each sub-group, for releases that list all parameters, frozen ones too, in one mapping.

    Raises:
        LayoutError: There are several parameter groups, or frozen parameters: the layout is unknown.
    """
    result: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        if len(result) <= len(lengths) and filled == lengths[len(result) - 1] and filled:
            result.append({})
            filled = 0
        result[-1][name] = shape
        filled += -(-math.prod(shape) // files.ranks)
    groups = files.states(0).child("optimizer_state_dict").get("param_groups", list)
    if len(groups) != 1 or len(result) != len(lengths) or filled != lengths[-1]:
        raise LayoutError(
            files.optimizer[0].path,
            "lists its parameters without their groups (DeepSpeed before 0.5.4), and there are several groups or "
            "frozen parameters: the position of each parameter is unknown",
            "load and save it once with a later DeepSpeed",
        )
    return result


def _part(files: ZeroFiles, ranks: Sequence[int]) -> ZeroFiles:
    """Return the files of some of the ranks."""
    if len(ranks) == files.ranks:
        return files
    return files._replace(
        optimizer=[files.optimizer[r] for r in ranks],
        swapped=tuple(files.swapped[r] for r in ranks),
    )


def _sharing_ranks(states: Sequence[Fields], sub_group: int) -> list[list[int]]:
    """Return the sets of ranks that partition a sub-group: one set of all ranks, except for experts.

    Source: DeepSpeed 0.19, runtime/zero/stage3.py (``ds_zero_partition_groups``, since 0.19.3 with AutoEP).
    """
    if not states[0].values.get("ds_zero_partition_groups"):
        return [list(range(len(states)))]
    found: list[list[int]] = []
    for rank, fields in enumerate(states):
        entries = fields.get("ds_zero_partition_groups", list)
        entry = entries[sub_group] if sub_group < len(entries) else None
        ranks = entry.get("partition_ranks") if isinstance(entry, dict) else None
        if not isinstance(ranks, list) or not all(isinstance(r, int) and 0 <= r < len(states) for r in ranks):
            raise fields.error("ds_zero_partition_groups", f"does not say which ranks share sub-group {sub_group}")
        if rank not in ranks or not entry or entry.get("partition_rank") != ranks.index(rank):
            raise fields.error("ds_zero_partition_groups", f"gives rank {rank} another position")
        if ranks not in found:
            found.append(ranks)
    if sorted(r for ranks in found for r in ranks) != list(range(len(states))):
        raise states[0].error("ds_zero_partition_groups", f"does not share sub-group {sub_group} among all ranks")
    return sorted(found)


def _read_sub_group(
    files: ZeroFiles, sub_group: int, shapes: Mapping[str, tuple[int, ...]], report: Report
) -> Partitions:
    """Read one sub-group, partitioned over all ranks of ``files``; its group has no hyper-parameters yet."""
    what = f"sub-group {sub_group}"
    states = [files.states(r) for r in range(files.ranks)]
    pieces = [s.tensors("fp32_flat_groups")[sub_group] for s in states]
    flat_states = [flat_state(s.child("optimizer_state_dict"), sub_group) for s in states]
    fragments, partition = _fragments(shapes, files.ranks)
    found, flat_states = find_swapped(files, pieces, flat_states, partition)
    _check_lengths(files.optimizer, found, partition, sub_group)
    buffer = read_flat_buffer(files, shapes, found, flat_states, partition, what, report)
    return Partitions(
        states=locate_states(files, buffer, fragments),
        groups=(ParamGroup(tuple(shapes), {}, buffer.scalars),),
        nonpartitionable=tuple(f"{what}: {key}" for key in buffer.odd),
    )


def _fragments(shapes: Mapping[str, tuple[int, ...]], ranks: int) -> tuple[dict[str, EqualParts], int]:
    """Return the parts of every parameter, and the elements of a partition."""
    result: dict[str, EqualParts] = {}
    position = 0
    for name, shape in shapes.items():
        result[name] = EqualParts(math.prod(shape), ranks, position)
        position += result[name].part
    return result, position


def _check_lengths(optimizer: Sequence[RankFile], pieces: Sequence[Stored], partition: int, sub_group: int) -> None:
    for file, piece in zip(optimizer, pieces, strict=True):
        if piece.shape == (partition,):
            continue
        if piece.numel == 0 and partition:
            raise LayoutError(
                file.path,
                f"sub-group {sub_group} is empty: it was offloaded to NVMe, and no file in {SWAPPED} holds it",
                f"copy {SWAPPED} here too, or save without NVMe offload",
            )
        raise LayoutError(
            file.path,
            f"its partition of sub-group {sub_group} has {piece.numel} elements, but param_shapes gives {partition}",
            RESTORE,
        )


def _groups(
    files: ZeroFiles,
    base: Sequence[Fields],
    sub_groups: Sequence[ParamGroup],
    report: Report,
) -> Partitions:
    """Read the user's parameter groups: each lists its sub-groups."""
    lists = [b.get("param_groups", list) for b in base]
    result: list[ParamGroup] = []
    odd: list[str] = []
    for g in range(len(lists[0])):
        fields = []
        for b, groups in zip(base, lists, strict=True):
            if len(groups) <= g or not isinstance(groups[g], dict):
                raise b.error("param_groups", f"lacks group {g}")
            fields.append(Fields(b.path, f"{b.place} > param_groups[{g}]", groups[g]))
        members = fields[0].integers("params")
        if not all(0 <= i < len(sub_groups) for i in members):
            raise fields[0].error("params", "names a sub-group that does not exist")
        names = tuple(name for i in members for name in sub_groups[i].parameters)
        scalars = [sub_groups[i].scalars for i in members]
        for i, own in zip(members, scalars, strict=True):
            if own.get(STEP) != scalars[0].get(STEP):
                problem = f"has sub-groups {members[0]} and {i}, which took different steps: two saves are mixed"
                raise fields[0].error("params", problem)
        local = {key for own in scalars for key in own if any(other.get(key) != own[key] for other in scalars)}
        shared = {key: number for key, number in scalars[0].items() if key not in local} if members else {}
        odd += [f"group {g}: {key}" for key in (*sorted(local), *local_hyperparameters(files.optimizer, fields))]
        result.append(read_group(files.optimizer, fields, names, shared, f"group {g}", report))
    return Partitions(groups=tuple(result), nonpartitionable=tuple(odd))


def read_frozen(model: Sequence[RankFile], report: Report) -> dict[str, State]:
    """Read frozen parameters: one part of the model's dtype on each rank, in its model-states file."""
    shapes = model[0].fields.optional("frozen_param_shapes", dict)
    if shapes is None:
        return {}
    check_agreement(model, "frozen_param_shapes", [f.fields.values.get("frozen_param_shapes") for f in model], report)
    fragments = [f.fields.tensor_mapping("frozen_param_fragments") for f in model]
    result: dict[str, State] = {}
    for name, raw in shapes.items():
        shape = shape_of(raw)
        if not isinstance(name, str) or shape is None:
            raise model[0].fields.error("frozen_param_shapes", f"gives {brief(name, 200)} no shape")
        result[name] = _frozen_state(model, name, shape, [f.get(name) for f in fragments])
    return result


def _frozen_state(
    model: Sequence[RankFile], name: str, shape: tuple[int, ...], pieces: Sequence[TensorRef | None]
) -> State:
    parts = EqualParts(math.prod(shape), len(model), 0)
    places = []
    dtypes = set()
    for file, ref in zip(model, pieces, strict=True):
        if ref is None or ref.numel != parts.part:
            held = "no" if ref is None else f"{ref.numel}"
            raise LayoutError(file.path, f"holds {held} elements of frozen parameter {name}, not {parts.part}", RESTORE)
        dtypes.add(ref.dtype)
        places.append((file.file_index, file.torch.locate(ref).start, ref.numel))
    if dtypes == {"I8"}:
        problem = f"frozen parameter {name} is quantised to 8 bit (ZeRO++), and its scale was not saved"
        raise LayoutError(
            model[0].path, problem, "the values are lost; save without zero_quantized_nontrainable_weights"
        )
    if len(dtypes) != 1:
        raise LayoutError(model[0].path, f"frozen parameter {name} has several dtypes: {sorted(dtypes)}", RESTORE)
    return State(shape, min(dtypes), Partitioned(StoredPartitions(min(dtypes), places), parts))
