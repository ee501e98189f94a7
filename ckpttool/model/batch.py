"""Batch sizes of a run, and those that give the same global batch on another number of ranks.

Source: DeepSpeed 0.19.8, runtime/config.py (``_set_batch_related_parameters``): global batch = micro batch *
accumulation * data-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.model import Checkpoint

GLOBAL, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
"""Names in DeepSpeed's configuration, and in the manifest."""


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Samples of one step."""

    whole: int
    """Global batch: samples of one step of the optimizer on all ranks."""
    micro: int | None = None
    """Micro batch: samples of one pass of one rank; None if unknown."""
    accumulation: int | None = None
    """Micro batches of one step of the optimizer; None if unknown."""

    def __str__(self) -> str:
        return f"{GLOBAL} {self.whole}, {MICRO} {self.micro}, {ACCUMULATION} {self.accumulation}"

    def to_config(self) -> dict[str, int]:
        """Return the known sizes by their names in DeepSpeed's configuration."""
        named = ((GLOBAL, self.whole), (MICRO, self.micro), (ACCUMULATION, self.accumulation))
        return {name: value for name, value in named if value is not None}


def configured_size(config: Mapping[str, Any], name: str) -> int | None:
    """Return a batch size of a configuration; None if it is missing, or "auto"."""
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def configured_batch(config: Mapping[str, Any], ranks: int | None) -> BatchSizes | None:
    """Return the batch sizes of DeepSpeed's configuration; None if it does not determine the global batch.

    Args:
        config: The configuration.
        ranks: Data-parallel ranks of its run; None if unknown.
    """
    whole, micro, accumulation = (configured_size(config, name) for name in (GLOBAL, MICRO, ACCUMULATION))
    if whole is None and micro is not None and ranks is not None:
        accumulation = accumulation or 1
        whole = micro * accumulation * ranks
    if whole is None:
        return None
    if ranks is not None and micro is None:
        accumulation = accumulation or 1
        micro = max(1, whole // ranks // accumulation)
    elif ranks is not None and accumulation is None and micro is not None:
        accumulation = max(1, whole // micro // ranks)
    return BatchSizes(whole, micro, accumulation)


def saved_batch(checkpoint: Checkpoint) -> BatchSizes | None:
    """Return the batch sizes of the run that saved a checkpoint; None if it does not record them."""
    config = checkpoint.batch or checkpoint.ds_config
    ranks = checkpoint.topology.data_parallel if checkpoint.native else None
    sequence = configured_size(checkpoint.ds_config, "sequence_parallel_size") or 1
    return configured_batch(config, None if ranks is None else max(1, ranks // sequence))


def equal_batch(whole: int, ranks: int, largest: int | None) -> BatchSizes | None:
    """Return the sizes that give a global batch on a number of ranks; None if it is not divisible by them.

    Args:
        whole: The global batch.
        ranks: Data-parallel ranks.
        largest: Limit of the micro batch, for the memory of a rank; None for no accumulation.
    """
    own, rest = divmod(whole, ranks)
    if rest or not own:
        return None
    limit = own if largest is None else min(own, largest)
    micro = next(size for size in range(limit, 0, -1) if own % size == 0)
    return BatchSizes(whole, micro, own // micro)


def fitting_numbers(whole: int, ranks: int) -> str:
    """Return the numbers of ranks and the global batches next to given ones that divide each other, in words."""
    divisors = [n for n in range(1, whole + 1) if whole % n == 0]
    below = max(n for n in divisors if n < ranks or n == 1)
    above = min((n for n in divisors if n > ranks), default=None)
    sizes = [n for n in (whole // ranks * ranks, (whole // ranks + 1) * ranks) if n]
    fitting = f"{below} ranks" if above is None else f"{below} or {above} ranks"
    return f"choose {fitting}, or a global batch near it, of {' or '.join(map(str, sizes))}"
