"""The order of a flat buffer under ``round_robin_gradients``, and its inverse.

Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py (``_round_robin_reorder``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def round_robin(names: Sequence[str], ranks: int) -> list[str]:
    """Return the order of a flat buffer: every ``ranks``-th parameter, ``ranks`` times."""
    return [name for j in range(ranks) for name in names[j::ranks]]


def undo_round_robin(stored: Sequence[str], ranks: int) -> list[str]:
    """Convert the order of a flat buffer to the optimizer's order."""
    order = round_robin([str(i) for i in range(len(stored))], ranks)
    result = [""] * len(stored)
    for name, place in zip(stored, order, strict=True):
        result[int(place)] = name
    return result
