"""The layout of ZeRO stages 1 and 2: one flat buffer for each parameter group, cut into equal partitions.

Source: DeepSpeed 0.19, runtime/zero/stage_1_and_2.py (``__init__``, ``_get_state_for_elastic..``, ``state_dict``) and
utils/zero_to_fp32.py (``_zero2_merge_trainable_params``).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.errors import LayoutError
from ckpttool.formats.fields import Fields
from ckpttool.formats.zero_files import RESTORE
from ckpttool.formats.zero_module import read_module, read_param_shapes
from ckpttool.formats.zero_partitions import (
    FRAGMENT,
    Partitions,
    check_agreement,
    flat_state,
    locate_states,
    read_flat_buffer,
    read_group,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ckpttool.containers.values import TensorRef
    from ckpttool.formats.zero_files import RankFile, Report, ZeroFiles

Shapes = "Mapping[str, tuple[int, ...]]"


def read_partitions(files: ZeroFiles, report: Report) -> Partitions:
    """Assign every element of the optimizer's flat buffers to its parameter.

    The order in a flat buffer is that of ``param_shapes``. ``param_slice_mappings`` says the same in most checkpoints,
    but is wrong under ``round_robin_gradients``, so it is not used. Where the 16-bit copies are views of one flat
    storage, their offsets prove the order.

    Raises:
        LayoutError: The lengths do not add up, or two sources disagree.
    """
    param_shapes = read_param_shapes(files.model[0])
    module = read_module(files.model[0])
    states = [files.states(r) for r in range(files.ranks)]
    masters = [s.tensors("single_partition_of_fp32_groups") for s in states]
    check_agreement(files.optimizer, "number of parameter groups", [len(m) for m in masters], report)
    if len(param_shapes) != len(masters[0]):
        raise LayoutError(
            files.model[0].path,
            f"param_shapes lists {len(param_shapes)} groups, but the optimizer files hold {len(masters[0])}",
            RESTORE,
        )
    base = [_base_state(f, s) for f, s in zip(files.optimizer, states, strict=True)]
    end_paddings = [s.integers("group_paddings") if "group_paddings" in s else None for s in states]
    alignments = [s.values.get("param_alignment_paddings") for s in states]
    check_agreement(files.optimizer, "param_alignment_paddings", alignments, report)
    result = Partitions()
    for g, shapes in enumerate(param_shapes):
        what = f"group {g}"
        pieces = [m[g] for m in masters]
        alignment = _alignment_paddings(states[0], g, len(shapes))
        offsets, total = _offsets(shapes, alignment)
        partition = _partition_size(files, states, end_paddings, g, pieces, total)
        flat_states = [flat_state(b, g) for b in base]
        buffer = read_flat_buffer(files, shapes, pieces, flat_states, partition, what, report)
        _check_storage_offsets(files.model[0], module, shapes, offsets, partition * files.ranks, g)
        fragments = _fragments(shapes, offsets, partition, files.ranks)
        result.states.update(locate_states(files, buffer, fragments))
        result.unsliceable.extend(buffer.unsliceable)
        groups = [_param_group(b, g) for b in base]
        result.groups.append(read_group(files, groups, tuple(shapes), buffer.scalars, what, report))
    return result


# ------------------------------------------------------------------------------------------------- what is recorded


def _base_state(file: RankFile, states: Fields) -> Fields:
    value = states.get("base_optimizer_state", object)
    if isinstance(value, list):
        raise LayoutError(
            file.path, "is an elastic checkpoint, which is not supported yet", "save without elastic_checkpoint"
        )
    return states.child("base_optimizer_state")


def _param_group(base: Fields, group: int) -> Fields:
    groups = base.get("param_groups", list)
    if len(groups) <= group or not isinstance(groups[group], dict):
        raise base.error("param_groups", f"lacks group {group}")
    return Fields(base.path, f"{base.place} > param_groups[{group}]", groups[group])


def _alignment_paddings(states: Fields, group: int, count: int) -> list[int]:
    """Elements of padding behind each parameter; since 0.19.8, all 0 unless ``parameter_alignment`` is on."""
    recorded = states.optional("param_alignment_paddings", list)
    if recorded is None:
        return [0] * count
    paddings = recorded[group] if group < len(recorded) else None
    if (
        not isinstance(paddings, list)
        or len(paddings) != count
        or not all(isinstance(p, int) and 0 <= p < 1 << 16 for p in paddings)
    ):
        raise states.error("param_alignment_paddings", f"does not fit the {count} parameters of group {group}")
    return paddings


def _offsets(shapes: Mapping[str, tuple[int, ...]], paddings: Sequence[int]) -> tuple[NDArray[np.int64], int]:
    """First element of each parameter in the flat buffer, and where the last one ends."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    ends = np.cumsum(np.array([n + p for n, p in zip(sizes, paddings, strict=True)], dtype=np.int64))
    offsets = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if sizes else np.zeros(0, np.int64)
    return offsets, int(offsets[-1]) + sizes[-1] if sizes else 0


def _partition_size(
    files: ZeroFiles,
    states: Sequence[Fields],
    recorded: Sequence[list[int] | None],
    group: int,
    pieces: Sequence[TensorRef],
    total: int,
) -> int:
    """Elements of each rank's partition, padding included; everything about lengths must agree.

    DeepSpeed pads the buffer at its end so that it splits evenly (2 elements a rank since 0.5.2, 1 before), and saves
    masters without that padding. BF16_Optimizer, which records no ``zero_stage``, saves them with it.

    Raises:
        LayoutError: A rank's length is not what the shapes and the other ranks say.
    """
    ranks = files.ranks
    padded = "zero_stage" not in states[0]
    if any(r is not None and len(r) <= group for r in recorded):
        raise states[0].error("group_paddings", f"lacks group {group}")
    paddings = [0 if r is None else r[group] for r in recorded]
    partition = pieces[0].numel + (0 if padded else paddings[0])
    if not total <= partition * ranks < total + 2 * ranks:
        raise LayoutError(
            files.optimizer[0].path,
            f"group {group} has partitions of {partition} elements on {ranks} ranks, "
            f"but its parameters have {total} elements",
            f"{files.model[0].path} may be of another save",
        )
    for r, piece in enumerate(pieces):
        lean = min(max(total - r * partition, 0), partition)
        if piece.numel != partition and (padded or piece.numel != lean):
            raise LayoutError(
                files.optimizer[r].path,
                f"its partition of group {group} has {piece.numel} elements, not {lean}",
                RESTORE,
            )
        if not padded and recorded[r] is not None and piece.numel + paddings[r] != partition:
            raise LayoutError(
                files.optimizer[r].path,
                f"group_paddings calls {paddings[r]} elements of group {group} padding, but {partition - lean} are",
                RESTORE,
            )
    return partition


# ------------------------------------------------------------------------------------------------- where things lie


def _fragments(
    shapes: Mapping[str, tuple[int, ...]], offsets: NDArray[np.int64], partition: int, ranks: int
) -> dict[str, NDArray[np.void]]:
    """Cut every parameter at the borders of the partitions."""
    result: dict[str, NDArray[np.void]] = {}
    begins = [*offsets.tolist(), partition * ranks]
    for i, (name, shape) in enumerate(shapes.items()):
        offset, next_offset = begins[i], begins[i + 1]
        numel = math.prod(shape)
        if numel == 0:
            result[name] = np.zeros(0, dtype=FRAGMENT)
            continue
        rank = np.arange(offset // partition, (offset + numel - 1) // partition + 1, dtype=np.int64)
        begin = np.maximum(rank * partition, offset)
        end = np.minimum((rank + 1) * partition, offset + numel)
        rows = np.zeros(len(rank), dtype=FRAGMENT)
        rows["start"] = begin - offset
        rows["numel"] = end - begin
        rows["rank"] = rank
        rows["position"] = begin - rank * partition
        rows["padding"][-1] = min(next_offset, int(rank[-1] + 1) * partition) - (offset + numel)
        result[name] = rows
    return result


def _check_storage_offsets(
    file: RankFile,
    module: Mapping[str, TensorRef],
    shapes: Mapping[str, tuple[int, ...]],
    offsets: NDArray[np.int64],
    total: int,
    group: int,
) -> None:
    """Hold ``param_shapes`` against where the 16-bit copies lie in their group's flat storage.

    DeepSpeed makes every parameter a view of one flat buffer, and saving keeps that. Copies that were cloned one by one
    (fine-tuning tools do it) prove nothing and are left to the comparison of values.

    Raises:
        LayoutError: The two orders differ.
    """
    views = {name: module[name] for name in shapes if name in module and module[name].numel}
    storages = {ref.storage.key for ref in views.values()}
    if len(storages) != 1 or len(views) < 2:
        return
    for (name, shape), offset in zip(shapes.items(), offsets.tolist(), strict=True):
        ref = views.get(name)
        if ref is None:
            continue
        if ref.shape != shape:
            raise LayoutError(
                file.path, f"param_shapes gives {name} shape {shape}, but the module {ref.shape}", RESTORE
            )
        if ref.offset != offset or ref.storage.numel != total:
            raise LayoutError(
                file.path,
                f"param_shapes puts {name} at element {offset} of {total} of group {group}, "
                f"but its 16-bit copy lies at element {ref.offset} of {ref.storage.numel}",
                "the order of the parameters cannot be known; do not use this checkpoint",
            )
