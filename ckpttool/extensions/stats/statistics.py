"""Compute statistics of the values of a checkpoint: extremes, mean, norm, counts of NaN and infinity."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.blocks import Line, Shown, Table
from ckpttool.concurrency import default_jobs, in_order
from ckpttool.dtypes import SHORT_NAMES
from ckpttool.execution.checks import checks_for
from ckpttool.execution.sources import Sources
from ckpttool.execution.state_reader import StateReader
from ckpttool.plan.builder import source_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from ckpttool.blocks import Block
    from ckpttool.model import Checkpoint
    from ckpttool.model.selection import Content
    from ckpttool.units import Advance


EXPONENTS = 2048
"""Exponents of a double."""
CHUNK_ELEMENTS = 1 << 18
"""Elements that are reduced at once: they fit into the cache."""
SKETCH_COLUMNS = 16
"""Characters of the small histogram in a row."""
COUNTS = ["NaN", "inf"]
"""Counts of values that are not finite."""
RARE = ["zeros", "type", "elements", "mean", "norm", "max", "min"]
"""The columns that a narrow terminal lacks, the first of them first; the counts before the others if all are 0."""
BARS = " ▁▂▃▄▅▆▇█"
"""Characters of rising height."""


@dataclass(frozen=True, slots=True)
class TensorStats:
    """Statistics of one tensor, computed in double precision over its finite values."""

    name: str
    """Parameter or buffer."""
    state: str
    """"weights", or the optimizer's name for the state."""
    dtype: str
    """safetensors' spelling."""
    shape: tuple[int, ...]
    """The whole tensor."""
    numel: int
    """Elements."""
    min: float
    """Smallest value; NaN if none is finite."""
    max: float
    """Largest value; NaN if none is finite."""
    mean: float
    """Mean; NaN if none is finite."""
    norm: float
    """Euclidean norm."""
    zeros: int
    """Elements that are zero."""
    nan: int
    """Elements that are NaN."""
    inf: int
    """Elements that are infinite, of either sign."""
    magnitudes: tuple[tuple[int, int, int], ...] = ()
    """Histogram of the finite values that are not zero, as (exponent, negative values, positive values) with
    ``2**exponent <= abs(value) < 2**(exponent + 1)``, by rising exponent; exponents without a value are left out. The
    lowest exponent, -1023, also stands for all smaller magnitudes, and its values all count as positive. Empty unless
    asked for."""


def statistics(
    checkpoint: Checkpoint, tensors: Sequence[Content], *, magnitudes: bool, jobs: int | None, advance: Advance
) -> Iterator[TensorStats]:
    """Yield statistics of some tensors, in order; read each once, chunk by chunk.

    Args:
        checkpoint: The checkpoint.
        tensors: The tensors.
        magnitudes: Whether to count ``TensorStats.magnitudes``, which takes as long as all the rest.
        jobs: Threads.
        advance: Called with the number of bytes read since the last call.

    Raises:
        ChecksumError: The bytes read differ from those saved.
        StorageError: Reading failed.
    """
    files = source_files(checkpoint)
    with Sources(files, checks_for(files, checkpoint, "read")) as sources:
        tasks = (partial(_one, sources, content, magnitudes, advance) for content in tensors)
        with contextlib.closing(in_order(tasks, jobs or default_jobs(remote=sources.remote))) as results:
            yield from results
        sources.finish(jobs=jobs)


def _one(sources: Sources, content: Content, magnitudes: bool, advance: Advance) -> TensorStats:
    state = content.state
    low, high, total, squares = math.inf, -math.inf, 0.0, 0.0
    finite = zeros = nan = inf = 0
    histogram = np.zeros(2 * EXPONENTS, dtype=np.int64)
    wide: NDArray[np.float64] = np.empty(min(state.numel, CHUNK_ELEMENTS))
    for _, values in StateReader(sources).chunks(state, step=CHUNK_ELEMENTS):
        advance(values.nbytes)
        usable = wide[: len(values)]
        usable[:] = np.abs(values) if np.issubdtype(values.dtype, np.complexfloating) else values
        kept = np.isfinite(usable)
        if not kept.all():
            nan += int(np.isnan(usable).sum())
            inf += int(np.isinf(usable).sum())
            usable = usable[kept]
        zeros += int(np.count_nonzero(usable == 0))
        if usable.size:
            finite += usable.size
            low, high = min(low, float(usable.min())), max(high, float(usable.max()))
            total += float(usable.sum())
            # Not np.dot: its library would start threads for each chunk.
            squares += float(np.einsum("i,i->", usable, usable))
        if magnitudes:  # the sign and the exponent are the first twelve bits of a double
            histogram += np.bincount((usable.view(np.int64) >> 52) & (2 * EXPONENTS - 1), minlength=2 * EXPONENTS)
    return TensorStats(
        name=content.name,
        state=content.key,
        dtype=state.dtype,
        shape=state.shape,
        numel=state.numel,
        min=low if finite else math.nan,
        max=high if finite else math.nan,
        mean=total / finite if finite else math.nan,
        norm=math.sqrt(squares),
        zeros=zeros,
        nan=nan,
        inf=inf,
        magnitudes=_magnitudes(histogram, zeros) if magnitudes else (),
    )


def _magnitudes(histogram: NDArray[np.int64], zeros: int) -> tuple[tuple[int, int, int], ...]:
    """Return the rows of ``TensorStats.magnitudes``.

    Args:
        histogram: Number of values by sign and biased exponent, zeros counted with the lowest exponent.
        zeros: Number of zeros.
    """
    positive, negative = histogram[:EXPONENTS].tolist(), histogram[EXPONENTS:].tolist()
    tiny = positive[0] + negative[0] - zeros  # below 2**-1022 even a double has no exponent of its own
    positive[0], negative[0] = tiny, 0
    return tuple((e - 1023, n, p) for e, (n, p) in enumerate(zip(negative, positive, strict=True)) if n or p)


def linear_histogram(stats: TensorStats, bins: int) -> list[float]:
    """Return the approximate number of values in bins of equal width from the smallest to the largest value.

    Within a power of two the values are taken to be spread evenly.
    """
    counts = [0.0] * bins
    if not stats.min < stats.max:
        return counts
    width = (stats.max - stats.min) / bins
    pieces = [(0.0, 0.0, stats.zeros)] if stats.zeros else []
    for exponent, negative, positive in stats.magnitudes:
        low, high = math.ldexp(1.0, exponent), math.ldexp(1.0, exponent + 1) if exponent < 1023 else math.inf
        pieces += [(-high, -low, negative), (low, high, positive)]
    for low, high, count in pieces:
        begin = (max(low, stats.min) - stats.min) / width
        end = (min(high, stats.max) - stats.min) / width
        if not count:
            continue
        first, last = (min(bins - 1, max(0, int(at))) for at in (begin, end))
        if first == last or end <= begin:
            counts[first] += count
            continue
        for at in range(first, last + 1):
            counts[at] += count * (min(end, at + 1) - max(begin, at)) / (end - begin)
    return counts


class Statistics(Shown, list[TensorStats]):
    """Statistics of each tensor; ``print`` and notebooks show a table."""

    def blocks(self) -> Iterator[Block]:
        """Return the output of the command."""
        return table(self, sketches=False)


def table(found: Sequence[TensorStats], *, sketches: bool) -> Iterator[Block]:
    """Yield one row for each tensor, then the number of tensors with NaN or infinity."""
    rows: list[tuple[str, ...]] = [
        (
            t.name,
            t.state,
            SHORT_NAMES.get(t.dtype, t.dtype.lower()),
            f"{t.numel:,}",
            *(f"{value:.6g}" for value in (t.min, t.max, t.mean, t.norm)),
            *(f"{count:,}" for count in (t.zeros, t.nan, t.inf)),
        )
        for t in found
    ]
    numbers = ["elements", "min", "max", "mean", "norm", "zeros", "NaN", "inf"]
    columns = ["tensor", "state", "type", *numbers]
    if sketches:
        columns.append("min to max")
        rows = [(*row, _sketch(t)) for row, t in zip(rows, found, strict=True)]
    odd = [t.name for t in found if t.nan or t.inf]
    rare = RARE if odd else [*COUNTS, *RARE]
    yield Table(columns, rows, right=numbers, whole=["type", "min to max"], rare=rare)
    if odd:
        yield Line(f"{len(odd)} tensors have values that are not finite", color="red")


def _sketch(stats: TensorStats) -> str:
    """Draw the distribution of a tensor's values from the smallest to the largest in a few characters."""
    counts = linear_histogram(stats, SKETCH_COLUMNS)
    most = max(counts)
    return "".join(BARS[math.ceil((len(BARS) - 1) * count / most)] for count in counts) if most else ""
