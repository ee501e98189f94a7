"""The optimizer side of a ZeRO checkpoint: flat buffers split over the ranks, and the parameters' fragments in them.

Stages 1 and 2 split one flat buffer for each parameter group; stage 3 splits every parameter and puts the parts into
flat buffers, its sub-groups. ``stage12`` and ``stage3`` compute the fragments; this module does the rest.

Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py (``_round_robin_reorder``).
"""

from __future__ import annotations

import posixpath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.containers.values import TensorRef
from ckpttool.dtypes import itemsize
from ckpttool.errors import LayoutError
from ckpttool.formats.fields import RESTORE, fingerprint
from ckpttool.messages import brief
from ckpttool.model import MASTER, MODULE, ParamGroup, Replica, ScalarState, State, tensor_number
from ckpttool.model.places import Place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ckpttool.formats.fields import Fields, Report
    from ckpttool.formats.zero.files import RankFile, SwappedFile, ZeroFiles


def round_robin(names: Sequence[str], ranks: int) -> list[str]:
    """Return the order of a flat buffer: every ``ranks``-th parameter, ``ranks`` times."""
    return [name for j in range(ranks) for name in names[j::ranks]]


def undo_round_robin(stored: Sequence[str], ranks: int) -> list[str]:
    """Convert the order of a flat buffer to the optimizer's order."""
    order = round_robin([str(i) for i in range(len(stored))], ranks)
    result = [""] * len(stored)
    for name, place in zip(stored, order, strict=True):
        result[int(place)] = name
    return result


MAX_STATES = 200_000
"""Maximum number of positions to examine."""


def match_names(
    names: Mapping[str, tuple[int, ...]], groups: Sequence[Sequence[tuple[int, ...] | None]]
) -> list[list[str]] | None:
    """Assign names to groups so that shapes match and every group keeps the order of the names.

    Names may be left over (frozen parameters); every place gets a name.

    Args:
        names: Name to shape, in order.
        groups: The shape of each place of each group, in order; None fits anything.

    Returns:
        Names of each group; None without an assignment, or with more than one.
    """
    ordered = list(names.items())
    spare = len(ordered) - sum(map(len, groups))
    if spare < 0:
        return None
    # Backwards: number of ways (0, 1, more) to fill the groups from these places on with the names from i on.
    ways: dict[tuple[int, ...], int] = {tuple(map(len, groups)): 1}
    steps: list[dict[tuple[int, ...], int]] = [ways]
    looked_at = 0
    for i in range(len(ordered) - 1, -1, -1):
        shape = ordered[i][1]
        before: dict[tuple[int, ...], int] = {}
        left = len(ordered) - i
        for places, count in ways.items():
            options = [places] if left - _filled(places, groups) <= spare else []
            for g, at in enumerate(places):
                if at and _fits(groups[g][at - 1], shape):
                    options.append((*places[:g], at - 1, *places[g + 1 :]))
            for option in options:
                before[option] = min(2, before.get(option, 0) + count)
        looked_at += len(before)
        if looked_at > MAX_STATES:
            return None
        ways = before
        steps.append(ways)
    start = (0,) * len(groups)
    if ways.get(start) != 1:
        return None
    result: list[list[str]] = [[] for _ in groups]
    places = start
    for (name, shape), after in zip(ordered, reversed(steps[:-1]), strict=True):
        for g, at in enumerate(places):
            moved = (*places[:g], at + 1, *places[g + 1 :])
            if at < len(groups[g]) and _fits(groups[g][at], shape) and after.get(moved):
                result[g].append(name)
                places = moved
                break
    return result


def _filled(places: tuple[int, ...], groups: Sequence[Sequence[object]]) -> int:
    """Return the number of places that remain for the later names."""
    return sum(len(group) - at for group, at in zip(groups, places, strict=True))


def _fits(place: tuple[int, ...] | None, shape: tuple[int, ...]) -> bool:
    return place is None or place == shape


class BufferSlice(NamedTuple):
    """Elements of a flat buffer that is cut into equal partitions (stages 1 and 2)."""

    numel: int
    """Elements of the parameter."""
    offset: int
    """First element in the flat buffer."""
    end: int
    """First element of the next parameter, or the end of the buffer."""
    partition: int
    """Elements of each partition, padding included."""

    @property
    def ranks(self) -> range:
        """Ranks whose partition contains some of the elements."""
        if not self.numel:
            return range(0)
        return range(self.offset // self.partition, (self.offset + self.numel - 1) // self.partition + 1)

    def numel_on(self, rank: int) -> int:
        """Return the number of elements in the partition of a rank."""
        begin = rank * self.partition
        return max(0, min(begin + self.partition, self.offset + self.numel) - max(begin, self.offset))

    def columns(self) -> tuple[NDArray[np.int64], ...]:
        """Cut the parameter at the borders of the partitions; one row for each fragment, in ascending start.

        Returns:
            First element, in elements of the flattened parameter; elements; data-parallel rank of the partition; first
            element, counted from the start of the rank's partition; elements of padding after the fragment.
        """
        import numpy as np

        rank = np.arange(self.ranks.start, self.ranks.stop, dtype=np.int64)
        begin = np.maximum(rank * self.partition, self.offset)
        numel = np.minimum((rank + 1) * self.partition, self.offset + self.numel) - begin
        padding = np.zeros_like(rank)
        padding[-1:] = min(self.end, self.ranks.stop * self.partition) - (self.offset + self.numel)
        return begin - self.offset, numel, rank, begin - rank * self.partition, padding

    def too_short(self, partitions: StoredPartitions) -> int | None:
        """Return the first rank whose partition ends before its fragment; None if there is none."""
        end = self.offset + self.numel
        return next(
            (r for r in self.ranks if partitions.numels[r] < min(end - r * self.partition, self.partition)), None
        )


class EqualParts(NamedTuple):
    """A parameter that is cut into one part per rank, of ceil(numel / ranks) elements; the last ones are padded."""

    numel: int
    """Elements of the parameter."""
    ranks: int
    """Number of ranks."""
    position: int
    """First element of each part, counted from the start of the rank's partition."""

    @property
    def part(self) -> int:
        """Elements of each part, padding included."""
        return -(-self.numel // self.ranks)

    def columns(self) -> tuple[NDArray[np.int64], ...]:
        """Cut the parameter into its parts; see ``BufferSlice.columns``."""
        import numpy as np

        rank = np.arange(self.ranks, dtype=np.int64)
        numel = np.clip(self.numel - rank * self.part, 0, self.part)
        start = np.minimum(rank * self.part, self.numel)
        return start, numel, rank, np.full_like(rank, self.position), self.part - numel

    def too_short(self, partitions: StoredPartitions) -> int | None:
        """Return the first rank whose partition ends before its part; None if there is none."""
        if partitions.shortest >= self.position + self.part:
            return None
        left = ((r, max(0, min(self.part, self.numel - r * self.part))) for r in range(self.ranks))
        return next((r for r, numel in left if partitions.numels[r] < self.position + numel), None)


Fragments = BufferSlice | EqualParts
"""The elements of one parameter in the partitions of a flat buffer."""


class StoredPartitions:
    """One state of a flat buffer: the place of each rank's partition.

    Args:
        dtype: Type of the elements.
        places: Index of the file, first byte in it, and number of stored elements, for each rank.
    """

    __slots__ = ("_checked", "dtype", "files", "numels", "offsets", "shortest")

    def __init__(self, dtype: str, places: Sequence[tuple[int, int, int]]) -> None:
        self.dtype = dtype
        self.files, self.offsets, self.numels = (tuple(column) for column in zip(*places, strict=True))
        self.shortest = min(self.numels)
        """Elements of the shortest partition."""
        self._checked: tuple[Sequence[int], bool] = ((), False)

    def __reduce__(self) -> tuple[type[StoredPartitions], tuple[str, list[tuple[int, int, int]]]]:
        return type(self), (self.dtype, [*zip(self.files, self.offsets, self.numels, strict=True)])

    def inside(self, sizes: Sequence[int]) -> bool:
        """Return whether each partition ends inside its file; cache the answer, because each parameter needs it.

        Args:
            sizes: Bytes of each file.
        """
        if self._checked[0] is not sizes:
            width = itemsize(self.dtype)
            places = zip(self.files, self.offsets, self.numels, strict=True)
            self._checked = sizes, all(offset + numel * width <= sizes[file] for file, offset, numel in places)
        return self._checked[1]


class Partitioned(Place):
    """One state of a parameter: its fragments in the partitions of a flat buffer.

    Args:
        partitions: The partitions of the state.
        fragments: The fragments, each no longer than its partition: ``too_short`` is None.
    """

    __slots__ = ("_fragments", "_partitions", "_rows")

    def __init__(self, partitions: StoredPartitions, fragments: Fragments) -> None:
        self._partitions = partitions
        self._fragments = fragments
        self._rows: NDArray[np.void] | None = None

    def __reduce__(self) -> tuple[type[Partitioned], tuple[StoredPartitions, Fragments]]:
        return type(self), (self._partitions, self._fragments)  # rows are larger, and quick to compute again

    @property
    def rows(self) -> NDArray[np.void]:
        """One row for each fragment."""
        if self._rows is None:
            self._rows = self._table()
        return self._rows

    def _table(self) -> NDArray[np.void]:
        import numpy as np

        from ckpttool.model.extents import blank_rows

        start, numel, rank, position, padding = self._fragments.columns()
        first, last = (int(rank[0]), int(rank[-1]) + 1) if len(rank) else (0, 0)
        stored = self._partitions
        file, offset, held = (
            np.array(column[first:last], dtype=np.int64) for column in (stored.files, stored.offsets, stored.numels)
        )
        table = blank_rows(len(rank))
        table["start"], table["numel"], table["file"] = start, numel, file
        table["offset"] = offset + position * itemsize(stored.dtype)
        # Stages 1 and 2 save masters without the padding at the end, and moments with it.
        table["padding"] = np.minimum(padding, held - (position + numel))
        table.flags.writeable = False
        return table

    def sound(self, numel: int, dtype: str, sizes: Sequence[int]) -> bool:
        """Return whether the fragments are of such a tensor, and the partitions inside their files."""
        stored = self._partitions
        return numel == self._fragments.numel and dtype == stored.dtype and stored.inside(sizes)


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
    numbers: Mapping[str, Mapping[str, ScalarState]] = _NONE
    """Trainable parameter to its numbers that differ within its group."""
    groups: tuple[ParamGroup, ...] = ()
    """Parameter groups."""
    nonpartitionable: tuple[str, ...] = ()
    """States that cannot be assigned to parameters, as "group 0: momentum_buffer"."""
    replicas: tuple[Replica, ...] = ()
    """Pairs of states that must be equal."""
    unassigned: bool = False
    """Whether the parameters of some groups are unknown."""
    guessed: frozenset[str] = frozenset()
    """Parameters that were assigned to a master only by shapes and the order of the model."""
    remarks: tuple[str, ...] = ()
    """Remarks for the user."""


def merge_partitions(parts: Sequence[Partitions]) -> Partitions:
    """Merge the partitions of several groups; of a parameter in several parts, the last one counts."""
    return Partitions(
        states={name: states for part in parts for name, states in part.states.items()},
        frozen={name: state for part in parts for name, state in part.frozen.items()},
        numbers={name: own for part in parts for name, own in part.numbers.items()},
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
    """Return the optimizer states under another key than the number of a parameter: no other layout can store them.

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
    """Return a scalar that every rank stores as a tensor of shape (1,); None for other states, or if ranks differ.

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
            pieces[0].dtype, [_partition_extent(file, p) for file, p in zip(files.optimizer, pieces, strict=True)]
        )
        for name, shape in buffer.shapes.items():
            short = fragments[name].too_short(stored)
            if short is not None:
                problem = f"its partition of {key} has {stored.numels[short]} elements, too few for {name}"
                raise LayoutError(files.optimizer[short].path, problem, RESTORE)
            result[name][key] = State(shape, stored.dtype, Partitioned(stored, fragments[name]))
    return result


def _partition_extent(file: RankFile, piece: Stored) -> tuple[int, int, int]:
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
    return {str(key): _without_tensors(value, file) for key, value in group.values.items() if key != "params"}


def _without_tensors(value: Any, file: RankFile) -> Any:
    """Replace 0-dim tensors in a hyper-parameter by numbers: torch accepts tensors for lr and betas.

    Only at the top level: a list that nests one list twice, again and again, is small in a pickle and huge if copied.
    """
    if type(value) in {list, tuple} and any(isinstance(v, TensorRef) for v in value):
        return type(value)(_tensor_to_number(v, file) for v in value)
    return _tensor_to_number(value, file)


def _tensor_to_number(value: Any, file: RankFile) -> Any:
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
    same: dict[int, bool] = {}  # by identity: files with equal pickles share their values
    for file, value in zip(files, values, strict=True):
        if id(value) not in same:
            same[id(value)] = _agree([values[0], value])
        if not same[id(value)]:
            problem = f"{what} differs from rank 0's{_both(value, values[0])}: two saves are mixed"
            report(LayoutError(file.path, problem, RESTORE))
            return


def _agree(values: Sequence[object]) -> bool:
    """Return whether all values are the same as the first."""
    others = [value for value in values[1:] if value is not values[0]]
    expected = fingerprint(values[0]) if others else []
    return all(fingerprint(value) == expected for value in others)


def _both(ours: object, theirs: object) -> str:
    """Return both values as text, if they are short."""
    if all(isinstance(v, int | float | str) and len(str(v)) <= 40 for v in (ours, theirs)):
        return f" ({ours} here, {theirs} there)"
    return ""
