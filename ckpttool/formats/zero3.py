"""The layout of ZeRO stage 3: every parameter split over all ranks, the pieces laid into sub-groups.

Source: DeepSpeed 0.19, runtime/zero/stage3.py (``_create_fp16_partitions_with_defragmentation``, ``_rigid_state_dict``)
and utils/zero_to_fp32.py (``zero3_partitioned_param_info``).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.errors import LayoutError
from ckpttool.formats.fields import Fields, shape_of
from ckpttool.formats.zero_files import RESTORE
from ckpttool.formats.zero_module import read_param_shapes
from ckpttool.formats.zero_partitions import (
    FRAGMENT,
    Partitions,
    check_agreement,
    flat_state,
    locate_states,
    read_flat_buffer,
    read_group,
)
from ckpttool.model import ParamGroup, ScalarState, State, extents

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ckpttool.containers.values import TensorRef
    from ckpttool.formats.zero_files import RankFile, Report, ZeroFiles


def read_partitions(files: ZeroFiles, report: Report) -> Partitions:
    """Assign every element of the sub-groups' flat buffers to its parameter.

    Raises:
        LayoutError: The lengths do not add up, or two ranks disagree.
    """
    param_shapes = read_param_shapes(files.model[0])
    check_agreement(files.model, "param_shapes", [f.fields.values.get("param_shapes") for f in files.model], report)
    states = [files.states(r) for r in range(files.ranks)]
    masters = [s.tensors("fp32_flat_groups") for s in states]
    check_agreement(files.optimizer, "number of sub-groups", [len(m) for m in masters], report)
    if len(param_shapes) != len(masters[0]):
        raise LayoutError(
            files.model[0].path,
            f"param_shapes lists {len(param_shapes)} sub-groups, but the optimizer files hold {len(masters[0])}",
            RESTORE,
        )
    base = [s.child("optimizer_state_dict") for s in states]
    result = Partitions()
    scalars: list[Mapping[str, ScalarState]] = []
    for i, shapes in enumerate(param_shapes):
        pieces = [m[i] for m in masters]
        fragments, partition = _fragments(shapes, files.ranks)
        _check_lengths(files.optimizer, pieces, partition, i)
        flat_states = [flat_state(b, i) for b in base]
        buffer = read_flat_buffer(files, shapes, pieces, flat_states, partition, f"sub-group {i}", report)
        result.states.update(locate_states(files, buffer, fragments))
        result.unsliceable.extend(buffer.unsliceable)
        scalars.append(buffer.scalars)
    result.groups.extend(_groups(files, base, param_shapes, scalars, report))
    result.frozen.update(_frozen(files, report))
    return result


def _fragments(shapes: Mapping[str, tuple[int, ...]], ranks: int) -> tuple[dict[str, NDArray[np.void]], int]:
    """Cut every parameter into one piece a rank, of ceil(numel / ranks) elements, the last ones padded."""
    result: dict[str, NDArray[np.void]] = {}
    rank = np.arange(ranks, dtype=np.int64)
    position = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        piece = -(-numel // ranks)
        rows = np.zeros(ranks, dtype=FRAGMENT)
        rows["start"] = np.minimum(rank * piece, numel)
        rows["numel"] = np.clip(numel - rank * piece, 0, piece)
        rows["rank"] = rank
        rows["position"] = position
        rows["padding"] = np.uint64(piece) - rows["numel"]
        result[name] = rows
        position += piece
    return result, position


def _check_lengths(optimizer: Sequence[RankFile], pieces: Sequence[TensorRef], partition: int, sub_group: int) -> None:
    for file, piece in zip(optimizer, pieces, strict=True):
        if piece.shape == (partition,):
            continue
        if piece.numel == 0 and partition:
            raise LayoutError(
                file.path,
                f"sub-group {sub_group} is empty: its states were offloaded to NVMe, which is not supported yet",
                "save without NVMe offload",
            )
        raise LayoutError(
            file.path,
            f"its partition of sub-group {sub_group} has {piece.numel} elements, but param_shapes gives {partition}",
            RESTORE,
        )


def _groups(
    files: ZeroFiles,
    base: Sequence[Fields],
    param_shapes: Sequence[Mapping[str, tuple[int, ...]]],
    scalars: Sequence[Mapping[str, ScalarState]],
    report: Report,
) -> list[ParamGroup]:
    """The user's parameter groups: each lists the sub-groups it was cut into."""
    lists = [b.get("param_groups", list) for b in base]
    result: list[ParamGroup] = []
    for g in range(len(lists[0])):
        fields = []
        for b, groups in zip(base, lists, strict=True):
            if len(groups) <= g or not isinstance(groups[g], dict):
                raise b.error("param_groups", f"lacks group {g}")
            fields.append(Fields(b.path, f"{b.place} > param_groups[{g}]", groups[g]))
        members = fields[0].integers("params")
        if not all(0 <= i < len(param_shapes) for i in members):
            raise fields[0].error("params", "names a sub-group that is not there")
        names = tuple(name for i in members for name in param_shapes[i])
        for i in members[1:]:
            if scalars[i] != scalars[members[0]]:
                problem = f"joins sub-groups {members[0]} and {i}, which took different steps: two saves are mixed"
                raise fields[0].error("params", problem)
        shared = scalars[members[0]] if members else {}
        result.append(read_group(files, fields, names, shared, f"group {g}", report))
    return result


def _frozen(files: ZeroFiles, report: Report) -> dict[str, State]:
    """Frozen parameters: one piece of the model's dtype on each rank, in its model-states file."""
    shapes = files.model[0].fields.optional("frozen_param_shapes", dict)
    if shapes is None:
        return {}
    check_agreement(
        files.model, "frozen_param_shapes", [f.fields.values.get("frozen_param_shapes") for f in files.model], report
    )
    fragments = [f.fields.tensor_mapping("frozen_param_fragments") for f in files.model]
    result: dict[str, State] = {}
    for name, raw in shapes.items():
        shape = shape_of(raw)
        if not isinstance(name, str) or shape is None:
            raise files.model[0].fields.error("frozen_param_shapes", f"gives {name!r} no shape")
        rows, piece = _fragments({name: shape}, files.ranks)
        result[name] = _frozen_state(files, name, shape, rows[name], piece, [f.get(name) for f in fragments])
    return result


def _frozen_state(
    files: ZeroFiles,
    name: str,
    shape: tuple[int, ...],
    rows: NDArray[np.void],
    piece: int,
    fragments: Sequence[TensorRef | None],
) -> State:
    table = extents(len(rows))
    dtypes = set()
    for r, (file, ref) in enumerate(zip(files.model, fragments, strict=True)):
        if ref is None or ref.numel != piece:
            held = "no" if ref is None else f"{ref.numel}"
            raise LayoutError(file.path, f"holds {held} elements of frozen parameter {name}, not {piece}", RESTORE)
        dtypes.add(ref.dtype)
        table[r] = (rows["start"][r], rows["numel"][r], file.index, file.torch.locate(ref).start, rows["padding"][r])
    if dtypes == {"I8"}:
        problem = f"frozen parameter {name} is quantised to 8 bit (ZeRO++), and its scale was not saved"
        raise LayoutError(
            files.model[0].path, problem, "it cannot be known; save without zero_quantized_nontrainable_weights"
        )
    if len(dtypes) != 1:
        raise LayoutError(files.model[0].path, f"frozen parameter {name} has several dtypes: {sorted(dtypes)}", RESTORE)
    return State(shape, dtypes.pop(), table)
