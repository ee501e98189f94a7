"""Compare two checkpoints bit for bit, and keep what differs; check a checkpoint and what deltas make of it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.analysis.fingerprint import TensorSum, fingerprint
from ckpttool.concurrency import default_jobs, in_threads
from ckpttool.dtypes import itemsize, numpy_dtype
from ckpttool.execution.check_copies import failed_checks
from ckpttool.execution.evaluation import apply_patches
from ckpttool.execution.read_checks import checks_for
from ckpttool.execution.sources import Sources
from ckpttool.execution.state_reader import StateReader, chunk_elements
from ckpttool.model import State
from ckpttool.model.derived.delta import Change, TensorType
from ckpttool.model.extents import blank_rows
from ckpttool.model.places import Table
from ckpttool.plan.casts import cast, count_overflowed
from ckpttool.plan.copy_checks import sample_checks, source_files

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ckpttool.execution.read_checks import Check, ReadChecks
    from ckpttool.model import Checkpoint
    from ckpttool.model.derived.delta import Result, Step, TypedState
    from ckpttool.storage.spool import Spool
    from ckpttool.units import Advance

SPOOL_BYTES = 1 << 20
"""Bytes of indices or values of a tensor to collect before they are spooled."""
WORD = 8
"""Bytes that are compared at once."""
DENSE_WORDS = 4
"""If more than one word in this many differs, all elements are compared at once."""
INT32_ELEMENTS = 1 << 31
"""Elements of a tensor from which on indices take 64 bits."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences between two checkpoints."""

    changes: tuple[Change, ...]
    """The tensors that differ, in the order of the second checkpoint."""
    begins: str
    """Fingerprint of the first."""
    ends: str
    """Fingerprint of the second."""
    overflowed: int
    """Finite values of the second that its type in the delta is too narrow for."""


class Compared:
    """Two open checkpoints, and the tensors to compare.

    Args:
        a: The first checkpoint.
        b: The second.
        check: Which recorded CRC-32 to compare while reading.
    """

    def __init__(self, a: Checkpoint, b: Checkpoint, check: Check) -> None:
        self.checkpoints = (a, b)
        self._files = source_files(a), source_files(b)
        self.checks: tuple[ReadChecks | None, ...] = tuple(
            checks_for(files, c, check) for files, c in zip(self._files, self.checkpoints, strict=True)
        )

    def compare(
        self,
        first: Mapping[str, TypedState],
        second: Mapping[str, TypedState],
        spool: Spool | None,
        *,
        jobs: int | None,
        advance: Advance,
    ) -> Comparison:
        """Read both checkpoints once, in small parts.

        Args:
            first: The tensors of the first checkpoint, under the names of the second where there is one of that type
                and shape.
            second: Those of the second.
            spool: Takes indices and values; None to count them only.
            jobs: Threads.
            advance: Called with the number of bytes read since the last call.

        Raises:
            CkptError: A checkpoint is not sound, or cannot be read.
        """
        with Sources(self._files[0], self.checks[0]) as left, Sources(self._files[1], self.checks[1]) as right:
            for checkpoint, sources in zip(self.checkpoints, (left, right), strict=True):
                for problem in failed_checks(sample_checks(checkpoint), advance=lambda _: None, sources=sources):
                    raise problem
            pairs = [n for n in second if n in first and first[n].type == second[n].type]
            alone = [(left, 0, n, t) for n, t in first.items() if n not in second or t.type != second[n].type]
            alone += [(right, 1, n, t) for n, t in second.items() if n not in first or t.type != first[n].type]
            tasks = [partial(_one, left, right, n, first[n], second[n], spool, advance) for n in pairs]
            tasks += [partial(_alone, sources, side, n, typed, advance) for sources, side, n, typed in alone]
            threads = in_threads(iter(tasks), jobs or default_jobs(remote=left.remote or right.remote))
            with contextlib.closing(threads) as results:
                found = list(results)
            for sources in (left, right):
                sources.finish_checks(jobs=jobs)
                sources.check_unchanged()
        changes = {f.change.name: f.change for f in found if f.change is not None}
        return Comparison(
            tuple(changes[n] for n in second if n in changes),
            fingerprint(f.sums[0] for f in found if f.sums[0]),
            fingerprint(f.sums[1] for f in found if f.sums[1]),
            sum(f.overflowed for f in found),
        )


@dataclass(frozen=True, slots=True)
class _Found:
    """The comparison of one tensor."""

    sums: tuple[bytes, bytes]
    """Its parts of both fingerprints; empty where a checkpoint lacks it."""
    change: Change | None = None
    """How it differs."""
    overflowed: int = 0
    """Finite values of the second that became infinite."""


def _one(
    left: Sources, right: Sources, name: str, a: TypedState, b: TypedState, spool: Spool | None, advance: Advance
) -> _Found:
    """Compare a tensor that both have."""
    sums = TensorSum(name, b.type), TensorSum(name, b.type)
    columns = _Columns(b.type, spool)
    overflowed = 0
    step = chunk_elements(left, right)
    ours, theirs = StateReader(left).chunks(a.state, step=step), StateReader(right).chunks(b.state, step=step)
    for (at, x), (_, y) in zip(ours, theirs, strict=True):
        old, new = cast(x, a.dtype), cast(y, b.dtype)
        overflowed += count_overflowed(y, new)
        sums[0].update(old)
        sums[1].update(new)
        columns.add(at, differing(old, new), new)
        advance(x.nbytes + y.nbytes)
    return _Found((sums[0].line, sums[1].line), columns.change(name), overflowed)


def _alone(sources: Sources, side: int, name: str, typed: TypedState, advance: Advance) -> _Found:
    """Read a tensor that only one has, or that has another shape or type in the other."""
    total = TensorSum(name, typed.type)
    overflowed = 0
    for _, values in StateReader(sources).chunks(typed.state):
        result = cast(values, typed.dtype)
        overflowed += count_overflowed(values, result)
        total.update(result)
        advance(values.nbytes)
    if side == 0:
        return _Found((total.line, b""))
    return _Found((b"", total.line), Change(name, typed.state.numel, None, None), overflowed)


def differing(old: NDArray[Any], new: NDArray[Any]) -> NDArray[np.int64]:
    """Return the indices of elements whose bits differ, ascending: -0.0 differs from 0.0, a NaN equals itself.

    Words of several elements are compared first: most differ in few of them.

    Args:
        old: Elements of any type, of one dimension.
        new: As many of the same type.
    """
    width, bits = old.itemsize, f"u{old.itemsize}"
    x, y = old.view(bits), new.view(bits)
    per_word = WORD // width
    whole = len(x) - len(x) % per_word
    if per_word == 1 or not whole:
        return np.flatnonzero(x != y)
    words = np.flatnonzero(x[:whole].view("u8") != y[:whole].view("u8"))
    if len(words) * DENSE_WORDS > whole // per_word:
        return np.flatnonzero(x != y)
    inside = (words[:, None] * per_word + np.arange(per_word)).reshape(-1)
    inside = np.concatenate([inside, np.arange(whole, len(x))])
    found: NDArray[np.int64] = inside[x[inside] != y[inside]]
    return found


class _Columns:
    """Indices and values of the changed elements of one tensor, until they would take more bytes than the tensor.

    Args:
        kind: Type and shape of the tensor.
        spool: Takes them; None to count them only.
    """

    def __init__(self, kind: TensorType, spool: Spool | None) -> None:
        self._numel = kind.numel
        self._index = "I64" if self._numel >= INT32_ELEMENTS else "I32"
        self._dtype = kind.dtype
        self._spool = spool
        self._changed = 0
        self._pending: tuple[list[NDArray[Any]], list[NDArray[Any]]] = ([], [])
        self._waiting = 0
        self._runs: list[tuple[int, int, int]] = []
        """(offset of indices, offset of values, elements) in the spool."""

    @property
    def _sparse(self) -> bool:
        width = itemsize(self._dtype)
        return self._changed * (itemsize(self._index) + width) < self._numel * width

    def add(self, at: int, found: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Add the changed elements of a chunk.

        Args:
            at: Number of its first element.
            found: Indices in the chunk.
            values: The chunk.
        """
        self._changed += len(found)
        if self._spool is None or not len(found) or not self._sparse:
            return
        self._pending[0].append((found + at).astype(numpy_dtype(self._index)))
        self._pending[1].append(values[found])
        self._waiting += len(found)
        if self._waiting * itemsize(self._index) >= SPOOL_BYTES:
            self._flush(self._spool)

    def _flush(self, spool: Spool) -> None:
        at = [spool.append(np.concatenate(column).view(np.uint8).data) for column in self._pending]
        self._runs.append((at[0], at[1], self._waiting))
        self._pending = ([], [])
        self._waiting = 0

    def change(self, name: str) -> Change | None:
        """Return the change of the tensor; None if there is none."""
        if not self._changed:
            return None
        if not self._sparse:
            return Change(name, self._changed, None, None)
        if self._spool is not None and self._waiting:
            self._flush(self._spool)
        return Change(name, self._changed, self._column(0, self._index), self._column(1, self._dtype))

    def _column(self, number: int, dtype: str) -> State:
        rows = blank_rows(len(self._runs))
        rows["offset"] = [run[number] for run in self._runs]
        rows["numel"] = [run[2] for run in self._runs]
        rows["start"][1:] = np.cumsum(rows["numel"])[:-1]
        return State((self._changed,), dtype, Table(rows))


def fingerprints(result: Result, check: Check, *, jobs: int | None, advance: Advance) -> tuple[str, str]:
    """Return the fingerprints of a checkpoint, and of what deltas make of it; nothing is written.

    Args:
        result: The result of applying the deltas.
        check: Which recorded CRC-32 to compare while reading.
        jobs: Threads.
        advance: Called with the number of bytes of the first checkpoint read since the last call.

    Raises:
        CkptError: A file cannot be read, or does not match its checksums.
    """
    files = source_files(result.checkpoint)
    with Sources(files, checks_for(files, result.checkpoint, check)) as sources:
        for problem in failed_checks(sample_checks(result.checkpoint), advance=lambda _: None, sources=sources):
            raise problem
        starts = {id(step.start.state) for step in result.steps.values()}
        tasks = [partial(_before, sources, n, t, advance) for n, t in result.base.items() if id(t.state) not in starts]
        base = {id(typed.state): n for n, typed in result.base.items()}
        tasks += [
            partial(_both, sources, n, step, base.get(id(step.start.state)), advance)
            for n, step in result.steps.items()
        ]
        with contextlib.closing(in_threads(iter(tasks), jobs or default_jobs(remote=sources.remote))) as results:
            found = list(results)
        sources.finish_checks(jobs=jobs)
        sources.check_unchanged()
    first, last = (fingerprint(f[side] for f in found if f[side]) for side in (0, 1))
    return first, last


def _before(sources: Sources, name: str, typed: TypedState, advance: Advance) -> tuple[bytes, bytes]:
    """Read a tensor that the deltas remove or replace."""
    return _alone(sources, 0, name, typed, advance).sums


def _both(sources: Sources, name: str, step: Step, before: str | None, advance: Advance) -> tuple[bytes, bytes]:
    """Read a tensor of the result, and its values before the patches if they are the first checkpoint's."""
    state, dtype = step.start
    kind = TensorType(dtype, state.shape)
    old, new = TensorSum(before or name, kind), TensorSum(name, kind)
    reader, patcher = StateReader(sources), StateReader(sources)
    for at, values in reader.chunks(state):
        result = cast(values, dtype)
        if before is not None:
            old.update(result)
            advance(values.nbytes)
        if step.patches:
            result = result.copy() if result is values else result
            apply_patches(step.patches, at, result, patcher)
        new.update(result)
    return (old.line if before is not None else b""), new.line
