"""Positions within a data set on any number of ranks: of a data loader, and of the samplers of other frameworks."""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, Any

from ckpttool.arguments import check_at_least
from ckpttool.checksums import crc32
from ckpttool.errors import ArgumentError, PlanError
from ckpttool.integrations.torch.sampler import ResumableSampler
from ckpttool.messages import brief

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


LOG = logging.getLogger(__name__)


def batches_to_skip(samples: int, *, world_size: int, batch_size: int) -> int:
    """Return the batches of each rank that make up the samples already read: the argument of ``skip_first_batches``.

    The samplers of Accelerate and of the Hugging Face Trainer read one seeded order that does not depend on the number
    of ranks. After k batches of each of N ranks, the first k * N * batch size samples of the epoch have been read; save
    that number.

    Args:
        samples: Samples of this epoch that all ranks together have read.
        world_size: Number of ranks now.
        batch_size: Samples of one batch of one rank now.

    Raises:
        PlanError: They are no whole number of batches of all ranks; names the batch sizes that fit.
    """
    for name, value in (("world_size", world_size), ("batch_size", batch_size)):
        check_at_least(name, value, 1)
    count, rest = divmod(samples, world_size * batch_size)
    if rest:
        fitting = [size for size in range(batch_size, 0, -1) if samples % (world_size * size) == 0]
        hint = f"choose batch size {fitting[0]}" if fitting else "save where the number of samples fits both runs"
        problem = f"are no whole number of batches of {batch_size} on {world_size} ranks"
        raise PlanError(
            f"{samples} samples", problem, f"{hint}, or use ckpttool.data.ResumableSampler as batch_sampler"
        )
    return count


class CurriculumPosition:
    """The position of DeepSpeed's ``DeepSpeedDataSampler`` (curriculum learning), on any number of ranks.

    Its own ``state_dict`` lacks the generator that draws the samples, and its own count of samples includes those that
    workers of the loader have prefetched. This state has the generator. It is exact if the loader has no workers, is
    saved behind a step of the optimizer, and no cluster of samples was shuffled anew afterwards: DeepSpeed then
    overwrites the file of the cluster.

    Args:
        sampler: ``engine.training_dataloader.data_sampler``.
        workers: Workers of the loader: ``engine.training_dataloader.num_local_io_workers``.
    """

    def __init__(self, sampler: Any, *, workers: int) -> None:
        self._sampler = sampler
        self._workers = workers
        self._warned = False

    def _why_not(self) -> str:
        if self._workers:
            return "workers of the loader have prefetched samples, which DeepSpeed counts as read"
        return "micro batches were read since the last step of the optimizer" if self._sampler.batch else ""

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the same on all ranks but for the generator of rank 0; save it in ``client_state``."""
        sampler = self._sampler
        why = self._why_not()
        if why and not self._warned:
            self._warned = True
            LOG.warning("the position of DeepSpeed's data sampler cannot be restored exactly: %s", why)
        clusters = [crc32(cluster[0].tobytes()) for cluster in getattr(sampler, "data_clusters", ())]
        return {
            "inexact": why,
            "global_batch_size": sampler.global_batch_size,
            "batch": [int(index) for index in sampler.batch],
            "consumed_samples": sampler.curriculum_step * sampler.global_batch_size - len(sampler.batch),
            "curriculum_step": sampler.curriculum_step,
            "current_difficulties": dict(sampler.current_difficulties),
            "data_cluster_paths": list(sampler.data_cluster_paths),
            "data_cluster_current_position": [int(n) for n in sampler.data_cluster_current_position],
            "clusters": clusters,
            "generator": sampler.np_rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, exact: bool = True) -> None:
        """Go on from a position, on every rank.

        Args:
            state: The position, as saved by the first rank.
            exact: Refuse a position that is not exact.

        Raises:
            PlanError: The position is not exact, the global batch differs, or a cluster of samples has changed.
        """
        import numpy as np

        sampler, what = self._sampler, "the position of DeepSpeed's data sampler"
        if state["inexact"] and exact:
            raise PlanError(what, f"is not exact: {state['inexact']}", "pass exact=False to lose those samples")
        if state["global_batch_size"] != sampler.global_batch_size:
            was, now = state["global_batch_size"], sampler.global_batch_size
            hint = "see ckpttool.resume_config for an equal one"
            raise PlanError(what, f"counts global batches of {was} samples, not of {now}", hint)
        before = len(getattr(sampler, "data_clusters", ()))
        sampler.load_state_dict(
            {
                "batch": list(state["batch"]),
                "consumed_samples": state["consumed_samples"],
                "curriculum_step": state["curriculum_step"],
                "current_difficulties": dict(state["current_difficulties"]),
                "data_cluster_paths": list(state["data_cluster_paths"]),
                "data_cluster_current_position": list(state["data_cluster_current_position"]),
                "np_rng_state": np.random.get_state(),  # the sampler sets the global generator, which it does not use
            }
        )
        sampler.np_rng.bit_generator.state = state["generator"]
        for path, cluster, saved in zip(
            state["data_cluster_paths"], getattr(sampler, "data_clusters", [])[before:], state["clusters"], strict=False
        ):
            if crc32(cluster[0].tobytes()) != saved:
                problem = f"names the cluster {brief(path)}, which was shuffled anew after the save"
                raise PlanError(what, problem, "restore the directory of the clusters, or begin anew")
