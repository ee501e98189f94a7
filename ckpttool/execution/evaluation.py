"""Compute the values of formulas, chunk by chunk, as torch computes them on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ckpttool.dtypes import numpy_dtype
from ckpttool.model.formulas import WeightedMean
from ckpttool.plan.casts import cast

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ckpttool.model import State
    from ckpttool.model.formulas import Formula


class Inputs(Protocol):
    """Reads the inputs of formulas."""

    def runs(self, state: State, first: int, count: int) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield elements of a state in runs: (offset from ``first``, values); values are valid until the next run."""

    def scratch(self, name: str, count: int, dtype: str) -> NDArray[Any]:
        """Return an array of ``count`` elements, valid until the next call with this name."""


def evaluate(formula: Formula, first: int, out: NDArray[Any], inputs: Inputs) -> None:
    """Compute as many elements as ``out`` holds.

    Args:
        formula: The formula.
        first: The first element, in C order.
        out: The result, cast to its type.
        inputs: Reads the formula's inputs.

    Raises:
        StorageError: Reading failed, or a source changed meanwhile.
    """
    if not isinstance(formula, WeightedMean):
        raise TypeError(f"no evaluation of {type(formula).__name__}")
    _weighted_mean(formula, first, out, inputs)


def _weighted_mean(formula: WeightedMean, first: int, out: NDArray[Any], inputs: Inputs) -> None:
    accumulator = numpy_dtype(formula.accumulator)
    direct = out.dtype == accumulator
    total = out if direct else inputs.scratch("total", len(out), formula.accumulator)
    with np.errstate(all="ignore"):  # infinities of a source stay what they are
        for number, (state, weight) in enumerate(zip(formula.terms, formula.weights, strict=True)):
            factor = accumulator.type(weight)
            for at, values in inputs.runs(state, first, len(out)):
                into = total[at : at + len(values)]
                if number == 0:
                    np.multiply(_widened(values, accumulator), factor, out=into)
                elif weight == 1:
                    into += _widened(values, accumulator)
                else:
                    product = inputs.scratch("product", len(values), formula.accumulator)
                    into += np.multiply(_widened(values, accumulator), factor, out=product)
        divisor = accumulator.type(sum(formula.weights))
        if divisor != 1:
            total /= divisor
    if not direct:
        out[:] = cast(total, _name(out))


def _widened(values: NDArray[Any], accumulator: np.dtype[Any]) -> NDArray[Any]:
    """Return values in the accumulator's type, by way of fp32 as torch widens them."""
    if values.dtype == accumulator:
        return values
    return cast(values, "F32").astype(accumulator, copy=False)


def _name(values: NDArray[Any]) -> str:
    return {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[values.dtype.name]
