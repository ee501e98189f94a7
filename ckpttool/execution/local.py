"""Run a plan between local files.

Memory is bounded by a few small buffers per thread, whatever the size of the checkpoint.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.concurrency import default_jobs, in_threads
from ckpttool.dtypes import itemsize
from ckpttool.execution.check_copies import failed_checks
from ckpttool.execution.local_copy import LocalCopier, OpenFile
from ckpttool.execution.sources import Sources, allow_open_files
from ckpttool.plan import ranges_read
from ckpttool.plan.shared_reads import SharedReads, find_shared_reads
from ckpttool.plan.split import runs_of, short_rows
from ckpttool.storage import write_at
from ckpttool.storage.direct_io import SHARING, file_system_of
from ckpttool.storage.directory_writer import DirectoryWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from numpy.typing import NDArray

    from ckpttool.execution.read_checks import ReadChecks
    from ckpttool.plan import CopyPlan, TargetFile
    from ckpttool.storage.journal import Journal
    from ckpttool.storage.safe_files import Directory
    from ckpttool.units import Advance

TASK_ELEMENTS = 1 << 24
"""Elements of one task: 64 MB of fp32."""


def run(
    plan: CopyPlan,
    directory: Directory,
    *,
    jobs: int | None,
    advance: Advance,
    journal: Journal | None = None,
    checks: ReadChecks | None = None,
) -> int:
    """Write every file of a plan into a directory.

    Args:
        plan: The plan.
        directory: An existing directory, not yet visible to readers.
        jobs: Threads; None for the number of cores, up to MAX_JOBS.
        advance: Called with the number of bytes written since the last call.
        journal: Lists the files that an earlier run completed; completed files are added to it.
        checks: Compares the bytes read with recorded checksums; None to copy without.

    Returns:
        Number of finite elements cast to infinity.

    Raises:
        ChecksumError: A source does not match its recorded checksum; discard the output.
        LayoutError: A consistency check of the plan failed; nothing was written.
        StorageError: Reading or writing failed, or a source changed meanwhile.
    """
    with Sources(plan.sources, checks) as sources:
        if plan.consistency is not None:
            for problem in failed_checks(plan.consistency, advance=lambda _: None, sources=sources):
                raise problem
        with _PlanWriter(plan, directory, sources, advance, journal, checks) as files:
            # closing(): no thread may write after the files are closed, even after an error.
            threads = in_threads(files.tasks(), jobs or default_jobs(), files.stopped)
            with contextlib.closing(threads) as results:
                overflowed = sum(results)
        sources.finish_checks(jobs=jobs)
        sources.check_unchanged()
    return overflowed


def nbytes_read(plan: CopyPlan) -> int:
    """Return the number of source bytes that ``run`` reads; shared reads count once."""
    shared_reads = find_shared_reads(plan, {n: file.copies for n, file in enumerate(plan.files)}).shared
    widths = np.array([itemsize(source) for source, _ in plan.casts], dtype=np.uint64)
    return plan.nbytes_read - sum(int((rows["numel"] * widths[rows["cast"]]).sum()) for rows in shared_reads.values())


def fill(plan: CopyPlan, file: TargetFile, sources: Sources, fd: int, path: str, *, jobs: int, advance: Advance) -> int:
    """Write the copies and gathers of a file, or of a part of one.

    Args:
        plan: The plan of the file.
        file: The target file, or the part of it to write.
        sources: The source files of the plan.
        fd: The file, open for writing.
        path: Path of the file, for errors.
        jobs: Threads.
        advance: Called with the number of bytes written since the last call.

    Returns:
        Number of finite elements cast to infinity.

    Raises:
        StorageError: Reading or writing failed, or a source changed meanwhile.
    """
    copier, into = LocalCopier(plan, sources, advance), OpenFile(path, fd)
    short = short_rows(plan.casts, file.copies, TASK_ELEMENTS)
    runs = [partial(copier.copy, rows, into) for rows in runs_of(short, TASK_ELEMENTS)]
    gathers = [partial(copier.gather, gather, into) for gather in file.gathers]
    # closing(): no thread may write after the file is closed, even after an error.
    with contextlib.closing(in_threads(iter([*runs, *gathers]), jobs)) as results:
        return sum(results)


@dataclass(slots=True)
class _OpenTarget(OpenFile):
    """An open target file of a plan."""

    file: TargetFile = field(kw_only=True)
    writer: DirectoryWriter = field(kw_only=True)
    left: int = 1
    """Number of unfinished tasks, plus one until all tasks are known."""


class _PlanWriter:
    """Write the files of a plan, several at once.

    A file system lets one thread at a time write a file, so that a second thread would only wait: a file without casts
    is one task. Casts keep cores busy, so that a file with casts is many tasks. Values copied into one file and cast
    into another are read once, by a task of the copy.
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
        self._sharing = file_system_of(directory.path) in SHARING
        self._copier = LocalCopier(plan, sources, advance)
        self._advance = advance
        self._journal = journal
        self._checks = checks
        self._lock = threading.Lock()
        self._begun: dict[int, _OpenTarget] = {}
        """The open files, by index in the plan."""
        self.stopped = threading.Event()

    def __enter__(self) -> _PlanWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for out in self._begun.values():
            out.writer.commit()

    def tasks(self) -> Iterator[Callable[[], int]]:
        """Yield the tasks; each returns the number of finite elements cast to infinity."""
        copies = {}
        for n, file in enumerate(self._plan.files):
            if self._journal is not None and self._journal.has(file.name, file.nbytes):
                self._advance(file.nbytes)
                if self._checks is not None:
                    self._checks.require_all(ranges_read(self._plan, file))
            else:
                copies[n] = short_rows(self._plan.casts, file.copies, TASK_ELEMENTS)
        shared = find_shared_reads(self._plan, copies)
        allow_open_files(len(self._plan.sources) + 2 * len(shared.files))
        for n in shared.files:
            self._open_target(n)  # tasks of other files write to it too
        for n in copies:
            out = self._begun.get(n) or self._open_target(n)
            for task, targets in self._tasks_of(n, out, shared):
                with self._lock:
                    for m in targets:
                        self._begun[m].left += 1
                yield partial(self._run_task, task, targets)
            if n not in shared.files:
                self._finish_task([n])
        self._finish_task(shared.files)

    def _tasks_of(
        self, n: int, out: _OpenTarget, shared: SharedReads
    ) -> Iterator[tuple[Sequence[Callable[[], int]], Collection[int]]]:
        """Yield the tasks of a file, each with the indexes of the files that it writes to."""
        rows, shared_reads = shared.separate[n], shared.shared.get(n)
        targets = {n} if shared_reads is None else {n, *shared_reads["file"].tolist()}
        copy = partial(self._copier.copy, into=out, shared=shared_reads, file=self._begun.__getitem__)
        runs = [partial(copy, run) for run in runs_of(rows, TASK_ELEMENTS)]
        parts = [*runs, *(partial(self._copier.gather, gather, out) for gather in out.file.gathers)]
        # A gather keeps a core busy even without a cast.
        if shared_reads is not None or out.file.gathers or _has_casts(self._plan, rows):
            yield from (([part], targets) for part in parts)
        else:
            yield parts, targets

    def _open_target(self, n: int) -> _OpenTarget:
        file = self._plan.files[n]
        writer = DirectoryWriter(self._directory, file.name, file.nbytes, file.mode)
        out = self._begun[n] = _OpenTarget(writer.path, writer.fd, sharing=self._sharing, file=file, writer=writer)
        for offset, data in file.literals:
            write_at(out.fd, data, offset, out.path)
        return out

    def _run_task(self, parts: Sequence[Callable[[], int]], targets: Collection[int]) -> int:
        overflowed = 0
        for part in parts:
            if self.stopped.is_set():
                return overflowed
            overflowed += part()
        self._finish_task(targets)
        return overflowed

    def _finish_task(self, numbers: Collection[int]) -> None:
        with self._lock:
            for n in numbers:
                out = self._begun[n]
                out.left -= 1
                if out.left:
                    continue
                del self._begun[n]
                out.writer.commit()
                if self._journal is not None:
                    self._journal.add(out.file.name, out.file.nbytes)


def _has_casts(plan: CopyPlan, rows: NDArray[np.void]) -> bool:
    # Not np.unique: it imports numpy.ma, which takes longer than opening a file.
    return any(plan.casts[i][0] != plan.casts[i][1] for i in set(rows["cast"].tolist()))
