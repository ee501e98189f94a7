"""Formulas of computed states, as data: the computation and its input states.

``execution.state_reader`` computes the values, chunk by chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttool.model import Formula

if TYPE_CHECKING:
    from ckpttool.model import State


@dataclass(frozen=True, slots=True, eq=False)
class WeightedMean(Formula):
    """The weighted mean of states of one shape, element by element.

    The first input times its weight; then the product of each further input with its weight is added, in order; then
    the sum is divided by the sum of the weights. Each product, sum and quotient is rounded to ``accumulator``.
    """

    terms: tuple[State, ...]
    """The states to average."""
    weights: tuple[float, ...]
    """One number for each; they need not sum to 1."""
    accumulator: str
    """Type to compute in: "F32" or "F64"."""

    @property
    def inputs(self) -> tuple[State, ...]:
        """The terms."""
        return self.terms

    @property
    def key(self) -> str:
        """The weights and the accumulator."""
        return repr(("mean", self.weights, self.accumulator))


@dataclass(frozen=True, slots=True, eq=False)
class LowRankUpdate:
    """The update that one LoRA adapter adds to a weight: ``scaling * (b @ a)``."""

    a: State
    """lora_A: (rank, input features)."""
    b: State
    """lora_B: (output features, rank)."""
    scaling: float
    """alpha / rank, or alpha / sqrt(rank)."""
    magnitude: State | None = None
    """DoRA's magnitudes: (output features,); None for LoRA."""


@dataclass(frozen=True, slots=True, eq=False)
class MergedWeight(Formula):
    """A weight with LoRA adapters merged into it: computed in fp64, and rounded once to fp32.

    Source: peft 0.21, tuners/lora/layer.py (``Linear.merge``, ``get_delta_weight``) and tuners/lora/variants.py
    (``DoraLinearVariant.merge_unsafe``).
    """

    base: State
    """The weight without adapters: (output features, input features)."""
    updates: tuple[LowRankUpdate, ...]
    """The adapters, in the order of merging; one with magnitudes is the only one."""

    @property
    def inputs(self) -> tuple[State, ...]:
        """The weight, then the matrices of each adapter."""
        matrices = (s for u in self.updates for s in (u.a, u.b, u.magnitude) if s is not None)
        return (self.base, *matrices)

    @property
    def key(self) -> str:
        """The scalings, and which adapters have magnitudes."""
        return repr(("lora", [(u.scaling, u.magnitude is not None) for u in self.updates]))

    @property
    def block(self) -> int:
        """Rows, so that few products are computed for each."""
        return MERGED_ROWS * self.base.shape[1]


MERGED_ROWS = 16
"""Minimum rows that are computed together: one matrix product serves all of them."""
