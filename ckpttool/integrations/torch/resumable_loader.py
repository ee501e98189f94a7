"""A data loader that counts the batches that the train loop takes."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from ckpttool.errors import ArgumentError
from ckpttool.integrations.torch.sampler import ResumableSampler

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class ResumableLoader:
    """Wraps a data loader with a ``ResumableSampler``; its state is the position of the train loop.

    The loop::

        sampler = ResumableSampler(data, batch_size=4, rank=rank, world_size=ranks)
        loader = ResumableLoader(DataLoader(data, batch_sampler=sampler, num_workers=2))
        for epoch in range(loader.epoch, epochs):
            for batch in loader:
                ...
                manager.save(engine, client_state={"loader": loader.state_dict()})

    A batch counts as soon as the loop has it: take the state after the step with the batch. Batches that workers have
    prefetched do not count. After a ``break`` the next iteration goes on with the next batch.

    An iteration draws no number from torch's default generator: the seeds of the loader's workers depend on seed,
    epoch, position and rank. After a resume within an epoch the workers begin anew, so that they draw other numbers for
    augmentation than a run that did not stop; to repeat them, draw them from a seed of epoch and index of the sample.

    Args:
        loader: ``torch.utils.data.DataLoader`` or ``torchdata``'s ``StatefulDataLoader`` with
            ``batch_sampler=ResumableSampler(...)``.

    Raises:
        ArgumentError: The loader has another batch sampler.
    """

    def __init__(self, loader: Any) -> None:
        sampler = getattr(loader, "batch_sampler", None)
        if not isinstance(sampler, ResumableSampler):
            problem = f"has a batch sampler of {type(sampler).__name__}, not of ResumableSampler"
            raise ArgumentError("loader", problem, "make it with DataLoader(data, batch_sampler=ResumableSampler(...))")
        self.loader = loader
        """The wrapped loader."""
        self.sampler = sampler
        """Its sampler."""
        self._seeds_workers = getattr(loader, "generator", None) is None

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self.sampler.epoch

    def __len__(self) -> int:
        """Return the number of batches that are left in this epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches that are left in this epoch."""
        import torch

        if self._seeds_workers:
            self.loader.generator = torch.Generator().manual_seed(self._seed())
        for batch in self.loader:
            self.sampler.advance()
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the same on all ranks; see ``ResumableSampler.state_dict``."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position; see ``ResumableSampler.load_state_dict``."""
        self.sampler.load_state_dict(state)

    def _seed(self) -> int:
        own = self.sampler
        text = f"ckpttool workers {own.seed} {own.epoch} {own.position} {own.rank} {own.world_size}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
