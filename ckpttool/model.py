"""The layout of a checkpoint: which parameters it holds, and where the bytes of each of their states lie.

Data only; nothing here opens a file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.dtypes import itemsize
from ckpttool.errors import LayoutError
from ckpttool.ranges import exact_cover_problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

EXTENT = np.dtype(
    [
        ("start", "<u8"),  # first element, in elements of the flattened tensor (C order)
        ("numel", "<u8"),  # elements that lie here in one piece; 0 where a rank holds nothing but padding
        ("file", "<u4"),  # index into Checkpoint.files
        ("offset", "<u8"),  # first byte, counted from the start of that file
        ("padding", "<u8"),  # elements of padding stored right behind them
    ]
)
"""One row: a run of elements that lies in one piece in one file. Rows are in ascending ``start``."""

MASTER = "fp32"
"""The state that the optimizer updates. fp32 unless the run kept its masters in 16 bit; the dtype tells."""
MODULE = "module"
"""The copy that the model computes with: 16-bit under mixed precision."""


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


@dataclass(frozen=True, slots=True, eq=False)
class Parameter:
    """A parameter of the model and its states."""

    name: str
    """Fully qualified name, as in the module's state dict."""
    shape: tuple[int, ...]
    """The whole tensor before partitioning."""
    group: int | None
    """Index of its parameter group; None for a frozen parameter."""
    states: Mapping[str, State]
    """By name: "fp32" (the master), "module" (the model's copy), and the optimizer's own: "exp_avg", ..."""

    @property
    def frozen(self) -> bool:
        """Whether the optimizer leaves it alone."""
        return self.group is None

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)


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


@dataclass(frozen=True, slots=True, eq=False)
class ParamGroup:
    """A parameter group of the optimizer."""

    parameters: tuple[str, ...]
    """Names, in the order of the flat buffer."""
    hyperparameters: Mapping[str, Any]
    """Learning rate, betas, weight decay and whatever else the optimizer keeps for a group."""
    scalars: Mapping[str, ScalarState]
    """States that are one number for the whole group."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Over how many ranks the checkpoint is spread, and how."""

    data_parallel: int
    """Ranks that share the optimizer's states (sequence-parallel ranks included)."""
    tensor_parallel: int = 1
    """Ranks that share each layer."""
    pipeline_parallel: int = 1
    """Stages of layers."""


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One file of a checkpoint."""

    name: str
    """Relative to the checkpoint's location."""
    nbytes: int
    """Size in bytes."""
    kind: str
    """"model" or "optimizer": which states it holds."""
    rank: int | None
    """Data-parallel rank that wrote it; None where one file serves all ranks."""
    version: str
    """Differs when the file was written anew; see ``storage.RangeReader``."""


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
    """Name of the checkpoint: "global_step1000"."""
    stage: int
    """ZeRO stage: 1, 2 or 3."""
    topology: Topology
    """Ranks."""
    dtype: str
    """What the module computes in, safetensors' spelling."""
    deepspeed_version: str | None
    """As recorded when it was saved."""
    step: int
    """Steps of the engine (``global_steps``), those skipped included."""
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
    duplicates: Mapping[str, State] = field(default_factory=dict)
    """Tied names that the module stores a second time: alias to where. They must equal what they are tied to."""
    files: tuple[CheckpointFile, ...]
    """Every file read, sizes included."""
    notes: tuple[LayoutError, ...] = ()
    """What the reader noticed that did not keep it from reading, and may mean that something is wrong."""
    remarks: tuple[str, ...] = ()
    """What a user should know of it, though nothing is wrong."""

    def __post_init__(self) -> None:
        for problem in self.problems():
            raise problem

    def problems(self) -> Iterator[LayoutError]:
        """Every state whose extents do not fill its shape exactly once, or lie outside their file."""
        sizes = np.array([f.nbytes for f in self.files], dtype=np.uint64)
        duplicates = ((name, "second copy", state) for name, state in self.duplicates.items())
        for name, key, state in chain(self.states(), duplicates):
            rows = state.extents
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

    def path(self, file: int) -> str:
        """Full path of a file by its index."""
        return f"{self.location}/{self.files[file].name}"

    @property
    def nbytes(self) -> int:
        """Size of all files."""
        return sum(f.nbytes for f in self.files)


def extents(rows: int) -> NDArray[np.void]:
    """An empty table of extents to be filled in."""
    return np.zeros(rows, dtype=EXTENT)


def one_extent(numel: int, file: int, offset: int) -> NDArray[np.void]:
    """A table of one row: the whole tensor in one piece."""
    table = extents(1 if numel else 0)
    if numel:
        table[0] = (0, numel, file, offset, 0)
    return table
