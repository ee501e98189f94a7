"""Data between the two halves of a load: the options, and the state read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpttool.errors import ArgumentError
from ckpttool.messages import brief

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckpttool.execution.checks import Check, ReadChecks
    from ckpttool.model import Checkpoint
    from ckpttool.targets.zero.match import Fitted


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """One tensor in the file."""

    name: str
    """Key of the tensor in ``tensors`` of ``plan_replicas``."""
    dtype: str
    """safetensors' spelling."""
    start: int
    """First byte; a multiple of ALIGNMENT."""
    nbytes: int
    """Size in bytes, without padding."""


def check_switches(**switches: Any) -> None:
    """Check options that other functions, and loads of torch models, take as objects.

    Raises:
        ArgumentError: One is an optimizer or a scheduler.
    """
    for name, value in switches.items():
        if not isinstance(value, int):
            hint = "an engine has its own; a torch model and its optimizer are loaded by ckpttool.load"
            raise ArgumentError(name, f"is {brief(value)}, not True or False", hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of a load; see ``ckpttool.load`` for the arguments of the same names."""

    strict: bool = True
    weights_only: bool = False
    optimizer: bool = True
    scheduler: bool = True
    dry_run: bool = False
    memory: int | str | None = None
    check: Check = "read"
    """The recorded CRC-32 to compare; "full" for a checkpoint with a manifest."""
    prove: bool | None = None
    """True to prove the state after the load; None to prove it on an accelerator, if the save recorded digests."""
    allow: tuple[str, ...] = ()
    """Trusted classes: a load builds their objects, which runs their code."""
    committed: bool = False
    """Whether a restore refuses checkpoints without a manifest."""
    signed: bool = False
    """Whether a restore refuses manifests that are not signed with the manager's key."""

    def __post_init__(self) -> None:
        """Check the options that other functions take as objects.

        Raises:
            ArgumentError: An option is an optimizer or a scheduler.
        """
        check_switches(optimizer=self.optimizer, scheduler=self.scheduler)

    @property
    def without_optimizer(self) -> bool:
        """Whether the engine's optimizer keeps its states and hyper-parameters."""
        return self.weights_only or not self.optimizer

    def agreed(self) -> dict[str, Any]:
        """Return the options that must be the same on all ranks, for ``Ranks.begin``."""
        names = ("strict", "weights_only", "optimizer", "scheduler", "dry_run", "check", "prove", "committed", "signed")
        return {name: getattr(self, name) for name in names} | {"allow": sorted(self.allow)}

    @property
    def memory_bytes(self) -> int:
        """Maximum bytes of requests in flight for a remote checkpoint.

        Raises:
            ArgumentError: ``memory`` is not a size.
        """
        from ckpttool.execution.run import memory_bytes

        return memory_bytes(self.memory)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replicas:
    """Replicated tensors: each rank reads one slice and gathers the others from the other ranks."""

    tensors: Sequence[PackedTensor]
    """Offset of each tensor in the concatenation."""
    nbytes: int
    """Bytes of the concatenation."""
    slice_bytes: int
    """Bytes of each rank's slice; a multiple of ALIGNMENT. The last ones may be shorter, or empty."""
    own: bytearray
    """This rank's slice."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """The state of one rank, read but not yet loaded into the engine."""

    checkpoint: Checkpoint
    """The source."""
    fitted: Fitted | None
    """The source matched with the engine; None for a model with tensor or pipeline parallelism."""
    notes: tuple[str, ...]
    nbytes_read: int
    """Bytes read, or planned to be read."""
    run_state: Mapping[str, Any] | None = None
    """Client state and scheduler, if they are restored without the optimizer; None if the files contain them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NativeState(Prepared):
    """The content of the files that DeepSpeed itself would load."""

    files: dict[str, Any]
    """Content of each file that is read ahead, by its name."""
    read_file: Callable[[str], Any]
    """Reads any other file."""

    def contents(self) -> list[Any]:
        """Return the contents read ahead."""
        return [*self.files.values()]

    def release(self) -> None:
        """Free the state after the engine has loaded it."""
        self.files.clear()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedState(Prepared):
    """The partitions of this rank, from files of any layout."""

    optimizer: dict[str, Any] = field(default_factory=dict)
    """This rank's optimizer states."""
    model: dict[str, Any] = field(default_factory=dict)
    """This rank's model states, without replicas and weights cast from the fp32 master weights."""
    replicas: Replicas
    checks: ReadChecks | None = None
    """Checksums of the bytes read by this rank, to compare after all ranks have read."""

    def contents(self) -> list[Any]:
        """Return the contents read."""
        return [self.optimizer, self.model]

    def release(self) -> None:
        """Free the state after the engine has loaded it."""
        self.optimizer.clear()
        self.model.clear()
