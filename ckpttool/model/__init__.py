"""The layout of a checkpoint: which parameters it holds, and where the bytes of each of their states lie.

Data only; nothing here opens a file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.dtypes import itemsize
from ckpttool.errors import LayoutError
from ckpttool.ranges import exact_cover_problem
from ckpttool.storage import LOCAL

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from ckpttool.checksums import Record
    from ckpttool.storage import Storage

EXTENT = np.dtype(
    [
        ("start", "<u8"),  # first element, in elements of the flattened tensor (C order)
        ("numel", "<u8"),  # elements that lie here in one piece; 0 where a rank holds nothing but padding
        ("file", "<u4"),  # index into Checkpoint.files
        ("offset", "<u8"),  # first byte, counted from the start of that file
        ("padding", "<u8"),  # elements of padding stored right behind them
        ("runs", "<u8"),  # how often that repeats: 1, but for a tensor that is cut across its rows
        ("pitch", "<u8"),  # elements of the tensor from the start of one run to that of the next
        ("stride", "<u8"),  # elements of the file from the start of one run to that of the next
    ]
)
"""One row: a run of elements that lies in one piece in one file, or many such runs at equal distances (the columns of a
tensor-parallel rank). Rows are in ascending ``start``."""

MASTER = "fp32"
"""The state that the optimizer updates. fp32 unless the run kept its masters in 16 bit; the dtype tells."""
MODULE = "module"
"""The copy that the model computes with: 16-bit under mixed precision."""

AHEAD = "the module's copies are newer than the masters (ZenFlow)"
"""What users are told where that is so."""
UNKNOWN_GROUP = -1
"""Instead of a group's index: without ZeRO an optimizer only numbers its parameters."""


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """One state of a parameter (the master, the module's copy, a moment) and where its bytes lie.

    Source: DeepSpeed 0.19, runtime/zero/stage3.py (``fp32_flat_groups``) and runtime/zero/stage_1_and_2.py
    (``single_partition_of_fp32_groups``).
    """

    shape: tuple[int, ...]
    """The whole tensor before partitioning; () is a scalar, and a dimension may be 0."""
    dtype: str
    """safetensors' spelling: "F32", "BF16"."""
    extents: NDArray[np.void]
    """Rows of EXTENT in ascending start; read-only."""
    mean_with: tuple[State, ...] = ()
    """Other states of the same shape and type, if the values are the mean of all of them: tensor-parallel copies of one
    parameter that have drifted apart."""

    def __post_init__(self) -> None:
        self.extents.flags.writeable = False

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, without padding."""
        return self.numel * itemsize(self.dtype)

    @property
    def plain(self) -> bool:
        """Whether its extents are single runs and hold the values as they are: copying them is all there is to do."""
        return not self.mean_with and bool((self.extents["runs"] <= 1).all())


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """Two places of one thing. What they hold must be equal, once ``state`` is cast to the type of ``copy``."""

    name: str
    """The parameter or buffer, by its own or a tied name."""
    state: State
    """What counts."""
    copy: State
    """The other one: the model's 16-bit copy of a master, a tied tensor stored twice, a tensor-parallel replica."""


@dataclass(frozen=True, slots=True)
class Slicing:
    """How tensor parallelism slices a parameter, whatever the number of ranks.

    Source: DeepSpeed 0.19, checkpoint/universal_checkpoint.py (``load_hp_checkpoint_state``).
    """

    dim: int = 0
    """The dimension along which it is cut."""
    parts: int = 1
    """Equal parts along that dimension, each cut by itself."""
    view: tuple[int | tuple[int, ...], ...] = ()
    """The shape to see it in first; the sizes of its parts, where they differ, stand in the place of ``dim``."""
    vocabulary: bool = False
    """Whether each number of ranks pads its rows anew."""


BY_ROWS = Slicing()
"""What holds where nothing tells otherwise."""


@dataclass(frozen=True, slots=True, eq=False)
class Parameter:
    """A parameter of the model and its states."""

    name: str
    """Fully qualified name, as in the module's state dict."""
    shape: tuple[int, ...]
    """The whole tensor before partitioning."""
    group: int | None
    """Index of its parameter group; None for a frozen parameter, UNKNOWN_GROUP where that cannot be told."""
    states: Mapping[str, State]
    """By name: "fp32" (the master), "module" (the model's copy), and the optimizer's own: "exp_avg", ..."""
    slicing: Slicing = BY_ROWS
    """How tensor parallelism slices it."""

    @property
    def frozen(self) -> bool:
        """Whether the optimizer leaves it alone."""
        return self.group is None

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def trained(self) -> bool:
        """Whether the optimizer updates it, or has updated it: a group lists it, or it has a master."""
        return not self.frozen or MASTER in self.states

    @property
    def master_state(self) -> State:
        """The master, or the module's copy where there is no master."""
        return self.states.get(MASTER) or self.states[MODULE]

    @property
    def module_state(self) -> State:
        """The module's copy, or the master where there is no copy."""
        return self.states.get(MODULE) or self.states[MASTER]

    @property
    def optimizer_states(self) -> dict[str, State]:
        """The optimizer's own states, such as moments, by name."""
        return {key: state for key, state in self.states.items() if key not in {MASTER, MODULE}}


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """A persistent buffer of the model."""

    name: str
    """Fully qualified name, as in the module's state dict."""
    state: State
    """Its values."""


@dataclass(frozen=True, slots=True)
class ScalarState:
    """A state of the optimizer that is one number for a whole group, such as Adam's step."""

    value: float | int | bool
    """The number."""
    dtype: str | None
    """safetensors' spelling if it was saved as a 0-dim tensor; None for a Python number."""
    shape: tuple[int, ...] = ()
    """(1,) if that tensor had one dimension."""


class TensorFloat(float):
    """A hyper-parameter that was saved as a 0-dim tensor, such as a learning rate on the device.

    Args:
        value: The number.
        dtype: safetensors' spelling.
    """

    dtype: str

    def __new__(cls, value: float, dtype: str) -> TensorFloat:
        """Make one."""
        made = super().__new__(cls, value)
        made.dtype = dtype
        return made

    def __getnewargs__(self) -> tuple[float, str]:  # type: ignore[override]  # float's own has no dtype
        return float(self), self.dtype


class TensorInteger(int):
    """The same of an integer.

    Args:
        value: The number.
        dtype: safetensors' spelling.
    """

    dtype: str

    def __new__(cls, value: int, dtype: str) -> TensorInteger:
        """Make one."""
        made = super().__new__(cls, value)
        made.dtype = dtype
        return made

    def __getnewargs__(self) -> tuple[int, str]:  # type: ignore[override]  # as above
        return int(self), self.dtype


def tensor_number(scalar: ScalarState) -> float | int | bool:
    """A number that remembers the type of the tensor that it was, if it was one."""
    if scalar.dtype is None or isinstance(scalar.value, bool):
        return scalar.value
    if isinstance(scalar.value, float):
        return TensorFloat(scalar.value, scalar.dtype)
    return TensorInteger(scalar.value, scalar.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class ParamGroup:
    """A parameter group of the optimizer."""

    parameters: tuple[str, ...]
    """Names, in the order of the flat buffer."""
    hyperparameters: Mapping[str, Any]
    """Learning rate, betas, weight decay and whatever else the optimizer keeps for a group.

    What was a 0-dim tensor is a TensorFloat or a TensorInteger.
    """
    scalars: Mapping[str, ScalarState]
    """States that are one number for the whole group."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Over how many ranks the checkpoint is spread, and how."""

    data_parallel: int = 1
    """Ranks that share the optimizer's states (sequence-parallel ranks included)."""
    tensor_parallel: int = 1
    """Ranks that share each layer."""
    pipeline_parallel: int = 1
    """Stages of layers."""
    expert_parallel: int = 1
    """Ranks that share the experts of a mixture."""

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.data_parallel * self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One file of a checkpoint."""

    name: str
    """Relative to the checkpoint's location."""
    nbytes: int
    """Size in bytes."""
    kind: str
    """Which states it holds: "model", "optimizer", "layer", "expert", "swapped", "weights"."""
    rank: int | None
    """Data-parallel rank that wrote it; None where one file serves all ranks."""
    version: str
    """Differs when the file was written anew; see ``storage.Entry``."""
    model_rank: int | None = None
    """Tensor- and pipeline-parallel rank that wrote it; None where there is but one, or one file serves all."""
    container: str = "torch"
    """What the file is: "torch" (one file of ``torch.save``), "safetensors", "raw" (elements of one tensor), "dcp" (a
    shard or the metadata of ``torch.distributed.checkpoint``)."""
    directory: str | None = None
    """The directory it lies in, if that is not the checkpoint's location: another node's."""
    records: tuple[Record, ...] = field(default=(), repr=False)
    """Ranges of its bytes with the CRC-32 that was recorded when they were saved."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Checkpoint:
    """What a checkpoint holds.

    Raises:
        LayoutError: The extents of a state do not fill its shape exactly once or lie outside their file; names the
            parameter and the file.
    """

    location: str
    """Directory of the tag."""
    root: str
    """Directory that holds the tag, ``latest`` and, for the Hugging Face Trainer, the model's configuration."""
    tag: str
    """Name of the checkpoint: "global_step1000"; the directory's name for a format without tags."""
    format: str
    """"zero" (what DeepSpeed saves, ZeRO off included), "universal", "safetensors" or "dcp"."""
    stage: int | None
    """ZeRO stage: 0 (no ZeRO), 1, 2 or 3; None for a format that has none."""
    topology: Topology
    """Ranks."""
    dtype: str
    """What the module computes in, safetensors' spelling."""
    deepspeed_version: str | None
    """As recorded when it was saved."""
    step: int | None
    """Steps of the engine (``global_steps``), those skipped included; None where nothing tells."""
    samples: int | None = None
    """Samples that were trained on (``global_samples``); None where nothing tells."""
    skipped_steps: int
    """Steps that the optimizer did not take because gradients had overflowed."""
    parameters: tuple[Parameter, ...]
    """In the order of the module's state dict, tied names left out."""
    buffers: tuple[Buffer, ...]
    """Persistent buffers, in the order of the module's state dict."""
    aliases: Mapping[str, str]
    """Tied names: another name of a parameter to the name it is stored under."""
    groups: tuple[ParamGroup, ...]
    """The optimizer's parameter groups."""
    unsliceable: tuple[str, ...] = ()
    """Optimizer states whose shape does not follow the partition, so that they cannot be assigned to parameters."""
    scheduler: Any = None
    """State of the learning-rate scheduler."""
    loss_scaler: Any = None
    """State of the loss scaler, as pickled."""
    client_state: Mapping[str, Any] = field(default_factory=dict)
    """What the user's code saved along."""
    ds_config: Mapping[str, Any] = field(default_factory=dict)
    """DeepSpeed's configuration of the run."""
    embedded: Mapping[str, State] = field(default_factory=dict)
    """Where the bytes of tensors inside ``client_state`` and ``scheduler`` lie: storage key to the whole storage."""
    replicas: tuple[Replica, ...] = ()
    """What is stored twice."""
    ahead: bool = False
    """Whether the module's copies of trained parameters have been trained since they were cast from the masters, as
    under ZenFlow. Then the copies are the weights."""
    files: tuple[CheckpointFile, ...]
    """Every file read, sizes included."""
    notes: tuple[LayoutError, ...] = ()
    """What the reader noticed that did not keep it from reading, and may mean that something is wrong."""
    remarks: tuple[str, ...] = ()
    """What a user should know of it, though nothing is wrong."""
    latest: str | None = None
    """Name of the file in ``root`` that names the newest tag; None for a format without tags."""
    masters_alone: bool = False
    """Whether trained parameters have masters and nothing records the type that the module computes in."""
    tells_buffers: bool = True
    """Whether the files tell buffers from frozen parameters."""
    storage: Storage = field(default=LOCAL, repr=False, compare=False)
    """Where its files lie."""

    def __post_init__(self) -> None:
        for problem in self.problems():
            raise problem

    def problems(self) -> Iterator[LayoutError]:
        """Every state whose extents do not fill its shape exactly once, or lie outside their file."""
        sizes = np.array([f.nbytes for f in self.files], dtype=np.uint64)
        copies = ((t.name, "a copy", copy) for t in self.replicas for copy in (t.state, t.copy))
        everything = [*self.states(), *copies]
        for i in _suspects([state for _, _, state in everything], sizes):
            name, key, state = everything[i]
            rows = single_runs(state.extents, itemsize(state.dtype))
            gap = exact_cover_problem(rows["start"], rows["numel"], state.numel)
            if gap is not None:
                what = f"{key} of {name}: {gap.kind} at elements {gap.start} to {gap.end} of {state.numel}"
                yield LayoutError(self.location, what, "the checkpoint is damaged, or its layout is not supported")
                continue
            ends = rows["offset"] + rows["numel"] * np.uint64(itemsize(state.dtype))
            outside = np.flatnonzero(ends > sizes[rows["file"]])
            if outside.size:
                file = self.files[int(rows["file"][outside[0]])]
                yield LayoutError(
                    f"{self.location}/{file.name}", f"{key} of {name} lies beyond its end", "restore it from a copy"
                )

    def states(self) -> Iterator[tuple[str, str, State]]:
        """(parameter or buffer, state, where it lies) of everything that has bytes."""
        for parameter in self.parameters:
            for key, state in parameter.states.items():
                yield parameter.name, key, state
        for buffer in self.buffers:
            yield buffer.name, "buffer", buffer.state

    def weights(self, parameter: Parameter) -> State:
        """What counts as a parameter's weights: its master, or the module's copy where that is newer or alone."""
        return parameter.module_state if self.ahead else parameter.master_state

    @property
    def native(self) -> bool:
        """Whether these are the files that DeepSpeed's ``save_checkpoint`` writes and ``load_checkpoint`` reads."""
        return self.stage is not None

    def path(self, file: int) -> str:
        """Full path of a file by its index."""
        entry = self.files[file]
        return f"{entry.directory or self.location}/{entry.name}"

    @property
    def nbytes(self) -> int:
        """Size of all files."""
        return sum(f.nbytes for f in self.files)


def _suspects(states: Sequence[State], sizes: NDArray[np.uint64]) -> list[int]:
    """Indices of the states that are not, at one look at all of them, whole, in order and inside their files."""
    if not states:
        return []
    number = np.repeat(np.arange(len(states)), [len(s.extents) for s in states])
    rows = np.concatenate([s.extents for s in states])
    woven = number[rows["runs"] > 1]
    item = np.array([itemsize(s.dtype) for s in states], dtype=np.uint64)
    bad = rows["offset"] + rows["numel"] * item[number] > sizes[rows["file"]]
    wrong = np.zeros(len(states), dtype=bool)
    wrong[number[bad]] = wrong[woven] = True
    # Of what is not empty, each run begins where the one before it ended, and all of them reach the end.
    held = rows["numel"] > 0
    number, start, end = number[held], rows["start"][held], (rows["start"] + rows["numel"])[held]
    first = np.diff(number, prepend=-1) > 0
    wrong[number[start != np.where(first, 0, np.roll(end, 1))]] = True
    total = np.zeros(len(states), dtype=np.uint64)
    total[number] = end  # the last run of a state wins
    wrong |= total != np.array([s.numel for s in states], dtype=np.uint64)
    return [int(i) for i in np.flatnonzero(wrong)]


def extents(rows: int) -> NDArray[np.void]:
    """An empty table of extents to be filled in, each a single run."""
    table = np.zeros(rows, dtype=EXTENT)
    table["runs"] = 1
    return table


def single_runs(table: NDArray[np.void], width: int) -> NDArray[np.void]:
    """The same extents with a row for each run, in ascending start; ``width`` is the bytes of an element."""
    if not (table["runs"] > 1).any():
        return table
    runs = table["runs"].astype(np.int64)
    rows = np.repeat(table, runs)
    number = (np.arange(len(rows)) - np.repeat(np.cumsum(runs) - runs, runs)).astype(np.uint64)
    rows["start"] += number * rows["pitch"]
    rows["offset"] += number * rows["stride"] * np.uint64(width)
    rows["padding"][:-1][np.diff(np.repeat(np.arange(len(table)), runs)) == 0] = 0  # it lies behind the last run
    rows["runs"] = 1
    return rows[np.argsort(rows["start"], kind="stable")]


def stored_blocks(table: NDArray[np.void], width: int) -> NDArray[np.void]:
    """The same bytes as blocks that lie in one piece, where in the tensor they belong left aside."""
    table = table.copy()
    dense = (table["runs"] > 1) & (table["stride"] == table["numel"])
    table["numel"][dense] *= table["runs"][dense]
    table["runs"][dense] = 1
    return single_runs(table, width)


def one_extent(numel: int, file: int, offset: int) -> NDArray[np.void]:
    """A table of one row: the whole tensor in one piece."""
    table = extents(1 if numel else 0)
    if numel:
        table["numel"], table["file"], table["offset"] = numel, file, offset
    return table
