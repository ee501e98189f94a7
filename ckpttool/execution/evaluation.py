"""Compute the values of formulas, chunk by chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ckpttool.dtypes import DTYPES, numpy_dtype
from ckpttool.model.formulas import MergedWeight, WeightedMean
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

    def whole(self, state: State, owner: Formula) -> NDArray[np.float32]:
        """Return all elements of a small input in fp32, in its shape; kept while formulas are the same ``owner``."""


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
    if isinstance(formula, WeightedMean):
        _weighted_mean(formula, first, out, inputs)
    elif isinstance(formula, MergedWeight):
        _merged_weight(formula, first, out, inputs)
    else:
        raise TypeError(f"no evaluation of {type(formula).__name__}")


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


def _merged_weight(formula: MergedWeight, first: int, out: NDArray[Any], inputs: Inputs) -> None:
    """Compute whole rows around the wanted elements, in fp64."""
    columns = formula.base.shape[1]
    low, high = first // columns, -(-(first + len(out)) // columns)
    rows = inputs.scratch("rows", (high - low) * columns, "F64")
    for at, values in inputs.runs(formula.base, low * columns, len(rows)):
        rows[at : at + len(values)] = cast(values, "F32")
    weight = rows.reshape(high - low, columns)
    with np.errstate(all="ignore"):
        for update in formula.updates:
            a, b = (inputs.whole(state, formula).astype(np.float64) for state in (update.a, update.b))
            weight += (b[low:high] * update.scaling) @ a
            if update.magnitude is not None:
                magnitude = inputs.whole(update.magnitude, formula).reshape(-1)[low:high].astype(np.float64)
                weight *= (magnitude / np.linalg.norm(weight, axis=1))[:, None]
        out[:] = rows[first - low * columns :][: len(out)]


def _widened(values: NDArray[Any], accumulator: np.dtype[Any]) -> NDArray[Any]:
    """Return values in the accumulator's type, by way of fp32 as torch widens them."""
    if values.dtype == accumulator:
        return values
    return cast(values, "F32").astype(accumulator, copy=False)


def _name(values: NDArray[Any]) -> str:
    return next(name for name, dtype in DTYPES.items() if dtype.numpy == values.dtype.name)
