"""The optimizer side of a ZeRO checkpoint: flat buffers split over the ranks, and the parameters' fragments in them.

Stages 1 and 2 split one flat buffer for each parameter group; stage 3 splits every parameter and puts the parts into
flat buffers, its sub-groups. ``stage12`` and ``stage3`` compute the fragments; this module does the rest.
"""

from __future__ import annotations

import posixpath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.containers.values import TensorRef
from ckpttool.dtypes import itemsize
from ckpttool.errors import LayoutError
from ckpttool.formats.fields import fingerprint
from ckpttool.formats.reports import RESTORE
from ckpttool.formats.zero.fragments import Partitioned, StoredPartitions
from ckpttool.messages import brief
from ckpttool.model import MASTER, MODULE, ParamGroup, Replica, ScalarState, State, tensor_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.formats.fields import Fields
    from ckpttool.formats.reports import Report
    from ckpttool.formats.zero.fragments import Fragments
    from ckpttool.formats.zero.rank_files import RankFile, SwappedFile, ZeroFiles


class SwappedTensor(NamedTuple):
    """A rank's partition offloaded to NVMe: raw elements in a separate file."""

    file: SwappedFile
    """The file."""
    dtype: str
    """safetensors' spelling."""
    numel: int
    """Number of elements; the file may be longer."""

    @property
    def shape(self) -> tuple[int, ...]:
        """One dimension."""
        return (self.numel,)


Stored = TensorRef | SwappedTensor
"""A rank's partition, in its optimizer file or in a separate file."""


class FlatBuffer(NamedTuple):
    """One flat buffer and its optimizer states."""

    shapes: Mapping[str, tuple[int, ...]]
    """Its parameters, in order."""
    tensors: Mapping[str, Sequence[Stored]]
    """State name to the partition of each rank."""
    scalars: Mapping[str, ScalarState]
    """Scalar states of the whole buffer."""
    odd: Mapping[str, Sequence[object]]
    """Non-partitionable states: name to the value on each rank."""


_NONE: Mapping[str, Any] = MappingProxyType({})
STEP = "step"
"""The only number of an optimizer that all parameters, ranks and parts of a model must share: others may be local."""
_OF_ALL_RANKS = frozenset({"lr", "initial_lr", "betas", "eps", "weight_decay", "momentum", "alpha", "rho", STEP})
"""Hyperparameters of every rank; some optimizers (Prodigy, D-Adaptation) keep others that each rank computes."""


class Partitions(NamedTuple):
    """The content of the optimizer files, or of some of their groups."""

    states: Mapping[str, Mapping[str, State]] = _NONE
    """Trainable parameter to its partitioned states."""
    frozen: Mapping[str, State] = _NONE
    """Frozen parameter to its 16-bit copy, if partitioned or listed; the module has the others."""
    groups: tuple[ParamGroup, ...] = ()
    """Parameter groups."""
    nonpartitionable: tuple[str, ...] = ()
    """States that cannot be assigned to parameters, as "group 0: momentum_buffer"."""
    replicas: tuple[Replica, ...] = ()
    """Pairs of states that must be equal."""
    unassigned: bool = False
    """Whether the parameters of some groups are unknown."""
    guessed: frozenset[str] = frozenset()
    """Parameters that shapes and the order of the model alone gave to a master."""
    remarks: tuple[str, ...] = ()
    """Remarks for the user."""


def merge_partitions(parts: Sequence[Partitions]) -> Partitions:
    """Merge the partitions of several groups; of a parameter in several parts, the last one counts."""
    return Partitions(
        states={name: states for part in parts for name, states in part.states.items()},
        frozen={name: state for part in parts for name, state in part.frozen.items()},
        groups=tuple(group for part in parts for group in part.groups),
        nonpartitionable=tuple(dict.fromkeys(key for part in parts for key in part.nonpartitionable)),
        replicas=tuple(twin for part in parts for twin in part.replicas),
        unassigned=any(part.unassigned for part in parts),
        guessed=frozenset().union(*(part.guessed for part in parts)),
        remarks=tuple(remark for part in parts for remark in part.remarks),
    )


def flat_state(base: Fields, index: int) -> Mapping[Any, Any]:
    """Return the optimizer states of one flat buffer, from a ``torch.optim`` state dict; empty before a step."""
    value = base.get("state", dict).get(index, {})
    if not isinstance(value, dict):
        raise base.error(f"state > {index}", "is not a mapping")
    return value


def states_of_no_parameter(bases: Sequence[Fields], count: int = 0) -> Partitions:
    """Return the optimizer states under another key than the number of a parameter: no other layout has a place.

    Source: torch 2.13, optim/optimizer.py (``state_dict``, ``load_state_dict``: both keep such keys).

    Args:
        bases: The state dicts of ``torch.optim`` of all ranks.
        count: Number of flat buffers, which are their parameters with ZeRO.
    """
    found: dict[str, None] = {}
    for base in bases:
        groups = base.values.get("param_groups")
        listed = [g.get("params") for g in groups if isinstance(g, dict)] if isinstance(groups, list) else []
        numbers = {*range(count), *(n for own in listed if isinstance(own, list) for n in own if isinstance(n, int))}
        found |= {f"state {brief(key)}": None for key in base.get("state", dict) if key not in numbers}
    return Partitions(nonpartitionable=tuple(found))


def read_flat_buffer(
    files: ZeroFiles,
    shapes: Mapping[str, tuple[int, ...]],
    masters: Sequence[Stored],
    states: Sequence[Mapping[Any, Any]],
    partition: int,
    what: str,
    report: Report,
) -> FlatBuffer:
    """Sort the optimizer's states of one flat buffer by form.

    A 1-D tensor with the length of the partition (in elastic checkpoints, of the master's partition) can be sliced; a
    number or 0-dim tensor that all ranks share belongs to the whole buffer; other values depend on the optimizer
    (Muon's matrices, 8-bit blocks, the RMS of a partition that Adafactor computes).

    Args:
        files: The checkpoint.
        shapes: The parameters in the buffer, in order.
        masters: The master partition of each rank.
        states: The optimizer states of each rank, in the form of ``torch.optim``.
        partition: Elements of each rank's partition, padding included.
        what: Name of the buffer, for errors.
        report: Takes findings.
    """
    tensors: dict[str, Sequence[Stored]] = {MASTER: masters}
    scalars: dict[str, ScalarState] = {}
    odd: dict[str, Sequence[object]] = {}
    for key in dict.fromkeys(key for state in states for key in state):
        values = [state.get(key) for state in states]
        numbers = [file.scalar(value) for file, value in zip(files.optimizer, values, strict=True)]
        if key == STEP and numbers[0] is not None:
            check_agreement(files.optimizer, f"{key} of {what}", [n and n.value for n in numbers], report)
            scalars[key] = numbers[0]
        elif key in {MASTER, MODULE} or not isinstance(key, str):
            odd[f"{key} (the optimizer's)"] = values  # ckpttool uses this name for another state
        elif all(
            isinstance(v, TensorRef | SwappedTensor) and v.shape in {(partition,), (own.numel,)}
            for v, own in zip(values, masters, strict=True)
        ):
            tensors[str(key)] = [v for v in values if isinstance(v, TensorRef | SwappedTensor)]
        elif numbers[0] is not None and _agree([n and n.value for n in numbers]):
            scalars[key] = numbers[0]
        elif (single := _single(files, values)) is not None:
            scalars[key] = single
        elif any(v is not None for v in values):
            odd[key] = values
    for key, pieces in tensors.items():
        check_agreement(files.optimizer, f"dtype of {key} of {what}", [p.dtype for p in pieces], report)
    return FlatBuffer(shapes, tensors, scalars, odd)


def _single(files: ZeroFiles, values: Sequence[object]) -> ScalarState | None:
    """Return a scalar that every rank holds as a tensor of shape (1,); None for other states, or if ranks differ.

    Source: DeepSpeed 0.19, tests/unit/checkpoint/common.py (``HybridStateOptimizer``: ``tensor_step``).
    """
    numbers = [file.single(value) for file, value in zip(files.optimizer, values, strict=True)]
    return numbers[0] if all(n == numbers[0] for n in numbers) else None


def locate_states(
    files: ZeroFiles, buffer: FlatBuffer, fragments: Mapping[str, Fragments]
) -> dict[str, dict[str, State]]:
    """Locate every state of every parameter of a flat buffer.

    Raises:
        LayoutError: A partition is shorter than its fragments.
    """
    result: dict[str, dict[str, State]] = {name: {} for name in buffer.shapes}
    for key, pieces in buffer.tensors.items():
        stored = StoredPartitions(
            pieces[0].dtype, [_place(file, p) for file, p in zip(files.optimizer, pieces, strict=True)]
        )
        for name, shape in buffer.shapes.items():
            short = fragments[name].too_short(stored)
            if short is not None:
                problem = f"its partition of {key} has {stored.numels[short]} elements, too few for {name}"
                raise LayoutError(files.optimizer[short].path, problem, RESTORE)
            result[name][key] = State(shape, stored.dtype, Partitioned(stored, fragments[name]))
    return result


def _place(file: RankFile, piece: Stored) -> tuple[int, int, int]:
    """Return the index of a partition's file, the partition's first byte in it, and its elements."""
    if isinstance(piece, SwappedTensor):
        return piece.file.file_index, 0, piece.numel
    return file.file_index, file.torch.locate(piece).start, piece.numel


def find_swapped(
    files: ZeroFiles, masters: Sequence[TensorRef], states: Sequence[Mapping[Any, Any]], partition: int
) -> tuple[list[Stored], list[Mapping[Any, Any]]]:
    """Replace empty tensors, offloaded to NVMe, by the copied swap files.

    Source: DeepSpeed 0.19, runtime/swap_tensor/optimizer_utils.py (``OptimizerStateSwapInfo``) and runtime/engine.py
    (``save_checkpoint``): the master is ``<ds_id>.tensor.swp``, another state ``<state>-<ds_id>.tensor.swp``, where
    ds_id is an attribute of the empty master.
    """
    found: list[Stored] = list(masters)
    result: list[Mapping[Any, Any]] = list(states)
    for r, (master, rank) in enumerate(zip(masters, files.swapped, strict=True) if files.swapped else ()):
        name = (master.attributes or {}).get("ds_id")
        if master.numel or not partition or name is None:
            continue
        own = _swapped(rank.get(f"{name}.tensor.swp"), master.dtype, partition)
        if own is None:
            continue
        found[r] = own
        result[r] = {key: _swapped_state(own, f"{key}-{name}", value, rank) for key, value in states[r].items()}
    return found, result


def _swapped_state(master: SwappedTensor, name: str, value: object, rank: Mapping[str, SwappedFile]) -> object:
    """Return the swap file of a state with an offloaded master, if the state is empty in the optimizer file."""
    if not isinstance(value, TensorRef) or value.numel:
        return value
    held = _swapped(rank.get(f"{name}.tensor.swp"), value.dtype, master.numel)
    if held is None:
        path = posixpath.join(posixpath.dirname(master.file.path), f"{name}.tensor.swp")
        raise LayoutError(path, "is missing (the state was offloaded to NVMe)", RESTORE)
    return held


def _swapped(file: SwappedFile | None, dtype: str, numel: int) -> SwappedTensor | None:
    if file is None:
        return None
    if file.nbytes < numel * itemsize(dtype):
        problem = f"is {file.nbytes:,} bytes long, too short for {numel:,} elements of {dtype}"
        raise LayoutError(file.path, problem, RESTORE)
    return SwappedTensor(file, dtype, numel)


def read_group(
    files: Sequence[RankFile],
    groups: Sequence[Fields],
    parameters: tuple[str, ...],
    scalars: Mapping[str, ScalarState],
    what: str,
    report: Report,
) -> ParamGroup:
    """Read a parameter group, and report hyper-parameters of all ranks that differ between ranks."""
    values = [_hyperparameters(g, f) for g, f in zip(groups, files, strict=True)]
    shared = [{k: v for k, v in own.items() if k in _OF_ALL_RANKS} for own in values]
    check_agreement(files, f"hyper-parameters of {what}", shared, report)
    return ParamGroup(parameters, values[0], scalars)


def local_hyperparameters(files: Sequence[RankFile], groups: Sequence[Fields]) -> list[str]:
    """Return the names of hyper-parameters that each rank computes: no other rank may take them over."""
    values = [_hyperparameters(g, f) for g, f in zip(groups, files, strict=True)]
    names = dict.fromkeys(name for own in values for name in own if name not in _OF_ALL_RANKS)
    return [name for name in names if not _agree([own.get(name) for own in values])]


def _hyperparameters(group: Fields, file: RankFile) -> dict[str, Any]:
    return {str(key): _plain(value, file) for key, value in group.values.items() if key != "params"}


def _plain(value: Any, file: RankFile) -> Any:
    """Replace 0-dim tensors in a hyper-parameter by numbers: torch accepts tensors for lr and betas.

    Only at the top level: a list that nests one list twice, again and again, is small in a pickle and huge if copied.
    """
    if type(value) in {list, tuple} and any(isinstance(v, TensorRef) for v in value):
        return type(value)(_number(v, file) for v in value)
    return _number(value, file)


def _number(value: Any, file: RankFile) -> Any:
    number = file.scalar(value) if isinstance(value, TensorRef) else None
    return value if number is None else tensor_number(number)


def check_same_group(file: RankFile, what: str, groups: Sequence[ParamGroup], report: Report) -> None:
    """Report a parameter group whose values differ between parts of the model."""
    for group in groups[1:]:
        shared = [{k: v for k, v in g.hyperparameters.items() if k in _OF_ALL_RANKS} for g in (group, groups[0])]
        # A part without parameters of the group has no step.
        has_step = group.parameters and groups[0].parameters
        if not _agree(shared) or (has_step and group.scalars.get(STEP) != groups[0].scalars.get(STEP)):
            problem = f"{what} is not the same in all parts of the model: two saves are mixed"
            report(LayoutError(file.path, problem, RESTORE))
            return


def check_agreement(files: Sequence[RankFile], what: str, values: Sequence[object], report: Report) -> None:
    """Report the first rank whose value differs from rank 0's."""
    if not files:
        return
    for file, value in zip(files, values, strict=True):
        if not _agree([values[0], value]):
            problem = f"{what} differs from rank 0's{_both(value, values[0])}: two saves are mixed"
            report(LayoutError(file.path, problem, RESTORE))
            return


def _agree(values: Sequence[object]) -> bool:
    """Return whether all values are the same as the first."""
    expected = fingerprint(values[0])
    return all(value is values[0] or fingerprint(value) == expected for value in values[1:])


def _both(ours: object, theirs: object) -> str:
    """Return both values as text, if they are short."""
    if all(isinstance(v, int | float | str) and len(str(v)) <= 40 for v in (ours, theirs)):
        return f" ({ours} here, {theirs} there)"
    return ""
