"""Runs a plan between local files.

Memory is a few small buffers for each thread, whatever the size of the checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.concurrency import MAX_JOBS, default_jobs, in_threads
from ckpttool.dtypes import itemsize
from ckpttool.execution.check_copies import failed_proofs
from ckpttool.execution.local_copy import Mover
from ckpttool.execution.sources import Sources, allow_open_files
from ckpttool.plan import ranges_read
from ckpttool.plan.shared_reads import SharedReads, find_shared_reads
from ckpttool.plan.split import runs_of, short_rows
from ckpttool.storage import reserve, translate_os_errors, write_at
from ckpttool.storage.block_writes import DIRECT_BYTES, OpenFile
from ckpttool.storage.direct_io import FILE_SYSTEMS, SHARING, file_system_of, open_direct
from ckpttool.storage.safe_files import opened

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from numpy.typing import NDArray

    from ckpttool.execution.output.staging import Journal
    from ckpttool.execution.read_checks import ReadChecks
    from ckpttool.plan import CopyPlan, TargetFile
    from ckpttool.storage.safe_files import Directory
    from ckpttool.units import Advance

DISK_JOBS = 6
"""Threads that are used unasked where some wait for the disk while others copy to memory."""
TASK_ELEMENTS = 1 << 24
"""Elements that a thread takes on at a time: 64 MB of fp32."""


@dataclass(slots=True)
class Result:
    """What running a plan found out."""

    overflowed: int = 0
    """Finite elements that became infinite in a narrower type."""


def run(
    plan: CopyPlan,
    directory: Directory | str,
    *,
    jobs: int | None,
    advance: Advance,
    journal: Journal | None = None,
    checks: ReadChecks | None = None,
) -> Result:
    """Write every file of a plan into a directory.

    Args:
        plan: What to write.
        directory: An existing directory, which nobody reads yet.
        jobs: Threads; None for as many as there are cores, up to MAX_JOBS; where they wait for the disk, MAX_JOBS, or
            DISK_JOBS if several files are only copied.
        advance: Told of bytes written.
        journal: Knows the files that are there already, and is told of those that are complete.
        checks: Compares what is read with recorded checksums; None to copy without.

    Raises:
        ChecksumError: What was read is not what was saved; what was written is of no use.
        LayoutError: A comparison of the plan does not hold; nothing was written.
        StorageError: Reading or writing failed, or a source changed meanwhile.
    """
    with Sources(plan.sources, checks) as sources:
        if plan.consistency is not None:
            for problem in failed_proofs(plan.consistency, advance=lambda _: None, sources=sources):
                raise problem
        with opened(directory) as into, _Files(plan, into, sources, advance, journal, checks) as files:
            # closing(): no thread may be left writing when the files are closed, whatever happens here.
            threads = in_threads(files.tasks(), jobs or files.default_jobs(), files.stopped)
            with contextlib.closing(threads) as results:
                overflowed = sum(results)
        sources.finish_checks(jobs=jobs)
        sources.check_unchanged()
    return Result(overflowed)


def nbytes_read(plan: CopyPlan) -> int:
    """Bytes that ``run`` reads to write all files: what is copied into one and cast into another is read once."""
    carried = find_shared_reads(plan, {n: file.copies for n, file in enumerate(plan.files)}).shared
    widths = np.array([itemsize(source) for source, _ in plan.casts], dtype=np.uint64)
    return plan.nbytes_read - sum(int((rows["numel"] * widths[rows["cast"]]).sum()) for rows in carried.values())


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
    mover, into = Mover(plan, sources, advance), OpenFile(path, fd)
    short = short_rows(plan.casts, file.copies, TASK_ELEMENTS)
    runs = [partial(mover.copy, rows, into) for rows in runs_of(short, TASK_ELEMENTS)]
    gathers = [partial(mover.gather, gather, into) for gather in file.gathers]
    # closing(): no thread may be left writing when the file is closed, whatever happens here.
    with contextlib.closing(in_threads(iter([*runs, *gathers]), jobs)) as results:
        return sum(results)


@dataclass(slots=True)
class _Begun(OpenFile):
    """A file of a plan that is being written."""

    file: TargetFile = field(kw_only=True)
    left: int = 1
    """Tasks that are not done, and one until all are known."""

    def close(self) -> None:
        """Let it go."""
        os.close(self.fd)
        if self.direct >= 0:
            os.close(self.direct)


class _Files:
    """The files of a plan, several of them at once.

    A file system writes one file for one thread at a time, so that a second one would only wait: a file whose bytes are
    only copied is one task. Where they are cast, which keeps cores busy, a file is many. Values that are copied into
    one file and cast into another are read once, by a task of the former.
    """

    def __init__(
        self,
        plan: CopyPlan,
        directory: Directory,
        sources: Sources,
        advance: Advance,
        journal: Journal | None,
        checks: ReadChecks | None,
    ) -> None:
        self._plan = plan
        self._directory = directory
        self._file_system = file_system_of(directory.path)
        self._mover = Mover(plan, sources, advance)
        self._advance = advance
        self._journal = journal
        self._checks = checks
        self._lock = threading.Lock()
        self._begun: dict[int, _Begun] = {}
        """By number, while it is open."""
        self.stopped = threading.Event()

    def default_jobs(self) -> int:
        """Threads that are used unasked."""
        if self._file_system not in FILE_SYSTEMS:
            return default_jobs()
        busy = any(file.gathers or _casts(self._plan, file.copies) for file in self._plan.files)
        return MAX_JOBS if busy or len(self._plan.files) == 1 else DISK_JOBS

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for out in self._begun.values():
            out.close()

    def tasks(self) -> Iterator[Callable[[], int]]:
        """What is to be done: each returns how many elements became infinite."""
        copies = {}
        for n, file in enumerate(self._plan.files):
            if self._journal is not None and self._journal.has(file.name, file.nbytes):
                self._advance(file.nbytes)
                if self._checks is not None:
                    self._checks.require_all(ranges_read(self._plan, file))
            else:
                copies[n] = short_rows(self._plan.casts, file.copies, TASK_ELEMENTS)
        riders = find_shared_reads(self._plan, copies)
        allow_open_files(len(self._plan.sources) + 2 * len(riders.files))
        for n in riders.files:
            self._begin(n)  # others write to it from the first task on
        for n in copies:
            out = self._begun.get(n) or self._begin(n)
            for task, onto in self._tasks_of(n, out, riders):
                with self._lock:
                    for m in onto:
                        self._begun[m].left += 1
                yield partial(self._do, task, onto)
            if n not in riders.files:
                self._done([n])
        self._done(riders.files)

    def _tasks_of(
        self, n: int, out: _Begun, riders: SharedReads
    ) -> Iterator[tuple[Sequence[Callable[[], int]], Collection[int]]]:
        """The tasks of a file, each with the files that it writes to."""
        rows, carried = riders.separate[n], riders.shared.get(n)
        onto = {n} if carried is None else {n, *carried["file"].tolist()}
        copy = partial(self._mover.copy, into=out, riders=carried, file=self._begun.__getitem__)
        runs = [partial(copy, run) for run in runs_of(rows, TASK_ELEMENTS)]
        parts = [*runs, *(partial(self._mover.gather, gather, out) for gather in out.file.gathers)]
        # A gather may cast nothing, but is work for a core all the same.
        if carried is not None or out.file.gathers or _casts(self._plan, rows):
            yield from (([part], onto) for part in parts)
        else:
            out.by_one = n not in riders.files
            yield parts, onto

    def _begin(self, n: int) -> _Begun:
        file = self._plan.files[n]
        path = os.path.join(self._directory.path, file.name)
        with translate_os_errors(path):
            fd = self._directory.create(file.name, file.mode)
        past_cache = self._file_system in FILE_SYSTEMS and file.nbytes >= DIRECT_BYTES
        direct = open_direct(file.name, self._directory) if past_cache else -1
        out = self._begun[n] = _Begun(path, fd, file=file, direct=direct, sharing=self._file_system in SHARING)
        reserve(fd, file.nbytes, path)
        for offset, data in file.literals:
            write_at(fd, data, offset, path)
        return out

    def _do(self, parts: Sequence[Callable[[], int]], onto: Collection[int]) -> int:
        overflowed = 0
        for part in parts:
            if self.stopped.is_set():
                return overflowed
            overflowed += part()
        self._done(onto)
        return overflowed

    def _done(self, numbers: Collection[int]) -> None:
        with self._lock:
            for n in numbers:
                out = self._begun[n]
                out.left -= 1
                if out.left:
                    continue
                del self._begun[n]
                out.close()
                if self._journal is not None:
                    self._journal.add(out.file.name, out.file.nbytes)


def _casts(plan: CopyPlan, rows: NDArray[np.void]) -> bool:
    # Not np.unique: it imports numpy.ma, which takes longer than the opening of a file.
    return any(plan.casts[i][0] != plan.casts[i][1] for i in set(rows["cast"].tolist()))
