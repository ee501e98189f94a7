"""Weights of checkpoints in an average: equal, given, of a moving average, or of a decay that training left out.

Source: arXiv 2507.17634 ("WSM: Decay-Free Learning Rate Schedule via Checkpoint Merging"): the mean of checkpoints
0 ... k with weights c[j] is the model that training with the update between checkpoints i - 1 and i scaled by
w[i] = c[i] + ... + c[k] would have given. So c[0] = 1 - w[1], c[j] = w[j] - w[j + 1] and c[k] = w[k].
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda t: 1 - t,
    "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,
    "1-sqrt": lambda t: 1 - math.sqrt(t),
}
"""Learning rate by the part of the decay that is done (0 to 1), relative to the rate before it."""


def decay_weights(decay: str, count: int) -> tuple[float, ...]:
    """Return the weights of checkpoints at equal distances, whose mean stands for a decayed learning rate.

    With "linear" all are equal; with "constant", no decay, the newest checkpoint has all the weight.

    Args:
        decay: One of DECAYS.
        count: Number of checkpoints, the oldest first.
    """
    rate = DECAYS[decay]
    if decay == "linear":
        return (1.0,) * count  # without the rounding of the differences below
    rates = [1.0, *(rate(i / count) for i in range(1, count)), 0.0]
    return tuple(a - b for a, b in itertools.pairwise(rates))


def moving_average_weights(decay: float, count: int) -> tuple[float, ...]:
    """Return the weights of checkpoints in their exponential moving average, which begins at the first.

    The average after checkpoint i is ``decay`` times the average before it plus ``1 - decay`` times the checkpoint.

    Args:
        decay: A number between 0 and 1.
        count: Number of checkpoints, the oldest first.
    """
    return tuple((1 - decay if i else 1.0) * decay ** (count - 1 - i) for i in range(count))
