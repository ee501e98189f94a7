"""Compare the copies of a state in a checkpoint, element by element: module weights with their master weights."""

from __future__ import annotations

import contextlib
import os
import threading
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.concurrency import in_order
from ckpttool.dtypes import SHORT_NAMES, itemsize, numpy_dtype
from ckpttool.errors import LayoutError, PlanError
from ckpttool.execution.sources import Sources
from ckpttool.plan.casts import CAST_ELEMENTS, cast, same_values
from ckpttool.storage.buffers import ReadBuffer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ckpttool.errors import CkptError
    from ckpttool.plan import ConsistencyChecks
    from ckpttool.units import Advance


REMOTE_BYTES = 1 << 25
"""Bytes requested at once from remote storages."""


def failed_checks(
    checks: ConsistencyChecks, *, advance: Advance, sources: Sources | None = None, jobs: int = 1
) -> Iterator[CkptError]:
    """Run every consistency check and yield one error for each parameter that fails.

    A ``PlanError`` means that the names of the masters are unknown; a ``LayoutError`` that the files are damaged.

    Args:
        checks: The consistency checks.
        advance: Called with the number of bytes compared since the last call.
        sources: Open sources of the checks; None to open and close them here.
        jobs: Threads for local files.

    Raises:
        StorageError: Reading failed, or a source changed meanwhile.
    """
    opened = sources or Sources(checks.sources)
    failed: set[int] = set()
    try:
        compare = _compare_remote if opened.remote else partial(_compare, jobs)
        for row, same in compare(checks, opened, failed, advance):
            name = int(row["name"])
            if same or name in failed:
                continue
            failed.add(name)
            master, copy = (SHORT_NAMES.get(d, d) for d in checks.casts[int(row["cast"])])
            if name in checks.guessed:
                problem = f"does not record which {master} master {checks.names[name]} has: several have its shape"
                hint = 'resume from it with ckpttool.load, or consolidate with weights_from="module"'
                yield PlanError(checks.sources[int(row["copy_source"])].path, problem, hint, ("weights_from",))
                continue
            yield LayoutError(
                checks.sources[int(row["copy_source"])].path,
                f"the {copy} copy of {checks.names[name]} differs from its {master} master in "
                f"{os.path.basename(checks.sources[int(row['source'])].path)}",
                "two saves are mixed (restore it from a copy), or the model was changed after the optimizer's last "
                'step (then consolidate with weights_from="module" writes the model\'s own copies)',
                ("weights_from",),
            )
    finally:
        if sources is None:
            opened.close()


_Chunk = tuple[Any, tuple[int, int, int], tuple[int, int, int]]
"""A row of the checks, and the byte ranges (file, start, end) of the masters and copies of some of its elements."""


def _chunks(checks: ConsistencyChecks, failed: set[int]) -> Iterator[_Chunk]:
    for row in checks.rows:
        master, copy = (itemsize(dtype) for dtype in checks.casts[int(row["cast"])])
        start, copy_start, numel = int(row["start"]), int(row["copy_start"]), int(row["numel"])
        for first in range(0, numel, CAST_ELEMENTS):
            if int(row["name"]) in failed:
                break
            last = min(first + CAST_ELEMENTS, numel)
            ours = (int(row["source"]), start + first * master, start + last * master)
            yield row, ours, (int(row["copy_source"]), copy_start + first * copy, copy_start + last * copy)


def _compare(
    jobs: int, checks: ConsistencyChecks, sources: Sources, failed: set[int], advance: Advance
) -> Iterator[tuple[Any, bool]]:
    of_thread = threading.local()

    def compare(chunk: _Chunk) -> tuple[Any, bool]:
        if not hasattr(of_thread, "sides"):
            of_thread.sides = ReadBuffer(), ReadBuffer()
        row, *spans = chunk
        ours, theirs = (
            buffer.read_bytes(sources.raw(file), start, end - start)
            for buffer, (file, start, end) in zip(of_thread.sides, spans, strict=True)
        )
        same = _same(checks, row, ours, theirs)
        advance(len(ours) + len(theirs))
        return row, same

    with contextlib.closing(in_order((partial(compare, chunk) for chunk in _chunks(checks, failed)), jobs)) as found:
        yield from found


def _compare_remote(
    checks: ConsistencyChecks, sources: Sources, failed: set[int], advance: Advance
) -> Iterator[tuple[Any, bool]]:
    """Compare as ``_compare``, but fetch many chunks at once: each small request costs a round trip."""
    batch: list[_Chunk] = []
    nbytes = 0
    for chunk in chain(_chunks(checks, failed), [None]):
        if chunk is not None:
            batch.append(chunk)
            nbytes += sum(end - start for _, start, end in chunk[1:])
        if batch and (chunk is None or nbytes >= REMOTE_BYTES):
            data = sources.fetch([span for _, *spans in batch for span in spans], hashed=False)
            for number, (row, *_) in enumerate(batch):
                yield row, _same(checks, row, data[2 * number], data[2 * number + 1])
            advance(nbytes)
            batch, nbytes = [], 0


def _same(checks: ConsistencyChecks, row: Any, ours: memoryview, theirs: memoryview) -> bool:
    master, copy = checks.casts[int(row["cast"])]
    values: NDArray[Any] = np.frombuffer(ours, dtype=numpy_dtype(master))
    held: NDArray[Any] = np.frombuffer(theirs, dtype=numpy_dtype(copy))
    return bool(same_values(cast(values, copy), held).all())
