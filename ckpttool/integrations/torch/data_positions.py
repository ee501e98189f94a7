"""Positions of the loaders of other packages: what each can restore on another number of ranks, and why not more.

An adapter that cannot restore its position on other ranks, or not exactly, says so in a warning when it is saved.

Source: torchdata 0.11, stateful_dataloader.py; accelerate 1.15, data_loader.py (``SeedableRandomSampler``,
``BatchSamplerShard``, ``skip_first_batches``); Ray 2.60, data/iterator.py and ``streaming_split``; DeepSpeed 0.19.8,
runtime/data_pipeline/data_sampling/data_sampler.py (``DeepSpeedDataSampler``) and runtime/dataloader.py.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ckpttool.arguments import check_at_least
from ckpttool.checksums import crc32
from ckpttool.errors import PlanError
from ckpttool.messages import brief

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LOG = logging.getLogger(__name__)
_USE_SAMPLER = "use ckpttool.data.ResumableSampler as batch_sampler for any number of ranks"


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
        raise PlanError(f"{samples} samples", problem, f"{hint}, or {_USE_SAMPLER}")
    return count


class StatefulLoaderPosition:
    """The position of ``torchdata``'s ``StatefulDataLoader`` with a sampler of its own, for ``rank_state``.

    Its state counts the batches of one rank and holds the states of its workers. So it can be restored on the same
    number of ranks only.

    Args:
        loader: The loader.
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, loader: Any, *, rank: int, world_size: int) -> None:
        self._loader = loader
        self._ranks = [rank, world_size]
        self._warned = world_size == 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader; save it in ``rank_state``."""
        if not self._warned:
            self._warned = True
            size = self._ranks[1]
            LOG.warning("the position of a StatefulDataLoader can be restored on %s ranks only; %s", size, _USE_SAMPLER)
        return {"ranks": list(self._ranks), "state": self._loader.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a position.

        Args:
            state: The state of this rank; None if other ranks saved the checkpoint.

        Raises:
            PlanError: Another rank, or a run with another number of ranks, saved it.
        """
        if state is None or list(state["ranks"]) != self._ranks:
            saved = "another number of ranks" if state is None else "rank {} of {}".format(*state["ranks"])
            problem = f"was saved by {saved}, and this is rank {self._ranks[0]} of {self._ranks[1]}"
            raise PlanError(
                "the position of the StatefulDataLoader", problem, f"begin the epoch anew, or {_USE_SAMPLER}"
            )
        self._loader.load_state_dict(state["state"])


class CountedShard:
    """A shard of Ray Data, as of ``ray.train.get_dataset_shard``, that counts its rows.

    Ray gives blocks of rows to the worker that asks first. So the rows already read are no beginning of an order, and
    the position within an epoch cannot be restored: only the beginning of an epoch can.

    Args:
        shard: The shard of this worker.
    """

    WHY = "Ray Data gives blocks to the worker that asks first: the rows that were read are not known"

    def __init__(self, shard: Any) -> None:
        self._shard = shard
        self._warned = False
        self.epoch = 0
        """Number of the epoch."""
        self.rows = 0
        """Rows of this epoch that this worker has read."""

    def iter_batches(self, **options: Any) -> Iterator[Any]:
        """Yield the batches of an epoch; see ``ray.data.DataIterator.iter_batches``."""
        yield from self._counted(self._shard.iter_batches(**options))

    def iter_torch_batches(self, **options: Any) -> Iterator[Any]:
        """Yield the batches of an epoch; see ``ray.data.DataIterator.iter_torch_batches``."""
        yield from self._counted(self._shard.iter_torch_batches(**options))

    def _counted(self, batches: Any) -> Iterator[Any]:
        self.rows = 0
        for batch in batches:
            self.rows += len(next(iter(batch.values()))) if isinstance(batch, dict) else len(batch)
            yield batch
        self.epoch, self.rows = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position; it can be restored if it is the beginning of an epoch."""
        if self.rows and not self._warned:
            self._warned = True
            LOG.warning("%s; save between two epochs, or %s", self.WHY, _USE_SAMPLER)
        return {"epoch": self.epoch, "rows": self.rows}

    def load_state_dict(self, state: Mapping[str, Any], *, exact: bool = True) -> None:
        """Go on from the beginning of an epoch.

        Args:
            state: The position.
            exact: Refuse a position within an epoch; if not, the epoch begins anew, and its rows are read again.

        Raises:
            PlanError: The position is within an epoch.
        """
        if state["rows"] and exact:
            hint = "pass exact=False to begin the epoch anew"
            raise PlanError(f"a position behind {state['rows']} rows", f"cannot be restored: {self.WHY}", hint)
        self.epoch, self.rows = int(state["epoch"]), 0


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
        sampler.load_state_dict({
            "batch": list(state["batch"]), "consumed_samples": state["consumed_samples"],
            "curriculum_step": state["curriculum_step"], "current_difficulties": dict(state["current_difficulties"]),
            "data_cluster_paths": list(state["data_cluster_paths"]),
            "data_cluster_current_position": list(state["data_cluster_current_position"]),
            "np_rng_state": np.random.get_state(),  # the sampler sets the global generator, which it does not use
        })  # fmt: skip
        sampler.np_rng.bit_generator.state = state["generator"]
        for path, cluster, saved in zip(
            state["data_cluster_paths"], getattr(sampler, "data_clusters", [])[before:], state["clusters"], strict=False
        ):
            if crc32(cluster[0].tobytes()) != saved:
                problem = f"names the cluster {brief(path)}, which was shuffled anew after the save"
                raise PlanError(what, problem, "restore the directory of the clusters, or begin anew")
