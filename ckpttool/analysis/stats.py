"""Compute statistics of the values of a checkpoint: extremes, mean, norm, counts of NaN and infinity."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.concurrency import default_jobs, in_threads
from ckpttool.execution.read_checks import checks_for
from ckpttool.execution.sources import Sources
from ckpttool.execution.state_reader import StateReader
from ckpttool.plan.copy_checks import source_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpttool.model import Checkpoint
    from ckpttool.model.selection import Content
    from ckpttool.units import Advance


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


def statistics(
    checkpoint: Checkpoint, tensors: Sequence[Content], *, jobs: int | None, advance: Advance
) -> Iterator[TensorStats]:
    """Yield statistics of some tensors, in order; read each once, chunk by chunk.

    Raises:
        ChecksumError: The bytes read differ from those saved.
        StorageError: Reading failed.
    """
    files = source_files(checkpoint)
    with Sources(files, checks_for(files, checkpoint, "read")) as sources:
        tasks = (partial(_one, sources, i, content, advance) for i, content in enumerate(tensors))
        with contextlib.closing(in_threads(tasks, jobs or default_jobs(remote=sources.remote))) as results:
            ready: dict[int, TensorStats] = {}
            following = 0
            for number, result in results:
                ready[number] = result
                while following in ready:
                    yield ready.pop(following)
                    following += 1
        sources.finish_checks(jobs=jobs)
        sources.check_unchanged()


def _one(sources: Sources, number: int, content: Content, advance: Advance) -> tuple[int, TensorStats]:
    state = content.state
    low, high, total, squares = math.inf, -math.inf, 0.0, 0.0
    finite = zeros = nan = inf = 0
    for _, values in StateReader(sources).chunks(state):
        advance(values.nbytes)
        if np.issubdtype(values.dtype, np.complexfloating):
            values = np.abs(values)
        wide = values.astype(np.float64)
        usable = wide[np.isfinite(wide)] if not np.isfinite(wide).all() else wide
        nan += int(np.isnan(wide).sum())
        inf += int(np.isinf(wide).sum())
        zeros += int((usable == 0).sum())
        if usable.size:
            finite += usable.size
            low, high = min(low, float(usable.min())), max(high, float(usable.max()))
            total += float(usable.sum())
            squares += float(np.dot(usable, usable))
    return number, TensorStats(
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
    )
