"""What a load into a live engine did, or would do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpttool.targets.zero.match import listed
from ckpttool.units import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.model import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What one rank's engine was given, or would be."""

    path: str
    """Directory of the checkpoint."""
    tag: str
    """Its name."""
    step: int | None
    """Steps of the run that saved it."""
    road: str
    """"native" if DeepSpeed read its own files, "planned" if they were made for this engine while it read."""
    dry_run: bool
    """True if the engine was left as it was."""
    weights_only: bool
    """True if weights alone were asked for."""
    source: Topology
    """Ranks of the run that saved it."""
    source_stage: int | None
    """Its ZeRO stage; None for a format that has none."""
    target: Topology
    """Ranks of the engine."""
    target_stage: int
    """Its ZeRO stage."""
    parameters: int
    """Parameters restored."""
    elements: int
    """Elements of them."""
    buffers: int
    """Buffers restored."""
    states: tuple[str, ...]
    """The optimizer's states that were restored, by name."""
    groups_restored: tuple[int, ...]
    """The engine's parameter groups that have the checkpoint's hyper-parameters now;"""
    groups_kept: tuple[int, ...]
    """those that have kept their own."""
    scheduler: bool
    """Whether the learning-rate scheduler was restored."""
    loss_scale: bool
    """Whether the loss scale was restored."""
    missing: tuple[str, ...] = ()
    """Parameters and buffers that the checkpoint lacks: they have kept the engine's values."""
    unexpected: tuple[str, ...] = ()
    """What of the checkpoint the engine has no place for."""
    notes: tuple[str, ...] = ()
    """What is not as it was, and what was noticed about the checkpoint."""
    nbytes_read: int
    """Bytes of tensors that this rank has read, or would."""
    seconds: float
    """Wall time."""
    client_state: Mapping[str, Any] = field(default_factory=dict)
    """What the user's code saved along."""

    def __str__(self) -> str:
        verb = "would restore" if self.dry_run else "restored"
        step = "" if self.step is None else f" of step {self.step}"
        was = "no stage" if self.source_stage is None else f"ZeRO-{self.source_stage}"
        lines = [
            f"{self.path}: {verb} {self.parameters} parameters ({self.elements:,} elements) and {self.buffers} "
            f"buffers{step} in {self.seconds:.1f} s",
            f"from {was} over {_ranks(self.source)} to ZeRO-{self.target_stage} over {_ranks(self.target)} "
            f"({self.road}, {format_size(self.nbytes_read)} read by this rank)",
        ]
        held = [*self.states]
        held += ["scheduler"] * self.scheduler + ["loss scale"] * self.loss_scale
        held += [f"client state ({', '.join(map(str, self.client_state))})"] * bool(self.client_state)
        lines.append(f"with it: {', '.join(held) or 'nothing but weights'}")
        lines += [f"missing there, left as they were: {listed(self.missing)}"] * bool(self.missing)
        lines += [f"without a place here, left out: {listed(self.unexpected)}"] * bool(self.unexpected)
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def _ranks(topology: Topology) -> str:
    sizes = (
        ("tensor", topology.tensor_parallel), ("pipeline", topology.pipeline_parallel),
        ("expert", topology.expert_parallel),
    )  # fmt: skip
    spread = "".join(f", {name} {size}" for name, size in sizes if size > 1)
    return f"{topology.world_size} rank{'s' if topology.world_size != 1 else ''}{spread}"
