"""The layout without ZeRO: whole tensors in one file, and an optimizer that numbers its parameters.

Source: DeepSpeed 0.19, runtime/engine.py (``_save_checkpoint``), runtime/fp16/unfused_optimizer.py and
runtime/fp16/fused_optimizer.py (``state_dict``).
"""

from __future__ import annotations

import math
import posixpath
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.containers.values import TensorRef
from ckpttool.errors import LayoutError
from ckpttool.formats.fields import Fields
from ckpttool.formats.reports import RESTORE
from ckpttool.formats.torch_tensors import whole_tensor
from ckpttool.formats.zero.experts import global_names, local_names
from ckpttool.formats.zero.matching import match_names
from ckpttool.formats.zero.partitions import Partitions, read_group
from ckpttool.model import MASTER, MODULE, ScalarState, State, one_extent

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from ckpttool.formats.reports import Report
    from ckpttool.formats.zero.rank_files import RankFile, ZeroFiles

UNASSIGNED = "optimizer"
"""What ``unsliceable`` calls an optimizer whose parameters cannot be told."""


def read_partitions(
    files: ZeroFiles,
    module: Mapping[str, TensorRef],
    copies: Mapping[str, State],
    experts: Mapping[str, State],
    buffer_names: set[str],
    remarks: list[str],
    report: Report,
) -> Partitions:
    """Join the optimizer's numbered states with the names of the module.

    The optimizer has no names, only shapes in the order of its groups; each group lists its parameters in the order of
    the module. Often that leaves one possibility. Where it leaves several, the states stay unassigned.

    Args:
        files: The files.
        module: The state dict.
        copies: The same, as states.
        experts: The experts of a mixture, as states.
        buffer_names: Names that are no parameters.
        remarks: Takes what a user should know.
        report: Takes findings.
    """
    result = Partitions()
    candidates = _candidates(module, copies, buffer_names)
    if not files.expert_optimizer:
        recorded = [[n for n in names if n in candidates] for names in files.recorded]
        _join(files.model[0], candidates, {}, module, recorded, result, remarks, report)
        return result
    # Each expert-parallel rank saves its own experts and, over and over, what all of them share.
    parallel = len(files.expert_optimizer)
    _check_experts_are_there(files, experts)
    for rank, file in enumerate(files.expert_optimizer):
        own = local_names(experts, rank, parallel)
        part = Partitions()
        _join(file, candidates, {n: experts[g] for n, g in own.items()}, module, (), part, remarks, report)
        renamed = global_names(part.states, rank)
        for name, states in part.states.items():
            result.states.setdefault(renamed.get(name, name), states)
        for g, group in enumerate(part.groups):
            names = tuple(renamed.get(n, n) for n in group.parameters)
            if rank == 0:
                result.groups.append(replace(group, parameters=names))
            else:
                joined = dict.fromkeys((*result.groups[g].parameters, *names))
                result.groups[g] = replace(result.groups[g], parameters=tuple(joined))
        result.unassigned |= part.unassigned
        result.unsliceable.extend(u for u in part.unsliceable if u not in result.unsliceable)
    return result


def _check_experts_are_there(files: ZeroFiles, experts: Mapping[str, State]) -> None:
    """Each expert-parallel rank holds an equal share of the experts; the last ranks may be missing."""
    held = _expert_parameters(files.expert_optimizer[0])
    ranks = len(files.expert_optimizer)
    if held and len(experts) % held == 0 and len(experts) // held > ranks:
        path = files.expert_optimizer[-1].path
        name = f"expp_rank_{ranks}_mp_rank_{files.model_rank:02d}_optim_states.pt"
        problem = f"is missing (experts are shared by {len(experts) // held} ranks)"
        raise LayoutError(posixpath.join(posixpath.dirname(path), name), problem, RESTORE)


def _expert_parameters(file: RankFile) -> int:
    """Experts' parameters that the optimizer of one rank numbers."""
    optimizer = file.fields.optional("optimizer", dict) or {}
    inner = optimizer.get("optimizer_state_dict", optimizer)
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    groups = groups if isinstance(groups, list) else []
    numbered = [g.get("params") for g in groups if isinstance(g, dict) and g.get("moe")]
    return sum(len(numbers) for numbers in numbered if isinstance(numbers, list))


def _candidates(
    module: Mapping[str, TensorRef], copies: Mapping[str, State], buffer_names: set[str]
) -> dict[str, State]:
    """What may be a parameter, each tied one once, in the order of the module."""
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


def _join(
    file: RankFile,
    candidates: Mapping[str, State],
    experts: Mapping[str, State],
    module: Mapping[str, TensorRef],
    recorded: Sequence[list[str]],
    result: Partitions,
    remarks: list[str],
    report: Report,
) -> None:
    """Read the optimizer of one file into ``result``.

    Args:
        file: The file.
        candidates: What may be a parameter.
        experts: The experts of a mixture.
        module: The state dict.
        recorded: The names of each group, if they are known.
        result: Takes what is found.
        remarks: Takes what a user should know.
        report: Takes findings.
    """
    if file.fields.values.get("optimizer") is None:
        remarks.append("the optimizer was not saved")
        return
    optimizer = file.fields.child("optimizer")
    base = optimizer.child("optimizer_state_dict") if "optimizer_state_dict" in optimizer else optimizer
    if "param_groups" not in base:
        remarks.append("the optimizer's state is of no known form")
        return
    groups = base.get("param_groups", list)
    for g, group in enumerate(groups):
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            raise base.error("param_groups", f"lacks the parameters of group {g}")
        if not all(isinstance(n, int) for n in group["params"]):
            raise base.error("param_groups", f"numbers the parameters of group {g} otherwise")
    flat = optimizer.tensors("fp32_groups_flat") if "fp32_groups_flat" in optimizer else None
    masters = optimizer.get("fp32_groups", list) if "fp32_groups" in optimizer else None
    for key, held in (("fp32_groups_flat", flat), ("fp32_groups", masters)):
        if held is not None and len(held) != len(groups):
            raise optimizer.error(key, f"does not fit {len(groups)} groups")
    if masters is not None and not all(isinstance(m, list | tuple) for m in masters):
        raise optimizer.error("fp32_groups", "is not a list of lists")
    states = base.child("state")
    names: list[list[str] | None]
    if _fit_recorded(recorded, groups, flat, candidates):
        names = [*recorded]
    elif flat is not None:
        names = [_in_storage(module, f, candidates) for f in flat]
    else:
        possible = {state.shape for state in (*candidates.values(), *experts.values())}
        shapes = [
            _shapes(states, group["params"], masters[g] if masters else None, possible)
            for g, group in enumerate(groups)
        ]
        found = _match(groups, shapes, candidates, experts)
        names = [None for _ in groups] if found is None else [*found]
    known = {**candidates, **experts}
    for g, group in enumerate(groups):
        members = names[g] if g < len(names) else None
        if members is None:
            result.unsliceable.append(f"group {g}: {UNASSIGNED}")
            members = []
        scalars: dict[str, ScalarState] = {}
        if flat is not None:
            _add_flat(file, states, g, flat[g], members, known, result, scalars)
        else:
            own = masters[g] if masters else [None] * len(members)
            if members and len(own) != len(members):
                raise optimizer.error("fp32_groups", f"does not fit the {len(members)} parameters of group {g}")
            for name, number, master in zip(members, group["params"], own, strict=False):
                weights = known[name] if master is None else _whole(file, master)
                odd: list[str] = []
                own_states = _states_of(file, states, number, weights.shape, scalars, odd)
                result.states[name] = {MASTER: weights, **own_states}
                named = (f"group {g}: {key}" for key in odd)
                result.unsliceable.extend(u for u in named if u not in result.unsliceable)
        fields = Fields(base.path, f"{base.place} > param_groups[{g}]", group)
        result.groups.append(read_group([file], [fields], tuple(members), scalars, f"group {g}", report))
    if None in names:
        result.unassigned = True
        remarks.append(
            "the optimizer numbers its parameters, and several orders of names would fit; weights are the model's own"
        )


def _fit_recorded(
    recorded: Sequence[list[str]], groups: Sequence[Mapping[str, Any]], flat: Sequence[TensorRef] | None,
    candidates: Mapping[str, State],
) -> bool:  # fmt: skip
    """Whether recorded names are as many as the optimizer's numbers; of flat masters, as many elements."""
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
    """Names of the parameters of every group; None if the shapes do not tell."""
    result: list[list[str]] = [[] for _ in groups]
    for moe, pool in ((False, candidates), (True, experts)):
        own = [g for g, group in enumerate(groups) if bool(group.get("moe")) == moe]
        found = match_names({name: s.shape for name, s in pool.items()}, [shapes[g] for g in own])
        if found is None:
            return None
        for g, names in zip(own, found, strict=True):
            result[g] = names
    return result


def _shapes(
    states: Fields, numbers: Sequence[object], masters: Sequence[object] | None, possible: Container[tuple[int, ...]]
) -> list[tuple[int, ...] | None]:
    """The shape of each parameter of a group, as its master or its moments have it; None where nothing tells.

    Args:
        states: The optimizer's states by number.
        numbers: Those of the group's parameters.
        masters: Their masters, if there are any.
        possible: Shapes that parameters have; states of other shapes tell nothing.
    """
    result: list[tuple[int, ...] | None] = []
    for i, number in enumerate(numbers):
        state = states.values.get(number, {})
        tensors = [*(masters[i : i + 1] if masters else state.values() if isinstance(state, dict) else ())]
        # A step is 0-dim like a scalar parameter's moments, so that the largest shape is the parameter's.
        shapes = [t.shape for t in tensors if isinstance(t, TensorRef) and (masters or t.shape in possible)]
        result.append(max(shapes, key=len) if shapes else None)
    return result


def _in_storage(module: Mapping[str, TensorRef], flat: TensorRef, candidates: Mapping[str, State]) -> list[str] | None:
    """The parameters that are views of one flat storage, in its order.

    The fused optimizer lays each group's 16-bit copies into one, as it does with the masters.
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


def _add_flat(
    file: RankFile,
    states: Fields,
    group: int,
    flat: TensorRef,
    names: Sequence[str],
    known: Mapping[str, State],
    result: Partitions,
    scalars: dict[str, ScalarState],
) -> None:
    """Cut a group's flat buffers at the borders of its parameters."""
    tensors = {MASTER: flat}
    for key, value in _items(states, group):
        number = file.scalar(value)
        if number is not None:
            scalars[key] = number
        elif isinstance(value, TensorRef) and value.shape == flat.shape and key not in {MASTER, MODULE}:
            tensors[key] = value
        elif (single := file.single(value)) is not None:
            scalars[key] = single
        elif value is not None:
            result.unsliceable.append(f"group {group}: {key}")
    at = 0
    for name in names:
        shape = known[name].shape
        result.states[name] = {
            key: State(
                shape, t.dtype, one_extent(math.prod(shape), file.index, file.torch.locate(t).start + at * _width(t))
            )
            for key, t in tensors.items()
        }
        at += math.prod(shape)


def _states_of(
    file: RankFile,
    states: Fields,
    number: object,
    shape: tuple[int, ...],
    scalars: dict[str, ScalarState],
    odd: list[str],
) -> dict[str, State]:
    """The optimizer's states of one parameter; numbers go to ``scalars``, names of all others to ``odd``.

    1-bit Adam, for one, keeps errors of the compression that are padded for the number of ranks.

    Source: DeepSpeed 0.3.16 to 0.19.6, runtime/fp16/onebit/adam.py (``worker_error``, ``server_error``).
    """
    result: dict[str, State] = {}
    for key, value in _items(states, number):
        if isinstance(value, TensorRef) and value.shape == shape and key not in {MASTER, MODULE, "step"}:
            result[key] = whole_tensor(file.torch, file.index, value)
        elif (scalar := file.scalar(value) or file.single(value)) is not None:
            expected = scalars.setdefault(key, scalar)
            if expected != scalar:
                problem = f"has parameters of one group at {key} {expected.value} and {scalar.value}"
                raise LayoutError(file.path, problem, RESTORE)
        elif value is not None:
            odd.append(key)
    return result


def _items(states: Fields, number: object) -> list[tuple[str, Any]]:
    value = states.values.get(number, {})
    if not isinstance(value, dict):
        raise states.error(number, "is not a mapping")
    return [(k, v) for k, v in value.items() if isinstance(k, str)]


def _whole(file: RankFile, value: object) -> State:
    if not isinstance(value, TensorRef):
        raise LayoutError(file.path, "its fp32_groups hold what is no tensor", RESTORE)
    return whole_tensor(file.torch, file.index, value)


def _width(ref: TensorRef) -> int:
    return ref.storage.nbytes // ref.storage.numel if ref.storage.numel else 1
