"""Cut the rest of an epoch into steps, so that all ranks have the same number of batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

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

    It depends on nothing else: a run that stops and goes on has the steps of a run that did not stop. Each rank gets at
    least one sample of a step.

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
