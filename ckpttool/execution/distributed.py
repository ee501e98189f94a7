"""Run a plan in worker processes, on one node or many: split it into tasks that any worker can run.

A task names the source ranges to read and the part writers to use. Tasks are idempotent: another worker repeats the
tasks of a lost node. This module does not send tasks to the workers.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, Protocol

from ckpttool.concurrency import MemoryBudget, default_jobs, in_order, in_threads
from ckpttool.errors import StorageError
from ckpttool.execution.checks import ReadChecks
from ckpttool.execution.copy import Copier, PartAssembler
from ckpttool.execution.run import check_copies, copies_files
from ckpttool.execution.sources import Sources
from ckpttool.plan import CopyPlan
from ckpttool.plan.split import FileSplitter
from ckpttool.storage.local_writer import DirectoryPartWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from ckpttool.execution.run import Work
    from ckpttool.plan import SourceFile, TargetFile
    from ckpttool.storage import PartWriter, Reader, Writer

TASK_BYTES = 64 << 20
"""Minimum bytes a task writes, except the last one: sending a task to a worker takes milliseconds."""
MAX_PARTS = 256
"""Maximum number of file parts in a task, however small they are."""
PAUSES = (0.1, 0.4, 1.5)
"""Pauses in seconds between two checks for a directory of another node: network file systems cache its absence."""
SHARE_HINT = "all nodes must see the same files at the same path, or take URLs"


@dataclass(frozen=True, slots=True, eq=False)
class TaskContext:
    """The data that all tasks of a plan share. It can be pickled."""

    sources: tuple[SourceFile, ...]
    """Source files of the plan."""
    casts: tuple[tuple[str, str], ...]
    """(source dtype, target dtype) pairs, as in ``CopyPlan``."""
    shared: str | None
    """Full path of a file in the output directory that all nodes must see; None for a bucket."""
    copies: bool
    """Whether sources and output are on local disk, so that bytes are copied from file to file without assembly."""
    jobs: int | None
    """Threads of each task; None for the default."""
    memory: int
    """Bytes of parts in flight in each task, for remote storages."""
    checked: bool = False
    """Whether tasks return the checksums of the bytes they read."""


@dataclass(frozen=True, slots=True, eq=False)
class TaskPart:
    """Byte ranges of one target file that a task writes."""

    writer: PartWriter
    """Writes the ranges."""
    file: TargetFile
    """The rows of the target file that the ranges need."""
    ranges: tuple[tuple[int, int], ...]
    """Byte ranges [start, end) of the target file."""


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A unit of work for one worker. It can be pickled."""

    number: int
    """0, 1, 2, ... in order of creation."""
    parts: tuple[TaskPart, ...]
    """The file parts to write."""

    @property
    def name(self) -> str:
        """Name of the first file that the task writes."""
        return self.parts[0].file.name


@dataclass(frozen=True, slots=True, eq=False)
class TaskResult:
    """The result of a task."""

    number: int
    """Number of the task."""
    results: tuple[tuple[Any, ...], ...]
    """For each range of each part, the result of its part writer."""
    overflowed: int
    """Number of finite elements cast to infinity."""
    opened: frozenset[int]
    """Indexes of the sources that the task read."""
    fragments: NDArray[np.void] | None = None
    """Rows of FRAGMENT: checksums of the bytes read; None if ``TaskContext.checked`` is False."""


class Workers(Protocol):
    """Processes that run tasks."""

    def run(self, context: TaskContext, tasks: Iterator[Task]) -> Generator[TaskResult, None, None]:
        """Run tasks, as many at once as fit; yield results in the order of completion.

        After the generator is closed or raises, no task is running.

        Raises:
            CkptError: A task failed, or all workers are lost.
        """


def run_in_workers(work: Work, *, workers: Workers, jobs: int | None, memory: int) -> int:
    """Write every file of a plan in workers; this process runs the consistency checks before the first task.

    Args:
        work: The plan and the output.
        workers: Worker processes.
        jobs: Threads of each task; None for one between local files, and REMOTE_JOBS elsewhere.
        memory: Bytes of parts in flight in each task; one part is always allowed.

    Returns:
        Number of finite elements cast to infinity.

    Raises:
        LayoutError: A consistency check of the plan failed; nothing was written.
        StorageError: Reading or writing failed, a source changed meanwhile, or a node does not see the same files.
    """
    plan, output, advance, checks = work
    with Sources(plan.sources) as sources:
        check_copies(plan.consistency, sources)
        shared = output.shared_file()
        context = TaskContext(
            tuple(map(_with_full_path, plan.sources)),
            plan.casts,
            shared,
            copies=copies_files(output, sources),
            jobs=jobs,
            memory=memory,
            checked=checks is not None,
        )
    open_targets: dict[int, list[Writer]] = {}
    pending: dict[int, Task] = {}
    overflowed, opened = 0, set[int]()

    def tasks() -> Iterator[Task]:
        for number, batch in enumerate(_batches(work, copies=context.copies)):
            open_targets[number] = [target for target, _ in batch]
            pending[number] = Task(number, tuple(part for _, part in batch))
            yield pending[number]

    with contextlib.closing(workers.run(context, tasks())) as finished:
        for result in finished:
            overflowed += result.overflowed
            opened |= result.opened
            if checks is not None and result.fragments is not None:
                checks.add(result.fragments)
                checks.note_files(result.opened)
            parts = pending.pop(result.number).parts
            for target, part, results in zip(open_targets.pop(result.number), parts, result.results, strict=True):
                for (start, end), part_result in zip(part.ranges, results, strict=True):
                    target.accept(start, end - start, part_result)
                    advance(end - start)
    with Sources(plan.sources, checks) as sources:
        sources.check_as_planned(sorted(opened))
        sources.finish_checks()
    return overflowed


# --------------------------------------------------------------------------------------------------- splitting


def _batches(work: Work, *, copies: bool) -> Iterator[list[tuple[Writer, TaskPart]]]:
    """Yield the file parts of each task; a file is opened when its first task is requested."""
    batch: list[tuple[Writer, TaskPart]] = []
    nbytes = 0
    for target, part in _task_parts(work, copies=copies):
        batch.append((target, part))
        nbytes += sum(end - start for start, end in part.ranges)
        if nbytes >= TASK_BYTES or len(batch) == MAX_PARTS:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _task_parts(work: Work, *, copies: bool) -> Iterator[tuple[Writer, TaskPart]]:
    for _, file in work.missing_files():
        target, splitter = work.output.begin(file), FileSplitter(work.plan.casts, file)
        writer, size = target.part_writer(), target.part_bytes
        if copies:
            for start in range(0, max(file.nbytes, 1), TASK_BYTES):
                end = min(start + TASK_BYTES, file.nbytes)
                yield target, TaskPart(writer, splitter.beginning(start, end), ((start, end),))
            continue
        step = -(-TASK_BYTES // size) * size
        for ranges in _windows(work.missing_parts(file, target), step):
            yield target, TaskPart(writer, splitter.overlapping(ranges[0][0], ranges[-1][1]), ranges)


def _windows(parts: Iterable[tuple[int, int]], step: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the parts that begin in the same window of ``step`` bytes."""
    for _, near in groupby(parts, lambda part: part[0] // step):
        yield tuple(near)


# ----------------------------------------------------------------------------------------------- in the worker


def run_task(context: TaskContext, task: Task, *, node: str = "") -> TaskResult:
    """Run a task, in any process; a repeated run gives the same output.

    Args:
        context: The data that all tasks share.
        task: The task.
        node: Name of this node in errors; "" on the node that made the plan.

    Raises:
        StorageError: Reading or writing failed, a source changed meanwhile, or this node sees other files.
        ContainerError: A source is damaged.
    """
    if context.shared is not None:
        _check_directory(context.shared, node)
    plan = CopyPlan(context.sources, context.casts, ())
    checks = ReadChecks(context.sources) if context.checked else None
    with _NodeSources(context.sources, node, checks) as sources:
        results: tuple[tuple[Any, ...], ...]
        if context.copies:
            overflowed = sum(_copy(plan, part, sources, context.jobs or 1) for part in task.parts)
            results = tuple((None,) * len(part.ranges) for part in task.parts)
        else:
            overflowed, results = _assemble_parts(plan, task, sources, context)
        fragments = None if checks is None else checks.take_fragments()
        return TaskResult(task.number, results, overflowed, frozenset(sources.opened), fragments)


def _check_directory(shared: str, node: str) -> None:
    for pause in (*PAUSES, 0.0):
        if os.path.exists(shared):
            return
        time.sleep(pause)
    problem = f"is not the same directory on node {node}" if node else "was removed while it was being written"
    raise StorageError(os.path.dirname(os.path.dirname(shared)), problem, SHARE_HINT if node else "try again")


def _with_full_path(file: SourceFile) -> SourceFile:
    """Return a source with its full path: workers have other working directories."""
    return file if file.storage.remote else replace(file, path=os.path.abspath(file.path))


class _NodeSources(Sources):
    """Sources on a worker's node: errors of local files name the node."""

    def __init__(self, files: tuple[SourceFile, ...], node: str, checks: ReadChecks | None) -> None:
        super().__init__(files, checks)
        self._node = node

    def open_as_planned(self, file: SourceFile) -> Reader:
        try:
            return super().open_as_planned(file)
        except StorageError as error:
            if not self._node or file.storage.remote:
                raise
            raise StorageError(file.path, f"{error.problem}, as node {self._node} sees it", SHARE_HINT) from error


def _copy(plan: CopyPlan, part: TaskPart, sources: Sources, jobs: int) -> int:
    """Copy a part between local files, without assembling it in memory."""
    if not isinstance(part.writer, DirectoryPartWriter):
        raise TypeError(f"{part.file.name} is not a local file")
    with part.writer.opened() as into:
        for offset, data in part.file.literals:
            into.write(offset, data)
        # closing(): no thread may write after the file is closed, even after an error.
        copier = Copier(plan, sources)
        tasks = copier.tasks(part.file, copier.split(part.file.copies), into)
        with contextlib.closing(in_threads(tasks, jobs)) as results:
            return sum(results)


def _assemble_parts(
    plan: CopyPlan, task: Task, sources: Sources, context: TaskContext
) -> tuple[int, tuple[tuple[Any, ...], ...]]:
    budget = MemoryBudget(context.memory)

    def part_tasks() -> Iterator[Callable[[], tuple[int, Any]]]:
        for part in task.parts:
            assembler = PartAssembler(plan, part.file, sources)
            for start, end in part.ranges:
                yield assembler.task(part.writer, start, end, budget)

    with contextlib.closing(in_order(part_tasks(), context.jobs or default_jobs(remote=True))) as done:
        written = list(done)
    results = (result for _, result in written)
    return sum(count for count, _ in written), tuple(tuple(islice(results, len(part.ranges))) for part in task.parts)
