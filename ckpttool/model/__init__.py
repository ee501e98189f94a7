"""The layout of a checkpoint: its parameters, and the place of the bytes of each of their states.

Data only: no function here opens a file.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ckpttool.blocks import Shown
from ckpttool.dtypes import itemsize
from ckpttool.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ckpttool.blocks import Block
    from ckpttool.checksums import Record
    from ckpttool.model.places import Place
    from ckpttool.storage import StorageSpec

MASTER = "fp32"
"""The master weights, which the optimizer updates: fp32, unless the run kept them in 16 bit (see the dtype)."""
MODULE = "module"
"""The module's copy, with which the model computes: 16-bit under mixed precision."""

NEWER_COPIES = "the module's copies are newer than the masters (ZenFlow)"
"""Note for the user where ``Checkpoint.has_newer_copies`` is set."""
UNKNOWN_GROUP = -1
"""Group index of a parameter whose group is unknown: without ZeRO an optimizer only numbers its parameters."""


class Formula(ABC):
    """The computation of a state's values from other states."""

    __slots__ = ()

    @property
    @abstractmethod
    def inputs(self) -> tuple[State, ...]:
        """The states that it reads, in the order of reading."""

    @property
    @abstractmethod
    def key(self) -> str:
        """Its kind and numbers: equal for two formulas that compute the same from equal inputs."""

    @property
    def block(self) -> int:
        """Number of elements that are best computed together, from a multiple of it on."""
        return 1

    @abstractmethod
    def fill(self, first: int, out: NDArray[Any], inputs: Any) -> None:
        """Fill ``out`` with computed elements.

        Args:
            first: The first element, in C order.
            out: The result, cast to its type.
            inputs: Reads the input states: an ``execution.state_reader.StateReader``.

        Raises:
            StorageError: Reading failed, or a source changed meanwhile.
        """


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """One state of a parameter (the master, the module's copy, a moment) and the place of its bytes.

    Source: DeepSpeed 0.19, runtime/zero/stage3.py (``fp32_flat_groups``) and runtime/zero/stage_1_and_2.py
    (``single_partition_of_fp32_groups``).
    """

    shape: tuple[int, ...]
    """The whole tensor before partitioning; () is a scalar, and a dimension may be 0."""
    dtype: str
    """safetensors' spelling: "F32", "BF16"."""
    place: Place
    """The place of its elements in the files."""
    mean_with: tuple[State, ...] = ()
    """Other states of the same shape and type; the values are the mean of all: the copies of one parameter on
    tensor-parallel ranks that have drifted apart."""
    formula: Formula | None = None
    """Computes the values from other states; None if files contain them. Such a state has no extents."""

    @property
    def stored(self) -> tuple[State, ...]:
        """The states in files that its values are read from: itself, or the inputs of its formula."""
        if self.formula is None:
            return (self, *self.mean_with)
        return tuple(stored for state in self.formula.inputs for stored in state.stored)

    @property
    def extents(self) -> NDArray[np.void]:
        """The place of its elements as rows of ``model.extents.EXTENT`` in ascending start; read-only."""
        return self.place.rows

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
        """Whether the values can be copied from single runs as they are."""
        return self.formula is None and not self.mean_with and bool((self.extents["runs"] <= 1).all())


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """A state and its replica: they must be equal once ``state`` is cast to the type of ``copy``."""

    name: str
    """The parameter or buffer, by its own or a tied name."""
    state: State
    """The state that is read."""
    copy: State
    """The replica: the module's 16-bit copy of a master, a tied tensor stored twice, a tensor-parallel replica."""
    guessed: bool = False
    """Whether the pair was derived only from shapes and the order of the model."""


@dataclass(frozen=True, slots=True)
class Slicing:
    """How tensor parallelism slices a parameter over any number of ranks.

    Source: DeepSpeed 0.19, checkpoint/universal_checkpoint.py (``load_hp_checkpoint_state``).
    """

    dim: int = 0
    """The dimension along which it is cut."""
    parts: int = 1
    """Number of equal parts along that dimension; each is cut separately."""
    view: tuple[int | tuple[int, ...], ...] = ()
    """Shape to view the parameter in before cutting; parts of different sizes are a tuple in the place of ``dim``."""
    vocabulary: bool = False
    """Whether its rows are padded to a multiple of the number of ranks."""


BY_ROWS = Slicing()
"""The default: cut along the first dimension."""


@dataclass(frozen=True, slots=True, eq=False)
class Parameter:
    """A parameter of the model and its states."""

    name: str
    """Fully qualified name, as in the module's state dict."""
    shape: tuple[int, ...]
    """The whole tensor before partitioning."""
    group: int | None
    """Index of its parameter group; None for a frozen parameter, UNKNOWN_GROUP if unknown."""
    states: Mapping[str, State]
    """By name: "fp32" (the master), "module" (the model's copy), and the optimizer's own: "exp_avg", ..."""
    slicing: Slicing = BY_ROWS
    """How tensor parallelism slices it."""
    numbers: Mapping[str, ScalarState] = field(default_factory=dict)
    """Its states that are one number and differ among the parameters of its group, such as the step of a layer that
    some batches do not use."""
    others: Mapping[str, State] = field(default_factory=dict)
    """The optimizer's tensors that have another shape, such as the row sums of Adafactor."""

    @property
    def frozen(self) -> bool:
        """Whether no parameter group has it."""
        return self.group is None

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def trained(self) -> bool:
        """Whether a parameter group has it, or it has a master."""
        return not self.frozen or MASTER in self.states

    @property
    def master_state(self) -> State:
        """The master, or the module's copy if the master is missing."""
        return self.states.get(MASTER) or self.states[MODULE]

    @property
    def module_state(self) -> State:
        """The module's copy, or the master if the copy is missing."""
        return self.states.get(MODULE) or self.states[MASTER]

    @property
    def optimizer_states(self) -> dict[str, State]:
        """The optimizer's own states, such as moments, by name."""
        return {key: state for key, state in self.tensors.items() if key not in {MASTER, MODULE}}

    @property
    def tensors(self) -> dict[str, State]:
        """All its states by name, of any shape."""
        return {**self.states, **self.others}


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """A persistent buffer of the model."""

    name: str
    """Fully qualified name, as in the module's state dict."""
    state: State
    """Its values."""


@dataclass(frozen=True, slots=True)
class ScalarState:
    """An optimizer state that is one number for a whole group, such as Adam's step."""

    value: float | int | bool
    """The number."""
    dtype: str | None
    """safetensors' spelling if it was saved as a 0-dim tensor; None for a Python number."""
    shape: tuple[int, ...] = ()
    """(1,) if it was saved as a tensor of one dimension."""


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
    """An integer hyper-parameter that was saved as a 0-dim tensor.

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
    """The number as a Python number, which keeps the type of the tensor that it was saved as."""
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
    """Learning rate, betas, weight decay and other values that the optimizer keeps for a group.

    Values saved as 0-dim tensors are TensorFloat or TensorInteger.
    """
    scalars: Mapping[str, ScalarState]
    """States that are one number, the same for all parameters of the group; ``Parameter.numbers`` has the others."""
    listed: tuple[str, ...] = ()
    """All parameters of the optimizer's list, if some were never updated, whose ``Parameter.group`` is None; otherwise
    empty."""
    ordered: bool = True
    """Whether the names are in the optimizer's order."""
    named: bool = False
    """Whether the saved group has ``param_names``: its optimizer was made from ``named_parameters()``."""


def split_numbers(
    numbers: Mapping[str, Mapping[str, ScalarState]], keys: Mapping[str, Collection[str]]
) -> tuple[dict[str, ScalarState], dict[str, dict[str, ScalarState]]]:
    """Split the numbers of a group's parameters into shared numbers and numbers of each parameter.

    Args:
        numbers: By parameter and name of the number.
        keys: Names of the states of each parameter, numbers or not.
    """
    shared: dict[str, ScalarState] = {}
    for key in dict.fromkeys(key for own in numbers.values() for key in own):
        found = [own[key] for own in numbers.values() if key in own]
        if all(number == found[0] for number in found) and all(key in own for own in keys.values()):
            shared[key] = found[0]
    each = {name: {k: n for k, n in own.items() if k not in shared} for name, own in numbers.items()}
    return shared, {name: own for name, own in each.items() if own}


@dataclass(frozen=True, slots=True)
class DeviceMesh:
    """The ranks that DTensors are distributed over."""

    names: tuple[str, ...]
    """Names of its dimensions; empty if they have none."""
    shape: tuple[int, ...]
    """Sizes of its dimensions."""
    device: str
    """Type of the devices, such as "cuda"."""
    torch: str
    """The oldest torch release that pickles a mesh in the same form: "2.6", or "2.13"."""

    def __str__(self) -> str:
        sizes = map(str, self.shape)
        return " x ".join(map(" ".join, zip(self.names, sizes, strict=True)) if self.names else sizes)


@dataclass(frozen=True, slots=True)
class Topology:
    """Numbers of ranks that the checkpoint was saved by, for each kind of parallelism."""

    data_parallel: int = 1
    """Ranks that partition the optimizer's states (sequence-parallel ranks included)."""
    tensor_parallel: int = 1
    """Ranks that slice each layer."""
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
    """Kind of the states in it: "model", "optimizer", "layer", "expert", "swapped", "weights"."""
    rank: int | None
    """Data-parallel rank that wrote it; None where one file serves all ranks."""
    version: str
    """Differs when the file was rewritten; see ``storage.Entry``."""
    model_rank: int | None = None
    """Tensor- and pipeline-parallel rank that wrote it; None if there is only one, or one file serves all."""
    container: str = "torch"
    """Format of the file: "torch" (one file of ``torch.save``), "safetensors", "raw" (elements of one tensor), "dcp" (a
    shard or the metadata of ``torch.distributed.checkpoint``)."""
    directory: str | None = None
    """Its directory if that is another node's; None for the checkpoint's location."""
    records: Sequence[Record] = field(default=(), repr=False)
    """Ranges of its bytes with the CRC-32 that the save recorded."""
    storage: StorageSpec | None = field(default=None, repr=False)
    """Its storage if that is not the checkpoint's: the file of another checkpoint, in a combination."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Checkpoint(Shown):
    """The layout of a checkpoint.

    Raises:
        LayoutError: The extents of a state do not fill its shape exactly once or are outside their file; names the
            parameter and the file.
    """

    location: str
    """Directory of the tag."""
    root: str
    """Directory that contains the tag, ``latest`` and, for the Hugging Face Trainer, the model's configuration."""
    tag: str
    """Name of the checkpoint: "global_step1000"; the directory's name for a format without tags."""
    format: str
    """"zero" (DeepSpeed's own files, ZeRO off included), "universal", "thin" (its weights, left by ``prune``),
    "safetensors", "torch" or "dcp"."""
    stage: int | None
    """ZeRO stage: 0 (no ZeRO), 1, 2 or 3; None for a format that has none."""
    topology: Topology
    """Ranks."""
    dtype: str
    """Type that the module computes in, safetensors' spelling."""
    deepspeed_version: str | None
    """As recorded when it was saved."""
    step: int | None
    """Steps of the engine (``global_steps``), skipped ones included; None if not recorded."""
    samples: int | None = None
    """Samples trained on (``global_samples``); None if not recorded."""
    skipped_steps: int
    """Steps that the optimizer skipped because gradients overflowed."""
    parameters: tuple[Parameter, ...]
    """In the order of the module's state dict, tied names left out."""
    buffers: tuple[Buffer, ...]
    """Persistent buffers, in the order of the module's state dict."""
    aliases: Mapping[str, str]
    """Tied names: another name of a parameter to the name it is stored under."""
    groups: tuple[ParamGroup, ...]
    """The optimizer's parameter groups."""
    nonpartitionable: tuple[str, ...] = ()
    """Non-partitionable optimizer states: their shape does not follow the partition, so no parameter has them."""
    scheduler: Any = None
    """State of the learning-rate scheduler."""
    data_states: Mapping[str, Any] = field(default_factory=dict)
    """States of DeepSpeed's data efficiency: ``data_sampler`` and ``random_ltd``."""
    loss_scaler: Any = None
    """State of the loss scaler, as pickled."""
    client_state: Mapping[str, Any] = field(default_factory=dict)
    """Values that the user's code saved with the model."""
    ds_config: Mapping[str, Any] = field(default_factory=dict)
    """DeepSpeed's configuration of the run."""
    batch: Mapping[str, int] = field(default_factory=dict)
    """Batch sizes of the run by their names in that configuration, from the manifest of a save; empty without one."""
    attempt: str = ""
    """Identifier of the save in its manifest; "" without one."""
    optimizer: str = ""
    """Class of the optimizer and its switches, from the manifest; "" without one."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the train loop in the manifest."""
    digests: Mapping[str, Any] | None = field(default=None, repr=False)
    """Digests of the live state at the save, from the manifest (``StateDigest.to_json``); None without them."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Provenance of the run, from the manifest: git revision, and the checkpoint it was restored from."""
    thin: bool = False
    """Whether ``prune`` has removed the optimizer states, and kept the weights."""
    embedded: Mapping[str, State] = field(default_factory=dict)
    """Embedded storages: of the tensors inside ``client_state``, ``scheduler`` and ``data_states``, by storage key."""
    replicas: tuple[Replica, ...] = ()
    """States that are stored more than once."""
    has_newer_copies: bool = False
    """Whether the module's copies are newer than the masters, as under ZenFlow. Then the copies are the weights."""
    files: tuple[CheckpointFile, ...]
    """Every file read, sizes included."""
    notes: tuple[LayoutError, ...] = ()
    """Findings that did not stop the reader, and may mean that something is wrong."""
    remarks: tuple[str, ...] = ()
    """Remarks for the user; nothing is wrong."""
    latest: str | None = None
    """Name of the file in ``root`` that names the newest tag; None for a format without tags."""
    masters_alone: bool = False
    """Whether trained parameters have masters and nothing records the type that the module computes in."""
    tells_buffers: bool = True
    """Whether the files distinguish buffers from frozen parameters."""
    excludes_frozen: bool = False
    """Whether the frozen parameters were not saved (DeepSpeed's ``exclude_frozen_parameters``)."""
    mesh: DeviceMesh | None = None
    """The mesh of DTensors; None for other formats."""
    unsharded: frozenset[str] = frozenset()
    """Parameters that every rank has whole, beside DTensors."""
    left_out: str = ""
    """Why the optimizer's states in the files are not read; "" if they are read, or there are none."""
    beside: frozenset[str] = frozenset()
    """Tensors among the parameters and buffers that are saved beside the model's state dict."""
    renamed: bool = False
    """Whether the names of parameters differ from the names in the files by prefixes such as ``module.``."""
    unproven: str = ""
    """Why the files cannot be proven to be all of the checkpoint; "" if they can."""
    storage: StorageSpec = field(repr=False, compare=False)
    """The storage of its files, as data; ``storage.connect`` opens it."""
    _notebook: ClassVar[Callable[[Checkpoint], str | None] | None] = None
    """Draws a checkpoint as HTML; set by ``ckpttool.inspect``, as pictures are made above the model."""
    _described: ClassVar[Callable[[Checkpoint], Iterator[Block]] | None] = None
    """Describes a checkpoint in words; set likewise."""

    def _repr_html_(self) -> str | None:
        """Return the picture that a notebook shows; None if nothing that draws was imported."""
        draw = type(self)._notebook
        return None if draw is None else draw(self)

    def blocks(self) -> Iterable[Block]:
        """Yield a summary, then the notes; nothing if nothing that describes was imported."""
        describe = type(self)._described
        return () if describe is None else describe(self)

    def __post_init__(self) -> None:
        for problem in self.problems():
            raise problem

    def problems(self) -> Iterator[LayoutError]:
        """Find states whose extents do not fill their shape exactly once, or reach beyond their file."""
        sizes = [f.nbytes for f in self.files]
        copies = ((t.name, "a copy", copy) for t in self.replicas for copy in (t.state, t.copy))
        everything = (*self.states(), *copies)
        unsure = [named for named in everything if not named[2].place.sound(named[2].numel, named[2].dtype, sizes)]
        if not unsure:
            return
        from ckpttool.model import extents  # numpy: unneeded for the places of most checkpoints

        for i in extents.suspects([(state.extents, state.numel, state.dtype) for *_, state in unsure], sizes):
            name, key, state = unsure[i]
            gap = extents.cover_problem(state.extents, state.numel, state.dtype)
            if gap is not None:
                what = f"{key} of {name}: {gap.kind} at elements {gap.start} to {gap.end} of {state.numel}"
                yield LayoutError(self.location, what, "the checkpoint is damaged, or its layout is not supported")
                continue
            beyond = extents.file_too_short(state.extents, state.dtype, sizes)
            if beyond is not None:
                path = f"{self.location}/{self.files[beyond].name}"
                yield LayoutError(path, f"{key} of {name} is beyond its end", "restore it from a copy")

    def states(self) -> Iterator[tuple[str, str, State]]:
        """(parameter or buffer, name of the state, state) of every tensor."""
        for parameter in self.parameters:
            for key, state in parameter.tensors.items():
                yield parameter.name, key, state
        for buffer in self.buffers:
            yield buffer.name, "buffer", buffer.state

    @property
    def of_other_shape(self) -> str:
        """Names of the optimizer's tensors that do not have the shape of their parameter, as text; "" without one."""
        return ", ".join(sorted({key for p in self.parameters for key in p.others}))

    def numbers(self, parameter: Parameter) -> dict[str, ScalarState]:
        """States of a parameter that are one number, by name."""
        known = parameter.group is not None and 0 <= parameter.group < len(self.groups)
        of_group = self.groups[parameter.group].scalars if known else {}  # type: ignore[index]  # known
        return {**of_group, **parameter.numbers}

    @property
    def of_one_layout(self) -> tuple[str, ...]:
        """States that files of other ranks or stages cannot store: the non-partitionable ones, and numbers that differ
        among the parameters of a group.
        """
        uneven = {(p.group or 0, key) for p in self.parameters for key in p.numbers}
        return (
            *self.nonpartitionable,
            *(f"group {group}: {key}, which differs among its parameters" for group, key in sorted(uneven)),
        )

    def weights(self, parameter: Parameter) -> State:
        """A parameter's weights: the master, or the module's copy if it is newer or the only one."""
        return parameter.module_state if self.has_newer_copies else parameter.master_state

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
