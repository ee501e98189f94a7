"""Formulas of computed states: a weighted mean, and a weight with LoRA adapters merged into it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.dtypes import DTYPES, numpy_dtype
from ckpttool.model import Formula
from ckpttool.plan.casts import cast

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckpttool.execution.state_reader import StateReader
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

    def fill(self, first: int, out: NDArray[Any], inputs: StateReader) -> None:
        """Compute each term in the accumulator's type."""
        accumulator = numpy_dtype(self.accumulator)
        direct = out.dtype == accumulator
        total = out if direct else inputs.scratch("total", len(out), self.accumulator)
        with np.errstate(all="ignore"):  # infinities of a source are kept
            for number, (state, weight) in enumerate(zip(self.terms, self.weights, strict=True)):
                factor = accumulator.type(weight)
                for at, values in inputs.runs(state, first, len(out)):
                    into = total[at : at + len(values)]
                    if number == 0:
                        np.multiply(_widened(values, accumulator), factor, out=into)
                    elif weight == 1:
                        into += _widened(values, accumulator)
                    else:
                        product = inputs.scratch("product", len(values), self.accumulator)
                        into += np.multiply(_widened(values, accumulator), factor, out=product)
            divisor = accumulator.type(sum(self.weights))
            if divisor != 1:
                total /= divisor
        if not direct:
            out[:] = cast(total, _name(out))


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

    def fill(self, first: int, out: NDArray[Any], inputs: StateReader) -> None:
        """Compute whole rows around the wanted elements, in fp64."""
        columns = self.base.shape[1]
        low, high = first // columns, -(-(first + len(out)) // columns)
        rows = inputs.scratch("rows", (high - low) * columns, "F64")
        for at, values in inputs.runs(self.base, low * columns, len(rows)):
            rows[at : at + len(values)] = cast(values, "F32")
        weight = rows.reshape(high - low, columns)
        with np.errstate(all="ignore"):
            for update in self.updates:
                a, b = (inputs.whole(state, self).astype(np.float64) for state in (update.a, update.b))
                weight += (b[low:high] * update.scaling) @ a
                if update.magnitude is not None:
                    magnitude = inputs.whole(update.magnitude, self).reshape(-1)[low:high].astype(np.float64)
                    weight *= (magnitude / np.linalg.norm(weight, axis=1))[:, None]
            out[:] = rows[first - low * columns :][: len(out)]


MERGED_ROWS = 16
"""Minimum rows that are computed together: one matrix product serves all of them."""


def _widened(values: NDArray[Any], accumulator: np.dtype[Any]) -> NDArray[Any]:
    """Return values in the accumulator's type, by way of fp32 as torch widens them."""
    if values.dtype == accumulator:
        return values
    return cast(values, "F32").astype(accumulator, copy=False)


def _name(values: NDArray[Any]) -> str:
    return next(name for name, dtype in DTYPES.items() if dtype.numpy == values.dtype.name)
