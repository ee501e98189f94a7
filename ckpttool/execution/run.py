"""Run a plan: write its files to an output, from this process.

From local files to local files, bytes are copied from file to file. All other bytes are copied through memory part by
part: each part of a file is one task, which requests its source ranges at once, assembles the part and writes it.
Memory is bounded by small buffers or by the parts in flight, whatever the size of the checkpoint.
"""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ckpttool.arguments import checked_size
from ckpttool.concurrency import MemoryBudget, default_jobs, in_threads
from ckpttool.dtypes import itemsize
from ckpttool.execution.copies import failed_checks
from ckpttool.execution.copy import Copier, PartAssembler
from ckpttool.execution.sources import Sources, allow_open_files
from ckpttool.plan import ranges_read
from ckpttool.plan.split import find_shared_reads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from ckpttool.execution.checks import ReadChecks
    from ckpttool.execution.copy import Sizes
    from ckpttool.plan import ConsistencyChecks, CopyPlan, TargetFile
    from ckpttool.storage import Writer
    from ckpttool.units import Advance

MEMORY = 256 << 20
"""Default number of bytes of parts in flight."""


def memory_bytes(memory: int | str | None) -> int:
    """Parse the argument ``memory``: a number of bytes, a text like "256MB", or None for MEMORY.

    Raises:
        ArgumentError: The text is not a size.
    """
    return MEMORY if memory is None else checked_size("memory", memory)


class Output(Protocol):
    """The destination of a plan's files. Classes that inherit from it begin each file, in this process."""

    any_offset: bool = False
    """Whether its writers take bytes in any size at any offset."""

    def has(self, file: TargetFile) -> bool:
        """Whether an earlier run completed the file."""
        return False

    def begin(self, file: TargetFile) -> Writer:
        """Begin to write a file.

        Raises:
            StorageError: The file cannot be created.
        """

    def shared_file(self) -> str | None:
        """Return the path of a file that workers must see to write here; None if they need none.

        Raises:
            StorageError: The file cannot be created.
        """
        return None


class Work(NamedTuple):
    """A plan and where it is written. An earlier run may have written some of it."""

    plan: CopyPlan
    """The plan."""
    output: Output
    """The output."""
    advance: Advance
    """Called with the number of bytes written since the last call."""
    checks: ReadChecks | None
    """Compares the bytes read with recorded checksums; None to copy without."""

    def missing_files(self) -> Iterator[tuple[int, TargetFile]]:
        """Yield number and file for each file that no earlier run completed; the bytes of the others count as done."""
        for number, file in enumerate(self.plan.files):
            if self.output.has(file):
                self._count(file, file.nbytes)
            else:
                yield number, file

    def missing_parts(self, file: TargetFile, into: Writer) -> list[tuple[int, int]]:
        """Return the parts [start, end) of a file that no earlier run has written; the others count as done."""
        size = into.part_bytes
        parts = [(start, min(start + size, file.nbytes)) for start in range(0, max(file.nbytes, 1), size)]
        missing = [(start, end) for start, end in parts if not into.has(start, end - start)]
        if len(missing) < len(parts):
            self._count(file, file.nbytes - sum(end - start for start, end in missing))
        return missing

    def _count(self, file: TargetFile, nbytes: int) -> None:
        """Count bytes of a file that an earlier run has written, and require checks of the sources of the file."""
        self.advance(nbytes)
        if self.checks is not None:
            self.checks.require_all(ranges_read(self.plan, file))


def run(work: Work, *, jobs: int | None, memory: int = MEMORY, sizes: Sizes | None = None) -> int:
    """Write every file of a plan from this process.

    Args:
        work: The plan and the output.
        jobs: Threads; None for the default.
        memory: Bytes of parts in flight, one part is always allowed; copies between local files ignore it.
        sizes: How much a thread copies at once between local files; None for ``copy.SIZES``.

    Returns:
        Number of finite elements cast to infinity.

    Raises:
        ChecksumError: A source does not match its recorded checksum; discard the output.
        LayoutError: A consistency check of the plan failed; discard the output.
        StorageError: Reading or writing failed, or a source changed meanwhile.
    """
    stopped = threading.Event()
    with Sources(work.plan.sources, work.checks) as sources:
        by_parts = not copies_files(work.output, sources)
        if by_parts:
            tasks = _part_tasks(work, sources, MemoryBudget(memory))
        else:
            tasks = _file_tasks(work, Copier(work.plan, sources, work.advance, sizes), stopped)
        # closing(): no thread may write after the files are closed, even after an error.
        with contextlib.closing(in_threads(tasks, jobs or default_jobs(remote=by_parts), stopped)) as results:
            overflowed = sum(results)
        sources.finish(jobs=jobs)
    return overflowed


def nbytes_read(plan: CopyPlan, *, to_disk: bool, workers: object) -> int:
    """Return the number of source bytes that ``run`` reads; shared reads count once.

    Args:
        plan: The plan.
        to_disk: Whether the output is on local disk.
        workers: Worker processes, which share no reads; None if there are none.
    """
    if not to_disk or workers is not None or any(file.storage.remote for file in plan.sources):
        return plan.nbytes_read
    shared = find_shared_reads(plan, {n: file.copies for n, file in enumerate(plan.files)}).shared
    widths = np.array([itemsize(source) for source, _ in plan.casts], dtype=np.uint64)
    return plan.nbytes_read - sum(int((rows["numel"] * widths[rows["cast"]]).sum()) for rows in shared.values())


def copies_files(output: Output, sources: Sources) -> bool:
    """Return whether bytes are copied from file to file, and not assembled in memory part by part."""
    return output.any_offset and not sources.remote


def check_copies(checks: ConsistencyChecks | None, sources: Sources) -> int:
    """Run the consistency checks of a plan.

    Raises:
        LayoutError: A check failed.
    """
    for problem in () if checks is None else failed_checks(checks, advance=lambda _: None, sources=sources):
        raise problem
    return 0


def _file_tasks(work: Work, copier: Copier, stopped: threading.Event) -> Iterator[Callable[[], int]]:
    """Yield tasks that copy from local files to local files, several at once.

    A file system lets one thread at a time write a file, so that a second thread would only wait: a file without casts
    is one task. Casts and gathers keep cores busy, so that a file with them is many tasks. Values copied into one file
    and cast into another are read once, by a task of the copy.
    """
    plan, output = work.plan, work.output
    check_copies(plan.consistency, copier.sources)
    files = dict(work.missing_files())
    copies = {n: copier.split(file.copies) for n, file in files.items()}
    shared = find_shared_reads(plan, copies)
    allow_open_files(len(plan.sources) + 2 * len(shared.files))
    writers = {n: _begin(files[n], output) for n in shared.files}  # tasks of other files write to them too
    for n, file in files.items():
        into = writers.get(n) or _begin(file, output)
        tasks = list(copier.tasks(file, shared.separate[n], into, shared.shared.get(n), writers))
        if n in shared.shared or file.gathers or _has_casts(plan, shared.separate[n]):
            yield from tasks
        else:
            yield partial(_one_by_one, tasks, stopped)


def _begin(file: TargetFile, output: Output) -> Writer:
    into = output.begin(file)
    for offset, data in file.literals:
        into.write(offset, data)
    into.accept(0, sum(nbytes for _, nbytes in file.zeros), None)  # a new file is zero where nothing is written
    return into


def _one_by_one(tasks: Sequence[Callable[[], int]], stopped: threading.Event) -> int:
    overflowed = 0
    for task in tasks:
        if stopped.is_set():
            break
        overflowed += task()
    return overflowed


def _has_casts(plan: CopyPlan, rows: NDArray[np.void]) -> bool:
    # Not np.unique: importing numpy.ma takes longer than opening a file.
    return any(plan.casts[i][0] != plan.casts[i][1] for i in set(rows["cast"].tolist()))


def _part_tasks(work: Work, sources: Sources, budget: MemoryBudget) -> Iterator[Callable[[], int]]:
    """Yield tasks that assemble parts of files in memory and write them."""
    # First, but in parallel with the copies: the many small requests of the checks cost round trips.
    yield partial(check_copies, work.plan.consistency, sources)
    for _, file in work.missing_files():
        into, assembler = work.output.begin(file), PartAssembler(work.plan, file, sources)
        yield partial(_open, into)
        for start, end in work.missing_parts(file, into):
            yield partial(_write_part, assembler.task(into, start, end, budget), into, end - start, work.advance)


def _open(into: Writer) -> int:
    into.open()
    return 0


def _write_part(task: Callable[[], tuple[int, Any]], into: Writer, nbytes: int, advance: Advance) -> int:
    try:
        overflowed, _ = task()
    except BaseException as error:
        into.fail(error)
        raise
    advance(nbytes)
    return overflowed
