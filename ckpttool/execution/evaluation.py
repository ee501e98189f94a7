"""Compute the values of formulas, chunk by chunk, as torch computes them on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ckpttool.dtypes import DTYPES, numpy_dtype
from ckpttool.execution.products import product
from ckpttool.model.formulas import MERGED_ROWS, MergedWeight, ScaledSum, WeightedMean
from ckpttool.plan.casts import cast

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ckpttool.model import State
    from ckpttool.model.formulas import Formula, LowRankUpdate


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
    elif isinstance(formula, ScaledSum):
        _scaled_sum(formula, first, out, inputs)
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


def _scaled_sum(formula: ScaledSum, first: int, out: NDArray[Any], inputs: Inputs) -> None:
    with np.errstate(all="ignore"):
        for at, values in inputs.runs(formula.base, first, len(out)):
            out[at : at + len(values)] = cast(values, "F32")
        for state, scaling in zip(formula.terms, formula.scalings, strict=True):
            for at, values in inputs.runs(state, first, len(out)):
                out[at : at + len(values)] += cast(values, "F32") * np.float32(scaling)


def _merged_weight(formula: MergedWeight, first: int, out: NDArray[Any], inputs: Inputs) -> None:
    """Compute whole rows around the wanted elements, and at least MERGED_ROWS of them."""
    rows, columns = formula.base.shape
    low, high = first // columns, -(-(first + len(out)) // columns)
    normed = any(update.magnitude is not None for update in formula.updates)
    if not normed:
        for at, values in inputs.runs(formula.base, first, len(out)):
            out[at : at + len(values)] = cast(values, "F32")
    top = max(0, min(low, rows - MERGED_ROWS))
    bottom = min(rows, max(high, top + MERGED_ROWS))
    skip = first - low * columns
    with np.errstate(all="ignore"):
        for update in formula.updates:
            delta = _delta(formula, update, top, bottom, inputs)[low - top : high - top]
            if update.magnitude is None:
                out += delta.reshape(-1)[skip : skip + len(out)]
                continue
            total = inputs.scratch("rows", (high - low) * columns, "F32")
            for at, values in inputs.runs(formula.base, low * columns, len(total)):
                total[at : at + len(values)] = cast(values, "F32")
            total += delta.reshape(-1)
            weight = total.reshape(high - low, columns)
            magnitude = inputs.whole(update.magnitude, formula).reshape(-1)[low:high]
            weight *= (magnitude / row_norms(weight))[:, None]
            out[:] = total[skip : skip + len(out)]


def _delta(formula: MergedWeight, update: LowRankUpdate, top: int, bottom: int, inputs: Inputs) -> NDArray[np.float32]:
    """Return rows of the update, as the base weight has them."""
    a, b = inputs.whole(update.a, formula), inputs.whole(update.b, formula)
    delta = product(a[:, top:bottom].T, b.T) if formula.transposed else product(b[top:bottom], a)
    delta *= np.float32(update.scaling)
    return delta


NORM_LANES = 8
"""Partial sums of squares that torch makes of a row."""


def row_norms(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the Euclidean norm of each row, with the bits of ``torch.linalg.norm(matrix, dim=1)`` on a CPU.

    Source: torch 2.13, aten/src/ATen/native/cpu/ReduceOpsKernel.cpp (``norm_kernel_tensor_iterator_impl``): eight
    partial sums, added from the first to the last, then the elements behind the last eight.
    """
    rows, columns = matrix.shape
    whole = columns - columns % NORM_LANES
    squares = matrix * matrix
    sums = np.zeros((rows, NORM_LANES), dtype=np.float32)
    for start in range(0, whole, NORM_LANES):
        sums += squares[:, start : start + NORM_LANES]
    total = sums[:, 0].copy()
    for lane in range(1, NORM_LANES):
        total += sums[:, lane]
    for column in range(whole, columns):
        total += squares[:, column]
    result: NDArray[np.float32] = np.sqrt(total)
    return result


def _widened(values: NDArray[Any], accumulator: np.dtype[Any]) -> NDArray[Any]:
    """Return values in the accumulator's type, by way of fp32 as torch widens them."""
    if values.dtype == accumulator:
        return values
    return cast(values, "F32").astype(accumulator, copy=False)


def _name(values: NDArray[Any]) -> str:
    return next(name for name, dtype in DTYPES.items() if dtype.numpy == values.dtype.name)
