"""The options of a load into a live run, and of the saves of a training framework."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpttool.errors import ArgumentError
from ckpttool.messages import brief
from ckpttool.saving.coordination import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ckpttool.execution.checks import Check


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
    optimizer: Any = True
    """Whether to restore the optimizer; the optimizer of a torch run counts as True."""
    scheduler: Any = True
    """Whether to restore the scheduler; the scheduler of a torch run counts as True."""
    dry_run: bool = False
    staged: bool = True
    """Whether the new state is read into host memory beside the run's; False: straight into the tensors of the run."""
    memory: int | str | None = None
    check: Check = "read"
    """The recorded CRC-32 to compare; "full" for a checkpoint with a manifest."""
    allow: tuple[str, ...] = ()
    """Trusted classes: a load builds their objects, which runs their code."""
    committed: bool = False
    """Whether a restore refuses checkpoints without a manifest."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Options of extensions by name."""

    def __post_init__(self) -> None:
        """Replace the optimizer and the scheduler of a torch run by True: they are restored."""
        for name in ("optimizer", "scheduler"):
            given: object = getattr(self, name)
            object.__setattr__(self, name, bool(given) if isinstance(given, int) else True)

    @property
    def without_optimizer(self) -> bool:
        """Whether the engine's optimizer keeps its states and hyper-parameters."""
        return self.weights_only or not self.optimizer

    def agreed(self) -> dict[str, Any]:
        """Return the options that must be the same on all ranks, for ``Ranks.begin``."""
        names = ["strict", "weights_only", "optimizer", "scheduler", "dry_run", "staged", "check", "committed"]
        return {**{name: getattr(self, name) for name in names}, **self.given, "allow": sorted(self.allow)}

    @property
    def memory_bytes(self) -> int:
        """Maximum bytes of requests in flight for a remote checkpoint.

        Raises:
            ArgumentError: ``memory`` is not a size.
        """
        from ckpttool.execution.run import memory_bytes

        return memory_bytes(self.memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Options of the saves of a training framework; see ``CheckpointManager`` for the arguments of the same names."""

    async_save: bool = False
    timeout: float = TIMEOUT
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)  # it may hold secrets
    allow: Collection[str] = ()
    given: Mapping[str, Any] = field(default_factory=dict)
    """Options of extensions for loads, by name."""
