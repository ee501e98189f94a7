"""Positions within a data set on any number of ranks: of a batch sampler, a data loader, and frameworks' samplers.

The batches of the sampler depend only on seed, epoch, global position, rank and number of ranks.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from ckpttool.arguments import check_choice, check_positive
from ckpttool.checksums import crc32
from ckpttool.errors import ArgumentError, PlanError
from ckpttool.integrations.deepspeed import POSITION
from ckpttool.messages import brief

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sized

    from numpy.typing import NDArray


Tail = Literal["spread", "carry", "drop", "pad"]
"""How to treat the last samples of an epoch, if they do not fill a step; see ``ResumableSampler``."""
TAILS: tuple[str, ...] = get_args(Tail)


@dataclass(frozen=True, slots=True)
class Step:
    """One batch of each rank."""

    samples: int
    """Samples of the epoch that all ranks together take."""
    size: int
    """Sizes of all batches together: larger than ``samples`` if some samples are repeated."""


END = Step(0, 0)
"""The epoch has no further step."""


def next_step(remaining: int, ranks: int, batch_size: int, tail: str) -> Step:
    """Return the next step of an epoch.

    It depends on nothing else, so a resumed run has the steps of an uninterrupted one. Each rank gets at least one
    sample of a step.

    Args:
        remaining: Samples of the epoch that are left.
        ranks: Number of ranks.
        batch_size: Samples of one rank in a full step.
        tail: How to treat the last samples of an epoch, if they do not fill a step.
    """
    full = ranks * batch_size
    if remaining >= full:
        rest = remaining - full
        if tail != "spread" or rest == 0 or rest >= ranks:
            return Step(full, full)
        # The last step would have fewer samples than ranks.
        taken = full - (ranks - rest) if batch_size > 1 else full + rest
        return Step(taken, taken)
    if remaining < 1 or tail == "drop":
        return END
    if tail == "pad":
        return Step(remaining, -(-remaining // ranks) * ranks)
    return Step(remaining, remaining) if remaining >= ranks else END


def count_steps(remaining: int, ranks: int, batch_size: int, tail: str) -> int:
    """Return the number of steps of the rest of an epoch."""
    full = ranks * batch_size
    count = max(0, remaining // full - 2)
    remaining -= count * full
    while (step := next_step(remaining, ranks, batch_size, tail)).samples:
        remaining -= step.samples
        count += 1
    return count


FORMAT = 1
"""Version of the state's content."""


@dataclass(frozen=True, slots=True)
class _Position:
    """A position in the data, the same on all ranks."""

    epoch: int = 0
    """Number of the epoch."""
    samples: int = 0
    """Samples of the epoch that all ranks together have taken."""
    carried: int = 0
    """Samples of the previous epoch that come first in this one."""


class ResumableSampler:
    """Batches of indexes for ``DataLoader(batch_sampler=...)`` that continue from any position on any number of ranks.

    All ranks read one order of the samples: the permutation of (seed, epoch), or 0, 1, 2, ... without ``shuffle``. A
    step takes the next samples of that order, and each rank gets a block of them. So the samples read so far are always
    a prefix of the order, for any number of ranks, and the position is the length of that prefix.

    Every rank has the same number of batches, so that no collective waits for a batch that one rank lacks. The batches
    at the end of an epoch may be smaller; ``tail`` decides about samples that do not fill a step:

    * "spread": each sample is read exactly once. The last batches are smaller; in a step, the batches of two ranks
      differ by at most one sample. With batch size 1, some ranks have two samples in their last batch instead.
    * "carry": like "spread", but a batch is never larger: where fewer samples than ranks are left, they are read at the
      beginning of the next epoch.
    * "drop": samples that do not fill ``accumulation`` steps are left out in this epoch, as ``drop_last`` does. At an
      equal global batch these are the same samples for any number of ranks.
    * "pad": the last batch is filled with samples from the beginning of the epoch, as ``DistributedSampler`` does.

    If a run with fewer ranks has left fewer samples than there are ranks now, "spread" carries them over, too.

    DeepSpeed gives each rank's batch the same weight, also if their sizes differ by one sample.

    The position counts the batches that the train loop took, without those prefetched by workers of the loader:
    ``ResumableLoader`` counts them, or the loop calls ``advance`` for each batch.

    Args:
        data: The data set, or its number of samples.
        batch_size: Samples of one rank in a step: the micro batch.
        rank: This rank; with tensor or pipeline parallelism the data-parallel rank.
        world_size: Number of (data-parallel) ranks.
        seed: Seed of the order; the same on all ranks and for the whole run.
        shuffle: Whether each epoch has an order of its own.
        tail: See above.
        accumulation: Micro batches of one step of the optimizer. A state between two steps equals the state after the
            previous step, because a restore drops the gradients of its micro batches.

    Raises:
        ArgumentError: An argument is outside its range, or there are fewer samples than ranks.
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int = 0,
        shuffle: bool = True,
        tail: Tail = "spread",
        accumulation: int = 1,
    ) -> None:
        self.length = data if isinstance(data, int) else len(data)
        """Number of samples."""
        for name, value in (("batch_size", batch_size), ("world_size", world_size), ("accumulation", accumulation)):
            check_positive(name, value)
        check_choice("tail", tail, TAILS)
        if not 0 <= rank < world_size:
            raise ArgumentError("rank", f"is {rank}, not from 0 to {world_size - 1}", "pass this process's rank")
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.tail = tail
        self.accumulation = accumulation
        least = {"drop": world_size * batch_size * accumulation, "pad": 1}.get(tail, world_size)
        if self.length < least:
            problem = (
                f"has {self.length} samples, fewer than the {least} of {'a step' if tail == 'drop' else 'all ranks'}"
            )
            raise ArgumentError("data", problem, 'use fewer ranks, or tail="pad"')
        self._position = _Position()
        self._saved = _Position()
        self._pending = 0
        self._order: tuple[_Position, NDArray[np.int64]] | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._position.epoch

    @property
    def position(self) -> int:
        """Samples of this epoch that all ranks together have taken."""
        return self._position.samples

    def __len__(self) -> int:
        """Return the number of batches of this rank, and of every other, that are left in this epoch."""
        return count_steps(self._remaining(self._position), self.world_size, self.batch_size, self.tail)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of this rank from the current position to the end of the epoch; the position does not
        change.
        """
        position, order = self._position, self._indexes(self._position)
        while (step := self._step(position)).samples:
            start, end = (position.samples + r * step.size // self.world_size for r in (self.rank, self.rank + 1))
            yield [int(n) for n in order.take(range(start, end), mode="wrap")]
            position = replace(position, samples=position.samples + step.samples)

    def advance(self, batches: int = 1) -> None:
        """Count batches that the train loop has taken, on every rank.

        After the last batch of an epoch, the position is the beginning of the next one.
        """
        for _ in range(batches):
            step = self._step(self._position)
            self._position = self._settled(replace(self._position, samples=self._position.samples + step.samples))
            self._pending = (self._pending + 1) % self.accumulation
            if not self._pending:
                self._saved = self._position

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless the position is in this epoch already."""
        if epoch != self._position.epoch:
            self._go_to(_Position(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the same on all ranks; save it in ``client_state``."""
        saved = self._saved
        return {
            "sampler_format": FORMAT,
            "length": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": saved.epoch,
            "position": saved.samples,
            "carried": saved.carried,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position, on any number of ranks and with any batch size.

        Raises:
            ArgumentError: The state is not one of ``state_dict``, or of other data or another order.
        """
        missing = [name for name in ("sampler_format", "epoch", "position", "carried") if name not in state]
        if missing:
            raise ArgumentError("state", f"lacks {missing[0]}", "pass the result of state_dict")
        if state["sampler_format"] > FORMAT:
            raise ArgumentError("state", "was written by a later release of ckpttool", "upgrade ckpttool")
        for name in ("length", "seed", "shuffle"):
            saved, own = state.get(name), getattr(self, name)
            if saved != own:
                problem = f"was saved with {name} {brief(saved)}, but the sampler has {own}: its order differs"
                raise ArgumentError("state", problem, f"make the sampler with {name} {brief(saved)}")
        self._go_to(_Position(int(state["epoch"]), int(state["position"]), int(state["carried"])))

    def _go_to(self, position: _Position) -> None:
        self._position = self._saved = self._settled(position)
        self._pending = 0

    def _settled(self, position: _Position) -> _Position:
        """Return the position, or the beginning of the next epoch if this one has no further step."""
        if self._step(position).samples:
            return position
        rest = self._remaining(position) if self.tail in {"spread", "carry"} else 0
        return _Position(position.epoch + 1, 0, rest)

    def _step(self, position: _Position) -> Step:
        return next_step(self._remaining(position), self.world_size, self.batch_size, self.tail)

    def _remaining(self, position: _Position) -> int:
        whole = self.length + position.carried
        if self.tail == "drop":
            whole -= whole % (self.world_size * self.batch_size * self.accumulation)
        return max(0, whole - position.samples)

    def _indexes(self, position: _Position) -> NDArray[np.int64]:
        """Return the order of an epoch: samples carried over, then its own."""
        start = replace(position, samples=0)
        if self._order is None or self._order[0] != start:
            order = self._permutation(start.epoch)
            if start.carried:
                order = np.concatenate([self._permutation(start.epoch - 1)[-start.carried :], order])
            self._order = start, order
        return self._order[1]

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(self.length, dtype=np.int64)
        digest = hashlib.sha256(f"ckpttool sampler {self.seed} {epoch}".encode()).digest()
        # numpy keeps the streams of RandomState in all releases; streams of Generator may change.
        words = np.frombuffer(digest, dtype="<u4").astype(np.uint32)
        return np.random.RandomState(words).permutation(self.length).astype(np.int64, copy=False)


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
    prefetched do not count. After a ``break`` the next iteration continues with the next batch.

    An iteration draws no number from torch's default generator: the seeds of the loader's workers depend on seed,
    epoch, position and rank. After a resume within an epoch the workers start again, so that they draw other numbers
    for augmentation than an uninterrupted run; to repeat them, draw them from a seed of epoch and index of the sample.

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
        """Continue from a position; see ``ResumableSampler.load_state_dict``."""
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
        PlanError: They are not a whole number of batches of all ranks; names the batch sizes that fit.
    """
    for name, value in (("world_size", world_size), ("batch_size", batch_size)):
        check_positive(name, value)
    count, rest = divmod(samples, world_size * batch_size)
    if rest:
        fitting = [size for size in range(batch_size, 0, -1) if samples % (world_size * size) == 0]
        hint = f"choose batch size {fitting[0]}" if fitting else "save where the number of samples fits both runs"
        problem = f"are not a whole number of batches of {batch_size} on {world_size} ranks"
        raise PlanError(
            f"{samples} samples", problem, f"{hint}, or use ckpttool.data.ResumableSampler as batch_sampler"
        )
    return count


class CurriculumPosition:
    """The position of DeepSpeed's ``DeepSpeedDataSampler`` (curriculum learning), on any number of ranks.

    Its own ``state_dict`` lacks the generator that draws the samples, and its own count of samples includes those that
    workers of the loader have prefetched. This state has the generator. It is exact if the loader has no workers, is
    saved after a step of the optimizer, and no cluster of samples was shuffled again afterwards: DeepSpeed then
    overwrites the file of the cluster.

    Args:
        sampler: ``engine.training_dataloader.data_sampler``.
        workers: Workers of the loader: ``engine.training_dataloader.num_local_io_workers``.
    """

    def __init__(self, sampler: Any, *, workers: int) -> None:
        self._sampler = sampler
        self._workers = workers
        self._warned = False
        setattr(sampler, POSITION, self)

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
        """Continue from a position, on every rank.

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
            hint = "set micro batch and accumulation so that their product with the ranks is the same"
            raise PlanError(what, f"counts global batches of {was} samples, not of {now}", hint)
        if hasattr(sampler, "data_clusters"):  # the first rank's, which a restore may have loaded
            sampler.data_clusters, sampler.data_cluster_sizes = [], []
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
            state["data_cluster_paths"], getattr(sampler, "data_clusters", []), state["clusters"], strict=False
        ):
            if crc32(cluster[0].tobytes()) != saved:
                problem = f"names the cluster {brief(path)}, which was shuffled again after the save"
                raise PlanError(what, problem, "restore the directory of the clusters, or start from scratch")
