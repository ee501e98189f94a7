"""The layout without ZeRO: whole tensors in one file, and an optimizer that numbers its parameters.

Source: DeepSpeed 0.19, runtime/engine.py (``_save_checkpoint``), runtime/fp16/unfused_optimizer.py and
runtime/fp16/fused_optimizer.py (``state_dict``).
"""

from __future__ import annotations

import math
import posixpath
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, groupby, islice, pairwise
from typing import TYPE_CHECKING, Any

from ckpttool.containers.values import TensorRef
from ckpttool.errors import LayoutError
from ckpttool.formats.fields import RESTORE, Fields
from ckpttool.formats.tensors import whole_tensor
from ckpttool.formats.zero.experts import global_names, local_names
from ckpttool.formats.zero.partitions import (
    STEP,
    Partitions,
    match_names,
    merge_partitions,
    read_group,
    states_of_no_parameter,
)
from ckpttool.model import MASTER, MODULE, ScalarState, State, split_numbers
from ckpttool.model.names import ORDER
from ckpttool.model.places import Contiguous

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence

    from ckpttool.formats.fields import Report
    from ckpttool.formats.zero.files import RankFile, ZeroFiles

UNASSIGNED = "optimizer"
"""Name of the states in ``nonpartitionable`` if the names of the parameters are unknown."""
SEVERAL_ORDERS = "the optimizer numbers its parameters, and several orders of names fit; weights are the model's own"
"""Remark if the names of the parameters are unknown."""
OTHER_SHAPE = re.compile(r"(^|_)(row|col)(_|$)|^(worker|server)_error$")
"""Keys of states that are not of the parameter's shape, and may be of another parameter's.

Source: transformers 5.23, optimization.py (``Adafactor``: exp_avg_sq_row, exp_avg_sq_col); torch 2.13,
optim/_adafactor.py (row_var, col_var); DeepSpeed 0.19.6, runtime/fp16/onebit/adam.py.
"""
COMPRESSION = {
    "worker_error": "worker_error and server_error are the compression errors of the first rank, and DeepSpeed's load "
    "resets them",
    "momentum_accumulator": "0/1 Adam lets the weights of the ranks differ between synchronizations: the first rank's "
    "are saved, and DeepSpeed's load resets momentum_accumulator",
}
"""Remarks on optimizers that compress their communication, by the name of a state.

Source: DeepSpeed 0.19.6, runtime/fp16/onebit/adam.py, lamb.py and zoadam.py (``step``, ``load_state_dict``).
"""


@dataclass(frozen=True, slots=True, eq=False)
class _Optimizer:
    """The checked optimizer part of one file."""

    fields: Fields
    """DeepSpeed's own part."""
    base: Fields
    """State dict of the wrapped optimizer."""
    states: Fields
    """Its states by number."""
    groups: list[dict[str, Any]]
    """Its parameter groups, each with the numbers of its parameters."""
    flat: list[TensorRef] | None
    """Masters of the fused optimizer: one flat tensor for each group."""
    masters: list[Sequence[object]] | None
    """Masters of the unfused optimizer: the tensors of each group."""


@dataclass(frozen=True, slots=True, eq=False)
class _GroupStates:
    """The states of one group."""

    states: Mapping[str, Mapping[str, State]]
    """States by parameter and name of the state."""
    scalars: Mapping[str, ScalarState]
    """Scalar states of the group."""
    odd: list[str]
    """Names of all other states."""
    numbers: Mapping[str, Mapping[str, ScalarState]] = field(default_factory=dict)
    """Numbers of each parameter that differ within the group."""


def read_partitions(
    files: ZeroFiles,
    module: Mapping[str, TensorRef],
    copies: Mapping[str, State],
    experts: Mapping[str, State],
    buffer_names: set[str],
    report: Report,
) -> Partitions:
    """Assign the optimizer's numbered states to the names of the module.

    The optimizer has no names, only shapes in the order of its groups; each group lists its parameters in the order of
    the module. Often only one assignment fits. If several fit, the states are not assigned.

    Args:
        files: The files.
        module: The state dict.
        copies: The same, as states.
        experts: The experts of a mixture, as states.
        buffer_names: Names of buffers.
        report: Takes findings.

    Raises:
        LayoutError: The optimizer's state dict contradicts itself or the module.
    """
    candidates = _candidates(module, copies, buffer_names)
    if not files.expert_optimizer:
        recorded = [[n for n in names if n in candidates] for names in files.recorded]
        return _read_optimizer(files.model[0], candidates, {}, module, recorded, report, files.order)
    # Each expert-parallel rank saves its own experts, and replicas of all other parameters.
    parallel = len(files.expert_optimizer)
    _check_experts_are_there(files, experts)
    parts = []
    for rank, file in enumerate(files.expert_optimizer):
        own = {n: experts[g] for n, g in local_names(experts, rank, parallel).items()}
        part = _read_optimizer(file, candidates, own, module, (), report)
        renamed = global_names(part.states, rank)
        groups = (replace(g, parameters=tuple(renamed.get(n, n) for n in g.parameters)) for g in part.groups)
        states = {renamed.get(name, name): own for name, own in part.states.items()}
        numbers = {renamed.get(name, name): held for name, held in part.numbers.items()}
        parts.append(part._replace(states=states, numbers=numbers, groups=tuple(groups)))
    return _merge_expert_ranks(parts)


def _merge_expert_ranks(parts: Sequence[Partitions]) -> Partitions:
    """Merge the optimizers of the expert-parallel ranks: their groups differ only in the experts."""
    merged = merge_partitions(parts)
    states: dict[str, Mapping[str, State]] = {}
    for part in parts:
        for name, own in part.states.items():
            states.setdefault(name, own)  # the first rank's replica counts
    groups = list(parts[0].groups)
    for part in parts[1:]:
        for g, group in enumerate(part.groups):
            names = dict.fromkeys((*groups[g].parameters, *group.parameters))
            groups[g] = replace(groups[g], parameters=tuple(names))
    return merged._replace(states=states, groups=tuple(groups))


def _check_experts_are_there(files: ZeroFiles, experts: Mapping[str, State]) -> None:
    """Check that each expert-parallel rank stores an equal share of the experts: the last ranks may be missing."""
    held = _expert_parameters(files.expert_optimizer[0])
    ranks = len(files.expert_optimizer)
    if held and len(experts) % held == 0 and len(experts) // held > ranks:
        path = files.expert_optimizer[-1].path
        name = f"expp_rank_{ranks}_mp_rank_{files.model_rank:02d}_optim_states.pt"
        problem = f"is missing (experts are shared by {len(experts) // held} ranks)"
        raise LayoutError(posixpath.join(posixpath.dirname(path), name), problem, RESTORE)


def _expert_parameters(file: RankFile) -> int:
    """Return the number of experts' parameters in the optimizer of one rank."""
    optimizer = file.fields.optional("optimizer", dict) or {}
    inner = optimizer.get("optimizer_state_dict", optimizer)
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    groups = groups if isinstance(groups, list) else []
    numbered = [g.get("params") for g in groups if isinstance(g, dict) and g.get("moe")]
    return sum(len(numbers) for numbers in numbered if isinstance(numbers, list))


def _candidates(
    module: Mapping[str, TensorRef], copies: Mapping[str, State], buffer_names: set[str]
) -> dict[str, State]:
    """Return the tensors that may be parameters, each tied one once, in the order of the module."""
    seen: set[tuple[object, ...]] = set()
    result = {}
    for name, state in copies.items():
        ref = module.get(name)
        if ref is not None and ref.numel:
            place = (ref.storage.key, ref.offset, ref.shape, ref.stride)
            if place in seen:
                continue
            seen.add(place)
        if name not in buffer_names:
            result[name] = state
    return result


def _read_optimizer(
    file: RankFile,
    candidates: Mapping[str, State],
    experts: Mapping[str, State],
    module: Mapping[str, TensorRef],
    recorded: Sequence[list[str]],
    report: Report,
    order: Sequence[str] = (),
) -> Partitions:
    """Read the optimizer of one file.

    Args:
        file: The file.
        candidates: The tensors that may be parameters.
        experts: The experts of a mixture.
        module: The state dict.
        recorded: The names of each group, if recorded.
        report: Takes findings.
        order: The names of all groups in the order of an optimizer, if known.
    """
    optimizer = _parse(file)
    if isinstance(optimizer, str):
        return Partitions(remarks=(optimizer,))
    names, assumed = _names_of_groups(optimizer, candidates, experts, module, recorded, order)
    known = {**candidates, **experts}
    states: dict[str, Mapping[str, State]] = {}
    numbers: dict[str, Mapping[str, ScalarState]] = {}
    groups = []
    odd: list[str] = []
    for g, (group, members) in enumerate(zip(optimizer.groups, names, strict=True)):
        if optimizer.flat is not None:
            items = _items(optimizer.states, g)
            found = _flat_states(file, items, optimizer.flat[g], members or [], known)
        else:
            found = _listed_states(file, optimizer, g, members or [], known)
        states |= found.states
        numbers |= found.numbers
        odd += [f"group {g}: {key}" for key in ([UNASSIGNED] if members is None else []) + found.odd]
        fields = Fields(file.path, f"{optimizer.base.place} > param_groups[{g}]", group)
        groups.append(read_group([file], [fields], tuple(members or ()), found.scalars, f"group {g}", report))
    unassigned = None in names
    return Partitions(
        states=states,
        numbers=numbers,
        groups=tuple(groups),
        nonpartitionable=(*dict.fromkeys(odd), *states_of_no_parameter([optimizer.base]).nonpartitionable),
        unassigned=unassigned,
        guessed=frozenset(_guessed(optimizer, names, known, recorded)),
        remarks=(
            *([SEVERAL_ORDERS] if unassigned else []),
            *([ORDER] if assumed and not experts and _share_shapes(names, known) else []),
            *_compression(optimizer),
        ),
    )


def _share_shapes(names: Sequence[list[str] | None], known: Mapping[str, State]) -> bool:
    """Return whether some of the named parameters have the same shape."""
    shapes = [known[name].shape for members in names for name in members or ()]
    return len({*shapes}) < len(shapes)


def _compression(optimizer: _Optimizer) -> list[str]:
    kinds = {key for states in optimizer.states.values.values() if isinstance(states, dict) for key in states}
    return [remark for key, remark in COMPRESSION.items() if key in kinds]


def _parse(file: RankFile) -> _Optimizer | str:
    """Check the form of a file's optimizer.

    Returns:
        The optimizer, or a remark on why it cannot be read.

    Raises:
        LayoutError: Its parts contradict each other.
    """
    if file.fields.values.get("optimizer") is None:
        return "no states of an optimizer: none were saved, or the files that contained them are missing"
    optimizer = file.fields.child("optimizer")
    base = optimizer.child("optimizer_state_dict") if "optimizer_state_dict" in optimizer else optimizer
    if "param_groups" not in base:
        return "the optimizer's state has an unknown form"
    groups = base.get("param_groups", list)
    for g, group in enumerate(groups):
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            raise base.error("param_groups", f"lacks the parameters of group {g}")
        if not all(isinstance(n, int) for n in group["params"]):
            raise base.error("param_groups", f"does not number the parameters of group {g} by integers")
    flat = optimizer.tensors("fp32_groups_flat") if "fp32_groups_flat" in optimizer else None
    masters = optimizer.get("fp32_groups", list) if "fp32_groups" in optimizer else None
    for key, tensors in (("fp32_groups_flat", flat), ("fp32_groups", masters)):
        if tensors is not None and len(tensors) != len(groups):
            raise optimizer.error(key, f"does not fit {len(groups)} groups")
    if masters is not None and not all(isinstance(m, list | tuple) for m in masters):
        raise optimizer.error("fp32_groups", "is not a list of lists")
    return _Optimizer(optimizer, base, base.child("state"), groups, flat, masters)


def _names_of_groups(
    optimizer: _Optimizer,
    candidates: Mapping[str, State],
    experts: Mapping[str, State],
    module: Mapping[str, TensorRef],
    recorded: Sequence[list[str]],
    order: Sequence[str],
) -> tuple[list[list[str] | None], bool]:
    """Return the parameter names of every group, and whether they rely on the order of the model.

    The names of a group are None if they are unknown. A given order comes before the order of the model.
    """
    if _fit_recorded(recorded, optimizer.groups, optimizer.flat, candidates):
        return [*recorded], False
    if optimizer.flat is not None:
        in_storage = [_in_storage(module, flat, candidates) for flat in optimizer.flat]
        cut = _cut_flat(order, optimizer.flat, candidates) if None in in_storage else None
        return in_storage if cut is None else [*cut], False
    possible = {state.shape for state in (*candidates.values(), *experts.values())}
    shapes = [
        _shapes(optimizer.states, group["params"], optimizer.masters[g] if optimizer.masters else None, possible)
        for g, group in enumerate(optimizer.groups)
    ]
    if order and (cut := _cut(order, shapes, {**candidates, **experts})) is not None:
        return [*cut], False
    found = _match(optimizer.groups, shapes, candidates, experts)
    return [None for _ in optimizer.groups] if found is None else [*found], True


def _cut(
    order: Sequence[str], shapes: Sequence[Sequence[tuple[int, ...] | None]], known: Mapping[str, State]
) -> list[list[str]] | None:
    """Return the names of each group, in a given order of all; None if they are of other shapes."""
    rest = iter(order)
    found = [[*islice(rest, len(own))] for own in shapes]
    of_names = [known[name].shape if name in known else () for name in order]
    of_file = [*chain.from_iterable(shapes)]
    fits = len(of_names) == len(of_file) and all(b in {None, a} for a, b in zip(of_names, of_file, strict=True))
    return found if fits else None


def _cut_flat(order: Sequence[str], flat: Sequence[TensorRef], known: Mapping[str, State]) -> list[list[str]] | None:
    """Return the names of each flat master, in a given order of all; None if a master does not end with a parameter."""
    sizes = (math.prod(known[name].shape) if name in known else 0 for name in order)
    ends = {end: place for place, end in enumerate(accumulate(sizes, initial=0))}
    borders = [*accumulate((one.numel for one in flat), initial=0)]
    if not order or not ends.keys() >= {*borders} or ends[borders[-1]] != len(order):
        return None
    return [[*order[ends[first] : ends[last]]] for first, last in pairwise(borders)]


def _guessed(
    optimizer: _Optimizer,
    names: Sequence[list[str] | None],
    known: Mapping[str, State],
    recorded: Sequence[list[str]],
) -> Iterator[str]:
    """Yield the parameters whose master may belong to another one of the same shape: a group may have any order."""
    if optimizer.masters is None or names == recorded:
        return
    shapes = Counter(state.shape for state in known.values())
    yield from (name for members in names for name in members or () if shapes[known[name].shape] > 1)


def _fit_recorded(
    recorded: Sequence[list[str]],
    groups: Sequence[Mapping[str, Any]],
    flat: Sequence[TensorRef] | None,
    candidates: Mapping[str, State],
) -> bool:
    """Return whether recorded names match the optimizer's numbers in count, and flat masters in elements."""
    if not recorded or len(recorded) != len(groups):
        return False
    if flat is not None:
        sizes = [sum(math.prod(candidates[n].shape) for n in names) for names in recorded]
        return sizes == [f.numel for f in flat]
    return [len(names) for names in recorded] == [len(group["params"]) for group in groups]


def _match(
    groups: Sequence[Mapping[str, Any]],
    shapes: Sequence[Sequence[tuple[int, ...] | None]],
    candidates: Mapping[str, State],
    experts: Mapping[str, State],
) -> list[list[str]] | None:
    """Return the parameter names of every group; None if the shapes are ambiguous."""
    result: list[list[str]] = [[] for _ in groups]
    for moe, pool in ((False, candidates), (True, experts)):
        own = [
            (g, run)
            for g, group in enumerate(groups)
            if bool(group.get("moe")) == moe
            for run in (_runs(shapes[g]) if group.get("use_muon") else [shapes[g]])
        ]
        found = match_names({name: s.shape for name, s in pool.items()}, [run for _, run in own])
        if found is None:
            return None
        for (g, _), names in zip(own, found, strict=True):
            result[g] += names
    return result


def _runs(shapes: Sequence[tuple[int, ...] | None]) -> list[list[tuple[int, ...] | None]]:
    """Split the shapes of a group of Muon into runs of equal ones: only such parameters are in the order of the module.

    Source: DeepSpeed 0.19, runtime/zero/muon/original_muon.py (``MuonWithAuxAdam``), which sorts each group by size.
    """
    return [[*run] for _, run in groupby(shapes)]


def _shapes(
    states: Fields, numbers: Sequence[object], masters: Sequence[object] | None, possible: Container[tuple[int, ...]]
) -> list[tuple[int, ...] | None]:
    """Return the shape of each parameter of a group, from its master or moments; None if unknown or if they differ.

    Args:
        states: The optimizer's states by number.
        numbers: Those of the group's parameters.
        masters: Their masters, if any.
        possible: Shapes of parameters; states of other shapes give no information.
    """
    result: list[tuple[int, ...] | None] = []
    for i, number in enumerate(numbers):
        state = states.values.get(number, {})
        if masters:
            tensors = [*masters[i : i + 1]]
        else:
            tensors = [v for k, v in state.items() if not OTHER_SHAPE.search(str(k))] if isinstance(state, dict) else []
        refs = [tensor for tensor in tensors if isinstance(tensor, TensorRef)]
        # A step has one element, like the moments of such a parameter.
        shapes = {ref.shape for ref in refs if ref.numel > 1} or {ref.shape for ref in refs}
        shape = shapes.pop() if len(shapes) == 1 else None
        result.append(shape if masters or shape in possible else None)
    return result


def _in_storage(module: Mapping[str, TensorRef], flat: TensorRef, candidates: Mapping[str, State]) -> list[str] | None:
    """Return the parameters that are views of one flat storage, in its order.

    The fused optimizer puts the 16-bit copies of each group into one storage, like the masters.
    """
    storages: dict[str, list[str]] = {}
    for name in candidates:
        if name in module and module[name].storage.numel == flat.numel:
            storages.setdefault(module[name].storage.key, []).append(name)
    full = [
        sorted(names, key=lambda n: module[n].offset)
        for names in storages.values()
        if sum(module[n].numel for n in names) == flat.numel
    ]
    return full[0] if len(full) == 1 else None


def _flat_states(
    file: RankFile, items: Sequence[tuple[str, Any]], flat: TensorRef, names: Sequence[str], known: Mapping[str, State]
) -> _GroupStates:
    """Split the flat buffers of a group at the borders of its parameters."""
    tensors = {MASTER: flat}
    scalars: dict[str, ScalarState] = {}
    odd = []
    for key, value in items:
        number = file.scalar(value)
        if number is not None:
            scalars[key] = number
        elif isinstance(value, TensorRef) and value.shape == flat.shape and key not in {MASTER, MODULE}:
            tensors[key] = value
        elif (single := file.single(value)) is not None:
            scalars[key] = single
        elif value is not None:
            odd.append(key)
    states = {}
    first = 0
    for name in names:
        shape = known[name].shape
        numel = math.prod(shape)
        states[name] = {
            key: State(
                shape, t.dtype, Contiguous(numel, file.file_index, file.torch.locate(t).start + first * _width(t))
            )
            for key, t in tensors.items()
        }
        first += numel
    return _GroupStates(states, scalars, odd)


def _listed_states(
    file: RankFile, optimizer: _Optimizer, group: int, names: Sequence[str], known: Mapping[str, State]
) -> _GroupStates:
    """Read the states of a group with separate tensors for each parameter.

    FusedAdam and FusedLion keep a step in the group too, and count in the last parameter that they update: the largest
    step counts for all. Other optimizers count the steps of each parameter that had a gradient.

    Source: DeepSpeed 0.19.8, ops/adam/fused_adam.py and ops/lion/fused_lion.py (``step``).
    """
    numbers = optimizer.groups[group]["params"]
    masters = optimizer.masters[group] if optimizer.masters else [None] * len(names)
    if names and len(masters) != len(names):
        raise optimizer.fields.error("fp32_groups", f"does not fit the {len(names)} parameters of group {group}")
    states = {}
    numbers_of: dict[str, dict[str, ScalarState]] = {}
    odd: list[str] = []
    for name, number, master in zip(names, numbers, masters, strict=False):
        weights = known[name] if master is None else _whole(file, master)
        own, own_scalars, own_odd = _states_of(file, _items(optimizer.states, number), weights.shape)
        numbers_of[name] = own_scalars
        states[name] = {MASTER: weights, **own}
        odd += own_odd
    if STEP in optimizer.groups[group]:
        steps = [own[STEP] for own in numbers_of.values() if STEP in own]
        last = max(steps, key=lambda step: step.value, default=None)
        numbers_of = {name: {**own, STEP: last} for name, own in numbers_of.items()} if last else numbers_of
    shared, uneven = split_numbers(numbers_of, {name: {*own, *states[name]} for name, own in numbers_of.items()})
    return _GroupStates(states, shared, odd, uneven)


def _states_of(
    file: RankFile, items: Sequence[tuple[str, Any]], shape: tuple[int, ...]
) -> tuple[dict[str, State], dict[str, ScalarState], list[str]]:
    """Sort the optimizer's states of one parameter by form.

    1-bit Adam, for example, keeps compression errors that are padded for the number of ranks.

    Source: DeepSpeed 0.3.16 to 0.19.6, runtime/fp16/onebit/adam.py (``worker_error``, ``server_error``).

    Returns:
        States of the parameter's shape; numbers; names of all others.
    """
    states: dict[str, State] = {}
    scalars: dict[str, ScalarState] = {}
    odd: list[str] = []
    for key, value in items:
        if isinstance(value, TensorRef) and value.shape == shape and key not in {MASTER, MODULE, STEP}:
            states[key] = whole_tensor(file.torch, file.file_index, value)
        elif (scalar := file.scalar(value) or file.single(value)) is not None:
            scalars[key] = scalar
        elif value is not None:
            odd.append(key)
    return states, scalars, odd


def _items(states: Fields, number: object) -> list[tuple[str, Any]]:
    value = states.values.get(number, {})
    if not isinstance(value, dict):
        raise states.error(number, "is not a mapping")
    return [(k, v) for k, v in value.items() if isinstance(k, str)]


def _whole(file: RankFile, value: object) -> State:
    if not isinstance(value, TensorRef):
        raise LayoutError(file.path, "its fp32_groups hold a value that is not a tensor", RESTORE)
    return whole_tensor(file.torch, file.file_index, value)


def _width(ref: TensorRef) -> int:
    return ref.storage.nbytes // ref.storage.numel if ref.storage.numel else 1
