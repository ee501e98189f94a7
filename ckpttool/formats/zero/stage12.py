"""The layout of ZeRO stages 1 and 2: one flat buffer for each parameter group, cut into equal partitions.

Source: DeepSpeed 0.19, runtime/zero/stage_1_and_2.py (``__init__``, ``_get_state_for_elastic..``, ``state_dict``) and
utils/zero_to_fp32.py (``_zero2_merge_trainable_params``).
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from ckpttool.containers.values import TensorRef
from ckpttool.errors import LayoutError
from ckpttool.formats.fields import RESTORE, Fields
from ckpttool.formats.zero.experts import Experts
from ckpttool.formats.zero.module import mapped_sizes, read_param_shapes, without_groups, zenflow
from ckpttool.formats.zero.open_files import check_listed, check_recorded_slices, partition_counts
from ckpttool.formats.zero.partitions import (
    BufferSlice,
    Partitions,
    check_agreement,
    flat_state,
    local_hyperparameters,
    locate_states,
    merge_partitions,
    read_flat_buffer,
    read_group,
    states_of_no_parameter,
    undo_round_robin,
)
from ckpttool.messages import brief
from ckpttool.model import Replica, State
from ckpttool.model.places import Contiguous

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.formats.fields import Report
    from ckpttool.formats.zero.files import RankFile, ZeroFiles

Shapes = "Mapping[str, tuple[int, ...]]"


def read_partitions(
    files: ZeroFiles, module: Mapping[str, TensorRef], layers: Mapping[str, tuple[int, ...]], report: Report
) -> Partitions:
    """Assign every element of the optimizer's flat buffers to its parameter.

    A flat buffer has the order of ``param_shapes``. ``param_slice_mappings`` has the same order in most checkpoints,
    but is wrong under ``round_robin_gradients``, so it is not used. If the 16-bit copies are views of one flat storage,
    their offsets confirm the order.

    Args:
        files: The files of one model-parallel rank.
        module: Its state dict, without experts.
        layers: In a pipeline, shapes of the tensors of its layers.
        report: Takes findings.

    Raises:
        LayoutError: The lengths do not add up, or two sources disagree.
    """
    if files.model[0].fields.values.get("param_shapes") is None and (mapped := mapped_sizes(files)):
        # Stage 0 in a pipeline lists no shapes, but BF16_Optimizer partitions like stage 1.
        param_shapes = [{name: layers.get(name, (numel,)) for name, numel in group.items()} for group in mapped]
        check_listed(files.model[0], module, [name for group in mapped for name in group])
    else:
        param_shapes = read_param_shapes(files)
    _check_order_of_elements(files.model[0], module, param_shapes)
    masters = [files.states(r).tensors("single_partition_of_fp32_groups") for r in range(files.ranks)]
    check_agreement(files.optimizer, "number of parameter groups", [len(m) for m in masters], report)
    if without_groups(files):
        param_shapes = _grouped(files, param_shapes[0], module, masters)
    if len(param_shapes) != len(masters[0]):
        raise LayoutError(
            files.model[0].path,
            f"param_shapes lists {len(param_shapes)} groups, but the optimizer files hold {len(masters[0])}",
            RESTORE,
        )
    counts = partition_counts(files.optimizer[0])
    counts = counts * len(param_shapes) if len(counts) == 1 else counts
    if len(counts) != len(param_shapes):
        raise files.states(0).error("partition_count", f"does not fit {len(param_shapes)} groups")
    experts = Experts(files)
    groups: list[Partitions] = []
    for g, (shapes, count) in enumerate(zip(param_shapes, counts, strict=True)):
        if count == files.ranks:
            groups.append(_read_group(files, module, g, shapes, report))
        else:
            parts = [files._replace(optimizer=[files.optimizer[r] for r in ranks]) for ranks in experts.ranks(count)]
            read = [_read_group(part, {}, g, shapes, report) for part in parts]
            groups.append(experts.joined(read, f"group {g}", report))
    elastic = isinstance(files.states(0).values.get("base_optimizer_state"), list)
    base = [] if elastic else [files.states(r).child("base_optimizer_state") for r in range(files.ranks)]
    return merge_partitions([*groups, states_of_no_parameter(base, len(param_shapes))])


def _check_order_of_elements(
    file: RankFile, module: Mapping[str, TensorRef], param_shapes: Sequence[Mapping[str, tuple[int, ...]]]
) -> None:
    """Refuse flat buffers of ZenFlow with matrices in column-major order; their copies are views with strides.

    Source: DeepSpeed up to 0.19, runtime/zenflow/zenflow_utils.py (``_unflatten_dense_tensors``); 0.19.8 views the flat
    buffer row by row.

    Raises:
        LayoutError: A trained matrix is such a view.
    """
    names = [name for group in param_shapes for name in group if name in module] if zenflow(file) else []
    odd = next((name for name in names if not module[name].contiguous), None)
    if odd is not None:
        problem = f"was trained with ZenFlow, which kept {brief(odd, 200)} column by column in its flat buffers"
        raise LayoutError(file.path, problem, "that layout is not supported: resume with the DeepSpeed that saved it")


def _grouped(
    files: ZeroFiles,
    shapes: Mapping[str, tuple[int, ...]],
    module: Mapping[str, TensorRef],
    masters: Sequence[Sequence[TensorRef]],
) -> list[dict[str, tuple[int, ...]]]:
    """Return the parameters of each group in the order of its flat buffer, for releases that list them without groups.

    The 16-bit copies are views of one flat storage for each group, in the order of the masters.

    Raises:
        LayoutError: The copies are not such views.
    """
    storages: dict[str, list[str]] = {}
    for name in shapes:
        ref = module.get(name)
        if ref is not None and ref.numel:
            storages.setdefault(ref.storage.key, []).append(name)
    result = []
    for g in range(len(masters[0])):
        length = sum(pieces[g].numel for pieces in masters)
        # Masters lack the padding at the end, or some of it.
        fitting = [
            names
            for names in storages.values()
            if 0 <= module[names[0]].storage.numel - length < 2 * files.ranks
            and 0 <= length - sum(module[n].numel for n in names) < 2 * files.ranks
        ]
        if len(fitting) != 1:
            raise LayoutError(
                files.model[0].path,
                f"does not say which parameters are in group {g} (DeepSpeed before 0.5.4), and its 16-bit copies are "
                "not views of one storage for each group",
                "load and save it once with a later DeepSpeed",
            )
        result.append({n: shapes[n] for n in sorted(fitting[0], key=lambda n: module[n].offset)})
    return result


def _read_group(
    files: ZeroFiles, module: Mapping[str, TensorRef], group: int, shapes: Mapping[str, tuple[int, ...]], report: Report
) -> Partitions:
    """Read one parameter group, partitioned over all ranks of ``files``."""
    what = f"group {group}"
    states = [files.states(r) for r in range(files.ranks)]
    pieces = [s.tensors("single_partition_of_fp32_groups")[group] for s in states]
    flat_states = [_flat_state(s, group) for s in states]
    end_paddings = [s.integers("group_paddings") if "group_paddings" in s else None for s in states]
    alignments = [s.values.get("param_alignment_paddings") for s in states]
    check_agreement(files.optimizer, "param_alignment_paddings", alignments, report)
    alignment = _alignment_paddings(states[0], group, len(shapes))
    offsets = _offsets(shapes, alignment)
    total = offsets[-1] + math.prod([*shapes.values()][-1]) if shapes else 0
    partition = _partition_size(files, states, end_paddings, group, pieces, flat_states, total)
    buffer = read_flat_buffer(files, shapes, pieces, flat_states, partition, what, report)
    slack = 0 if end_paddings[0] is not None else 2 * files.ranks
    _check_storage_offsets(files.model[0], module, shapes, offsets, partition * files.ranks, slack, group)
    fragments = _fragments(shapes, offsets, partition, files.ranks)
    if not _round_robin(files):  # it records another order than the saved elements have
        check_recorded_slices(states, group, fragments, trust_names=files.location.trust_names)
    # All readers return the optimizer's order: partitions for another number of ranks start from it.
    names = undo_round_robin(tuple(shapes), files.ranks) if _round_robin(files) else tuple(shapes)
    located = locate_states(files, buffer, fragments)
    replicas: list[Replica] = []
    nonpartitionable = []
    for key, values in buffer.odd.items():
        whole = _locate_whole(files, values, shapes, fragments)
        if whole is None:
            nonpartitionable.append(f"{what}: {key}")
            continue
        for name, copies in whole.items():
            located[name][key], *others = copies
            replicas += [Replica(name, located[name][key], other) for other in others]
    group_fields = [_param_group(s, group) for s in states]
    return Partitions(
        states=located,
        groups=(read_group(files.optimizer, group_fields, tuple(names), buffer.scalars, what, report),),
        nonpartitionable=(
            *nonpartitionable,
            *(f"{what}: {name}" for name in local_hyperparameters(files.optimizer, group_fields)),
        ),
        replicas=tuple(replicas),
    )


def _locate_whole(
    files: ZeroFiles,
    values: Sequence[object],
    shapes: Mapping[str, tuple[int, ...]],
    fragments: Mapping[str, BufferSlice],
) -> dict[str, list[State]] | None:
    """Locate a state that each rank stores whole for all parameters with a fragment in its partition.

    Muon works on whole matrices: if the border of two partitions cuts a parameter, both ranks store it.

    Source: DeepSpeed 0.17.6 to 0.19.8, runtime/zero/stage_1_and_2.py (``get_flat_partition``, ``_apply_muon_update``).

    Returns:
        The copies of each parameter's state, one for each rank that has it; None if the state has another form.
    """
    touching: list[list[str]] = [[] for _ in values]
    for name, fragment in fragments.items():
        for rank in fragment.ranks:
            touching[rank].append(name)
    result: dict[str, list[State]] = {}
    for file, value, names in zip(files.optimizer, values, touching, strict=True):
        if not isinstance(value, TensorRef) or value.shape != (sum(math.prod(shapes[n]) for n in names),):
            return None
        at = file.torch.locate(value).start
        for name in names:
            state = State(shapes[name], value.dtype, Contiguous(math.prod(shapes[name]), file.file_index, at))
            at += state.nbytes
            result.setdefault(name, []).append(state)
    return result


# ------------------------------------------------------------------------------------------------- recorded values


def _round_robin(files: ZeroFiles) -> bool:
    """Return whether the run had ``round_robin_gradients``."""
    config = files.model[0].fields.optional("ds_config", dict) or {}
    zero = config.get("zero_optimization")
    return isinstance(zero, dict) and zero.get("round_robin_gradients") is True


def _flat_state(states: Fields, group: int) -> Mapping[Any, Any]:
    """Return the optimizer states of one group; elastic checkpoints list them without the rest of the state dict.

    Source: DeepSpeed 0.3.3 to 0.19.8, runtime/zero/stage_1_and_2.py (``_get_base_optimizer_state``).
    """
    value = states.get("base_optimizer_state", object)
    if not isinstance(value, list):
        return flat_state(states.child("base_optimizer_state"), group)
    if group >= len(value) or not isinstance(value[group], dict):
        raise states.error("base_optimizer_state", f"lacks group {group}")
    found: Mapping[Any, Any] = value[group]
    return found


def _param_group(states: Fields, group: int) -> Fields:
    if isinstance(states.values.get("base_optimizer_state"), list):
        step = states.values.get("base_optimizer_state_step")
        return Fields(states.path, states.place, {} if step is None else {"step": step})
    base = states.child("base_optimizer_state")
    groups = base.get("param_groups", list)
    if len(groups) <= group or not isinstance(groups[group], dict):
        raise base.error("param_groups", f"lacks group {group}")
    return Fields(base.path, f"{base.place} > param_groups[{group}]", groups[group])


def _alignment_paddings(states: Fields, group: int, count: int) -> list[int]:
    """Return the padding elements after each parameter; since 0.19.8, all 0 unless ``parameter_alignment`` is on."""
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


def _offsets(shapes: Mapping[str, tuple[int, ...]], paddings: Sequence[int]) -> list[int]:
    """Return the first element of each parameter in the flat buffer."""
    sizes = [math.prod(shape) + padding for shape, padding in zip(shapes.values(), paddings, strict=True)]
    return list(itertools.accumulate(sizes[:-1], initial=0)) if sizes else []


def _partition_size(
    files: ZeroFiles,
    states: Sequence[Fields],
    recorded: Sequence[list[int] | None],
    group: int,
    pieces: Sequence[TensorRef],
    flat_states: Sequence[Mapping[Any, Any]],
    total: int,
) -> int:
    """Return the elements of each rank's partition, padding included; check all recorded lengths.

    DeepSpeed pads the buffer at its end so that it splits evenly (2 elements a rank since 0.5.2, 1 before), and saves
    masters without that padding. BF16_Optimizer, which records no ``zero_stage``, saves them with it. Releases that do
    not record the padding (up to 0.6) save some of it.

    Raises:
        LayoutError: A rank's length contradicts the shapes or the other ranks.
    """
    ranks = files.ranks
    padded = "zero_stage" not in states[0]
    if any(r is not None and len(r) <= group for r in recorded):
        raise states[0].error("group_paddings", f"lacks group {group}")
    paddings = [0 if r is None else r[group] for r in recorded]
    partition = pieces[0].numel + (0 if padded else paddings[0])
    unrecorded = not padded and recorded[0] is None
    if unrecorded:
        moments = (v.numel for s in flat_states for v in s.values() if isinstance(v, TensorRef) and len(v.shape) == 1)
        partition = max(partition, *(piece.numel for piece in pieces), *(n for n in moments if n < partition + 2))
    if not total <= partition * ranks < total + 2 * ranks:
        raise LayoutError(
            files.optimizer[0].path,
            f"group {group} has partitions of {partition} elements on {ranks} ranks, "
            f"but its parameters have {total} elements",
            f"{files.model[0].path} may be of another save",
        )
    for r, piece in enumerate(pieces):
        lean = min(max(total - r * partition, 0), partition)
        if unrecorded and lean <= piece.numel <= partition:
            continue
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


# ------------------------------------------------------------------------------------------------- fragments


def _fragments(
    shapes: Mapping[str, tuple[int, ...]], offsets: Sequence[int], partition: int, ranks: int
) -> dict[str, BufferSlice]:
    """Return the elements of every parameter in the flat buffer."""
    ends = [*offsets[1:], partition * ranks]
    return {
        name: BufferSlice(math.prod(shape), offset, end, partition)
        for (name, shape), offset, end in zip(shapes.items(), offsets, ends, strict=False)
    }


def _check_storage_offsets(
    file: RankFile,
    module: Mapping[str, TensorRef],
    shapes: Mapping[str, tuple[int, ...]],
    offsets: Sequence[int],
    total: int,
    slack: int,
    group: int,
) -> None:
    """Compare ``param_shapes`` with the offsets of the 16-bit copies in their group's flat storage.

    DeepSpeed makes every parameter a view of one flat buffer, and a save keeps that. Copies that fine-tuning tools have
    cloned one by one show no order; the consistency checks compare their values.

    Raises:
        LayoutError: The two orders differ.
    """
    views = {name: module[name] for name in shapes if name in module and module[name].numel}
    storages = {ref.storage.key for ref in views.values()}
    if len(storages) != 1 or len(views) < 2:
        return
    for (name, shape), offset in zip(shapes.items(), offsets, strict=True):
        ref = views.get(name)
        if ref is None:
            continue
        if ref.shape != shape:
            raise LayoutError(
                file.path, f"param_shapes gives {name} shape {shape}, but the module {ref.shape}", RESTORE
            )
        if ref.offset != offset or abs(ref.storage.numel - total) > slack:
            raise LayoutError(
                file.path,
                f"param_shapes puts {name} at element {offset} of {total} of group {group}, "
                f"but its 16-bit copy is at element {ref.offset} of {ref.storage.numel}",
                "the order of the parameters is unknown; do not use this checkpoint",
            )
