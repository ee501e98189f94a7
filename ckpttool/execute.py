"""Runs a plan between local files, where bytes move in the kernel or through a small buffer.

Memory is a few small buffers for each thread, whatever the size of the checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.casts import CAST_ELEMENTS, cast, count_overflowed
from ckpttool.dtypes import itemsize
from ckpttool.gather import Gatherer
from ckpttool.proving import failed_proofs
from ckpttool.sources import Scratch, Sources
from ckpttool.storage import LocalReader, copy_range, reserve, translate_os_errors, write_at
from ckpttool.threads import default_jobs, in_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from ckpttool.plan import CopyPlan, Gather, TargetFile
    from ckpttool.progress import Advance
    from ckpttool.staging import Journal
    from ckpttool.storage import Reader

BUFFER_BYTES = 1 << 17
"""Bytes copied at a time where they pass through this process, ending at multiples of it in the target: kernels keep
files in pieces of memory that fit the writes. Larger ones save calls, and cost more than that to find once memory is
fragmented (up to three times the time of the whole copy)."""
KERNEL_COPY_BYTES = 1 << 26
"""Bytes that the kernel copies between two reports of progress."""
TASK_ELEMENTS = 1 << 24
"""Elements that a thread takes on at a time: 64 MB of fp32."""
PAGE_BYTES = 4096
"""The unit in which kernels keep files in memory."""


@dataclass(slots=True)
class Result:
    """What running a plan found out."""

    overflowed: int = 0
    """Finite elements that became infinite in a narrower type."""


def run(
    plan: CopyPlan, directory: str, *, jobs: int | None, advance: Advance, journal: Journal | None = None
) -> Result:
    """Write every file of a plan into a directory.

    Args:
        plan: What to write.
        directory: An existing directory, which nobody reads yet.
        jobs: Threads; None for as many as there are cores, up to MAX_JOBS.
        advance: Told of bytes written.
        journal: Knows the files that are there already, and is told of those that are complete.

    Raises:
        LayoutError: A comparison of the plan does not hold; nothing was written.
        StorageError: Reading or writing failed, or a source changed meanwhile.
    """
    with Sources(plan.sources) as sources:
        if plan.proofs is not None:
            for problem in failed_proofs(plan.proofs, advance=lambda _: None, sources=sources):
                raise problem
        with _Files(plan, directory, sources, advance, journal) as files:
            # closing(): no thread may be left writing when the files are closed, whatever happens here.
            threads = in_threads(files.tasks(), jobs or default_jobs(), files.stopped)
            with contextlib.closing(threads) as results:
                overflowed = sum(results)
        sources.check_unchanged()
    return Result(overflowed)


class _Files:
    """The files of a plan, several of them at once.

    A file system writes one file for one thread at a time, so that a second one would only wait: a file whose bytes are
    only copied is one task. Where they are cast, which keeps cores busy, a file is many.
    """

    def __init__(
        self, plan: CopyPlan, directory: str, sources: Sources, advance: Advance, journal: Journal | None
    ) -> None:
        self._plan = plan
        self._directory = directory
        self._sources = sources
        self._advance = advance
        self._journal = journal
        self._lock = threading.Lock()
        self._left: dict[int, int] = {}
        """By file that is open: tasks that are not done."""
        self.stopped = threading.Event()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._left:
            os.close(fd)

    def tasks(self) -> Iterator[Callable[[], int]]:
        """What is to be done: each returns how many elements became infinite."""
        for file in self._plan.files:
            path = os.path.join(self._directory, file.name)
            if self._journal is not None and self._journal.has(file.name, file.nbytes):
                self._advance(file.nbytes)
                continue
            if "/" in file.name:
                with translate_os_errors(path):
                    os.makedirs(os.path.dirname(path), exist_ok=True)
            fd = _create(path, file)
            self._left[fd] = 1  # until all tasks are known
            parts = list(_parts(self._plan, file, self._sources, fd, path, self._advance))
            for task in [[part] for part in parts] if _casts(self._plan, file) else [parts]:
                with self._lock:
                    self._left[fd] += 1
                yield partial(self._do, task, file, fd)
            self._done(file, fd)

    def _do(self, parts: Sequence[Callable[[], int]], file: TargetFile, fd: int) -> int:
        overflowed = 0
        for part in parts:
            if self.stopped.is_set():
                return overflowed
            overflowed += part()
        self._done(file, fd)
        return overflowed

    def _done(self, file: TargetFile, fd: int) -> None:
        with self._lock:
            self._left[fd] -= 1
            if self._left[fd]:
                return
            del self._left[fd]
            os.close(fd)
            if self._journal is not None:
                self._journal.add(file.name)


# ------------------------------------------------------------------------------------------------- one target file


def fill(plan: CopyPlan, file: TargetFile, sources: Sources, fd: int, path: str, *, jobs: int, advance: Advance) -> int:
    """Make the copies and gathers of a file, or of a part of one.

    Args:
        plan: What the file is part of.
        file: Where its bytes come from.
        sources: What it is made of.
        fd: The file, open for writing.
        path: What errors call it.
        jobs: Threads.
        advance: Told of bytes written.

    Returns:
        Finite elements that became infinite in a narrower type.

    Raises:
        StorageError: Reading or writing failed, or a source changed meanwhile.
    """
    # closing(): no thread may be left writing when the file is closed, whatever happens here.
    with contextlib.closing(in_threads(_parts(plan, file, sources, fd, path, advance), jobs)) as results:
        return sum(results)


def _parts(
    plan: CopyPlan, file: TargetFile, sources: Sources, fd: int, path: str, advance: Advance
) -> Iterator[Callable[[], int]]:
    for rows in _split(plan, file):
        yield partial(_copy, plan, sources, rows, fd, path, advance)
    for gather in file.gathers:
        yield partial(_gather, sources, gather, fd, path, advance)


def _create(path: str, file: TargetFile) -> int:
    with translate_os_errors(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        reserve(fd, file.nbytes, path)
        for offset, data in file.literals:
            write_at(fd, data, offset, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _casts(plan: CopyPlan, file: TargetFile) -> bool:
    if file.gathers:
        return True  # no cast perhaps, but work for a core all the same
    # Not np.unique: it imports numpy.ma, which takes longer than the opening of a file.
    return any(plan.casts[i][0] != plan.casts[i][1] for i in set(file.copies["cast"].tolist()))


def _split(plan: CopyPlan, file: TargetFile) -> Iterator[NDArray[np.void]]:
    """Cut a file's copies into runs of about TASK_ELEMENTS, so that threads share the work evenly.

    A copy that is longer is itself cut: a thread cannot be stopped in the middle of one.
    """
    if not len(file.copies):
        return
    pieces = -(-file.copies["numel"].astype(np.int64) // TASK_ELEMENTS)
    rows = np.repeat(file.copies, pieces)
    number = np.arange(len(rows)) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # 0, 1, 2 within each copy
    done = (number * TASK_ELEMENTS).astype(np.uint64)
    source, target = (np.array([itemsize(pair[side]) for pair in plan.casts], dtype=np.uint64) for side in (0, 1))
    rows["start"] += done * source[rows["cast"]]
    rows["target"] += done * target[rows["cast"]]
    rows["numel"] = np.minimum(rows["numel"] - done, np.uint64(TASK_ELEMENTS))
    bounds = np.flatnonzero(np.diff(np.cumsum(rows["numel"]) // np.uint64(TASK_ELEMENTS))) + 1
    yield from np.split(rows, bounds)


def _copy(plan: CopyPlan, sources: Sources, rows: NDArray[np.void], fd: int, path: str, advance: Advance) -> int:
    overflowed = 0
    scratch = Scratch()
    for row in rows:
        source = sources[int(row["source"])]
        pair = plan.casts[int(row["cast"])]
        start, numel, target = int(row["start"]), int(row["numel"]), int(row["target"])
        if pair[0] == pair[1]:
            _copy_bytes(source, start, numel * itemsize(pair[0]), fd, target, path, advance, scratch)
        else:
            overflowed += _copy_cast(source, start, numel, pair, fd, target, path, advance, scratch)
    return overflowed


def _gather(sources: Sources, gather: Gather, fd: int, path: str, advance: Advance) -> int:
    overflowed = 0
    at = gather.target
    for _, values in Gatherer(sources).chunks(gather.state, gather.first, gather.first + gather.numel):
        result = cast(values, gather.dtype)
        write_at(fd, result.view(np.uint8).data, at, path)
        overflowed += count_overflowed(values, result)
        advance(result.nbytes)
        at += result.nbytes
    return overflowed


def _copy_bytes(
    source: Reader, start: int, nbytes: int, fd: int, target: int, path: str, advance: Advance, scratch: Scratch
) -> None:
    """Copy bytes as they are.

    The kernel's own copy moves (or, where the file system can, shares) whole pages if source and target lie at the same
    place in a page. If they do not it splits every page, and one large buffer is cheaper.
    """
    by_kernel = (start - target) % PAGE_BYTES == 0
    done = 0
    while done < nbytes:
        if by_kernel and isinstance(source, LocalReader):
            count = min(KERNEL_COPY_BYTES, nbytes - done)
            by_kernel = copy_range(source, start + done, fd, target + done, count, path)
            if not by_kernel:
                continue
        else:
            count = min(nbytes - done, BUFFER_BYTES - (target + done) % BUFFER_BYTES)
            write_at(fd, scratch.read_bytes(source, start + done, count), target + done, path)
        done += count
        advance(count)


def _copy_cast(
    source: Reader, start: int, numel: int, pair: tuple[str, str], fd: int, target: int, path: str,
    advance: Advance, scratch: Scratch,
) -> int:  # fmt: skip
    overflowed = 0
    while numel:
        count = min(numel, CAST_ELEMENTS)
        values = scratch.read(source, start, count, pair[0])
        result = cast(values, pair[1])
        write_at(fd, result.view(np.uint8).data, target, path)
        overflowed += count_overflowed(values, result)
        advance(result.nbytes)
        start += values.nbytes
        target += result.nbytes
        numel -= count
    return overflowed
