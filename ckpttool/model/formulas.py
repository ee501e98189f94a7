"""Formulas of computed states: what is computed from which other states, as data.

``execution.evaluation`` computes the values, chunk by chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpttool.model import State


class Formula(ABC):
    """The computation of a state's values from other states."""

    __slots__ = ()

    @property
    @abstractmethod
    def inputs(self) -> tuple[State, ...]:
        """The states that it reads, in the order of reading."""

    @property
    @abstractmethod
    def key(self) -> str:
        """Its kind and numbers: equal for two formulas that compute the same from equal inputs."""


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
