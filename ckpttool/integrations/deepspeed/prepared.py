"""The state of a rank of engines, between the two halves of a load."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckpttool.execution.checks import ReadChecks
    from ckpttool.integrations.torch.fill import Part
    from ckpttool.model import Checkpoint
    from ckpttool.plan import CopyPlan, TargetFile
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


class Unread(NamedTuple):
    """Tensors of the engine that one planned file fills, after all ranks have agreed."""

    plan: CopyPlan
    file: TargetFile
    parts: Sequence[Part]


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
    replicas: Replicas | None
    """None with ``staged=False``: each rank reads them into its engine."""
    unread: Sequence[Unread] = ()
    """With ``staged=False``, the engine's tensors in ``optimizer`` and ``model``, and the replicas."""
    checks: ReadChecks | None = None
    """Checksums of the bytes read by this rank, to compare after all ranks have read."""

    def contents(self) -> list[Any]:
        """Return the contents read."""
        return [self.optimizer, self.model]

    def release(self) -> None:
        """Free the state after the engine has loaded it."""
        self.optimizer.clear()
        self.model.clear()
