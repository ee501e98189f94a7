"""Compare the global batch of an engine with that of the run that saved a checkpoint."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ckpttool.model.batch import BatchSizes, equal_batch, fitting_numbers, saved_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.model import Checkpoint

LOG = logging.getLogger(__name__)


def engine_batch(engine: Any) -> BatchSizes:
    """Return the batch sizes of an engine."""
    return BatchSizes(
        int(engine.train_batch_size()),
        int(engine.train_micro_batch_size_per_gpu()),
        int(engine.gradient_accumulation_steps()),
    )


def batch_notes(engine: Any, checkpoint: Checkpoint) -> list[str]:
    """Return a note if the global batch differs, with the batch sizes that would give the saved one."""
    saved, own = saved_batch(checkpoint), engine_batch(engine)
    if saved is None or saved.whole == own.whole:
        return []
    ranks = max(1, own.whole // max(1, (own.micro or 1) * (own.accumulation or 1)))
    equal = equal_batch(saved.whole, ranks, own.micro)
    told = f"the global batch is {own.whole} samples, but was {saved.whole} in the saved run; for an equal one"
    if equal is None:
        return [f"{told} choose {fitting_numbers(saved.whole, ranks)} (now {ranks} ranks)"]
    return [f"{told} set {equal} (ckpttool.resume_config does)"]


def warn_of(checkpoint: Checkpoint, notes: Sequence[str]) -> None:
    """Log notes as warnings, on the first rank."""
    import torch.distributed as dist

    for note in notes if not dist.is_initialized() or dist.get_rank() == 0 else ():
        LOG.warning("%s: %s", checkpoint.location, note)
