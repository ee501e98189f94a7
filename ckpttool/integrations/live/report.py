"""Reports of a load into a live engine and of a save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpttool.errors import ArgumentError
from ckpttool.messages import brief
from ckpttool.targets.zero.match import listed
from ckpttool.units import format_size

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ckpttool import Proof
    from ckpttool.errors import CkptError
    from ckpttool.model import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Result of ``load`` on one rank."""

    path: str
    """Directory of the checkpoint."""
    tag: str
    """Its name."""
    step: int | None
    """Steps of the saved run."""
    method: str
    """"native" if DeepSpeed got the content of its own files, "planned" if each rank read its ranges of the source."""
    dry_run: bool
    """True if the engine or the torch run was not changed."""
    weights_only: bool
    """True if only weights were requested."""
    optimizer: bool
    """Whether the optimizer's states were requested."""
    source: Topology
    """Ranks of the saved run."""
    source_stage: int | None
    """Its ZeRO stage; None for a format without stages."""
    target: Topology
    """Ranks of the engine, or of the torch run."""
    target_stage: int | None
    """Its ZeRO stage; None for a torch run."""
    parameters: int
    """Parameters restored."""
    elements: int
    """Their elements."""
    buffers: int
    """Buffers restored."""
    states: tuple[str, ...]
    """Names of the restored optimizer states."""
    groups_restored: tuple[int, ...]
    """Indexes of the engine's parameter groups that got the checkpoint's hyper-parameters."""
    groups_kept: tuple[int, ...]
    """Indexes of the parameter groups that kept their own."""
    scheduler: bool
    """Whether the learning-rate scheduler was restored."""
    loss_scale: bool
    """Whether the loss scale was restored."""
    missing: tuple[str, ...] = ()
    """Parameters and buffers missing in the checkpoint: they kept the engine's values."""
    unexpected: tuple[str, ...] = ()
    """Parameters and buffers of the checkpoint that are not in the engine."""
    notes: tuple[str, ...] = ()
    """State that was not restored, and remarks on the checkpoint."""
    nbytes_read: int
    """Bytes of tensors read by this rank, or to be read."""
    seconds: float
    """Wall time."""
    client_state: Mapping[str, Any] = field(default_factory=dict)
    """State that the user's code saved with the checkpoint."""
    proof: Proof | None = None
    """The proof that the live state equals the saved one; None if it was not requested."""
    rank_state: Any = field(default=None, compare=False)
    """This rank's ``rank_state`` of the save, if the same ranks saved it; else None."""
    rank_states: Sequence[Any] = field(default=(), repr=False, compare=False)
    """The ``rank_state`` of all ranks that saved, by rank; an item is read from its file at each access. Empty if the
    checkpoint has none, and after a load of weights only."""

    extra: tuple[str, ...] = ()
    """Names of the other objects of a torch run that were restored."""

    def rng_state(
        self,
        key: str | None = "rng",
        *,
        rank: int | None = None,
        world_size: int | None = None,
        shared: Collection[str] = (),
    ) -> dict[str, Any] | None:
        """Return the random number state with which this rank continues; pass it to ``ckpttool.set_rng_state``.

        If the same ranks saved, it is the saved one. Otherwise ``ckpttool.derive_rng_state`` derives it from the states
        of all ranks.

        Args:
            key: Name of ``ckpttool.rng_state()`` in the mapping that was saved as ``rank_state``; None if that was
                ``rank_state`` itself.
            rank: This rank; default: of the process group, if there is one. Ranks with the same number share all
                streams.
            world_size: Number of ranks; default: of the process group, if there is one.
            shared: As for ``ckpttool.derive_rng_state``.

        Returns:
            None if the checkpoint has no rank states.

        Raises:
            ArgumentError: ``rank_state`` has no such key, or something else there.
            CkptError: A rank state cannot be read.
        """
        if not self.rank_states:
            return None
        if self.rank_state is not None:
            return _rng_part(self.rank_state, key)
        import torch.distributed as dist

        from ckpttool.integrations.torch.rng import derive_rng_state

        alone = not dist.is_initialized()
        own, size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        ranks = (own if rank is None else rank, size if world_size is None else world_size)
        return derive_rng_state((_rng_part(state, key) for state in self.rank_states), *ranks, shared=shared)

    def __str__(self) -> str:
        verb = "would restore" if self.dry_run else "restored"
        step = "" if self.step is None else f" of step {self.step}"
        was = "files without ZeRO" if self.source_stage is None else f"ZeRO-{self.source_stage}"
        now = "torch" if self.target_stage is None else f"ZeRO-{self.target_stage}"
        lines = [
            f"{self.path}: {verb} {self.parameters} parameters ({self.elements:,} elements) and {self.buffers} "
            f"buffers{step} in {self.seconds:.1f} s",
            f"from {was} over {_ranks(self.source)} to {now} over {_ranks(self.target)} "
            f"({self.method}, {format_size(self.nbytes_read)} read by this rank)",
        ]
        held = [*self.states]
        held += ["scheduler"] * self.scheduler + ["loss scale"] * self.loss_scale
        held += [f"client state ({', '.join(map(str, self.client_state))})"] * bool(self.client_state)
        held += self.extra
        if self.rank_states:
            held.append(f"rank states of {len(self.rank_states)} ranks" if self.rank_state is None else "rank state")
        lines.append(f"with it: {', '.join(held) or 'only weights'}")
        lines += [f"missing in the checkpoint, unchanged: {listed(self.missing)}"] * bool(self.missing)
        lines += [
            f"not in the {'model' if self.target_stage is None else 'engine'}, left out: {listed(self.unexpected)}"
        ] * bool(self.unexpected)
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines if self.proof is None else [*lines, str(self.proof)])


def _rng_part(rank_state: Any, key: str | None) -> dict[str, Any]:
    """Return the random number state in a rank state.

    Raises:
        ArgumentError: The rank state does not contain it.
    """
    from ckpttool.integrations.torch.rng import is_rng_state

    part = rank_state
    if key is not None:
        part = rank_state.get(key) if isinstance(rank_state, Mapping) else None
    if not is_rng_state(part):
        where = "rank_state itself" if key is None else f"{brief(key)} of rank_state"
        hint = 'save with rank_state={"rng": ckpttool.rng_state()}, or pass the key that it has there'
        raise ArgumentError("key", f"names {where}, which is not a state of ckpttool.rng_state", hint)
    found: dict[str, Any] = part
    return found


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Result of a save on one rank."""

    tag: str
    """The checkpoint's name."""
    step: int
    """Steps of the engine."""
    path: str
    """Its directory."""
    nbytes: int
    """Bytes written by this rank."""
    stall_seconds: float
    """Seconds that the train loop waited for the save."""
    seconds: float
    """Seconds from the call to the commit."""
    retries: int
    """Retried requests to the store."""
    error: CkptError | None = None
    """The error of a failed save; None for a committed one."""

    @property
    def bytes_per_second(self) -> float:
        """Bytes written by this rank, per second from the call to the commit."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.tag} was not saved: {self.error}"
        text = (
            f"saved {self.tag} (step {self.step}): {format_size(self.nbytes)} of this rank in {self.seconds:.2f} s "
            f"({format_size(int(self.bytes_per_second))}/s), training waited {self.stall_seconds:.3f} s"
        )
        return f"{text}, {self.retries} retries" if self.retries else text


def _ranks(topology: Topology) -> str:
    sizes = (
        ("tensor", topology.tensor_parallel),
        ("pipeline", topology.pipeline_parallel),
        ("expert", topology.expert_parallel),
    )
    spread = "".join(f", {name} {size}" for name, size in sizes if size > 1)
    return f"{topology.world_size} rank{'s' if topology.world_size != 1 else ''}{spread}"
