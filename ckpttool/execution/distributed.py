"""Runs a plan in other processes, on this node or others: cuts it into tasks, each of which any of them can do.

A task says all that it takes: which ranges of which files to read, and where the bytes go. Doing it twice does no harm,
so that what a lost node has begun is done again by another. Who brings tasks to processes is not known here.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ckpttool.concurrency import MemoryBudget, default_jobs, in_threads
from ckpttool.errors import StorageError
from ckpttool.execution import local
from ckpttool.execution.assemble import Windows
from ckpttool.execution.check_copies import failed_proofs
from ckpttool.execution.output.directory import LocalPartWriter
from ckpttool.execution.read_checks import ReadChecks
from ckpttool.execution.sources import Sources
from ckpttool.plan import CopyPlan, ranges_read
from ckpttool.plan.split import FileSplitter
from ckpttool.storage import write_at

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from ckpttool.execution.output.base import Output, Place, Target
    from ckpttool.plan import SourceFile, TargetFile
    from ckpttool.storage import PartWriter, Reader
    from ckpttool.units import Advance

TASK_BYTES = 64 << 20
"""A task writes at least so much, but for the last: to bring it to a process takes milliseconds."""
MAX_PIECES = 256
"""Files that a task writes at the most, however small they are."""
PAUSES = (0.1, 0.4, 1.5)
"""Seconds to wait for a directory that was made on another node: file systems of networks may remember none there."""
SHARE = "all nodes must see the same files at the same path, or take URLs"


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What all tasks of a plan have in common. It can be pickled."""

    sources: tuple[SourceFile, ...]
    """Files to read."""
    casts: tuple[tuple[str, str], ...]
    """As in ``CopyPlan``."""
    place: Place | None
    """The directory that is written; None for a bucket."""
    copies: bool
    """Whether all is on local disk: bytes go from file to file, and need not be brought together before."""
    jobs: int | None
    """Threads of each task; None for what suits."""
    memory: int
    """Bytes that what is in flight may take in each task, where storages are remote."""
    checked: bool = False
    """Whether tasks return the checksums of what they read."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Bytes of one file that belong to a task."""

    writer: PartWriter
    """Where they go."""
    part: TargetFile
    """Where they come from."""
    windows: tuple[tuple[int, int], ...]
    """Which they are: (first, one past the last)."""


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """What one process does at a time. It can be pickled."""

    number: int
    """0, 1, 2, ... in the order in which they are made."""
    pieces: tuple[Piece, ...]
    """What to write."""

    @property
    def name(self) -> str:
        """The file that it writes, or the first of them."""
        return self.pieces[0].part.name


@dataclass(frozen=True, slots=True, eq=False)
class Done:
    """What came of a task."""

    number: int
    """Of the task."""
    results: tuple[tuple[Any, ...], ...]
    """For each window of each piece, what its sender returned."""
    overflowed: int
    """Finite elements that became infinite in a narrower type."""
    opened: frozenset[int]
    """The sources that were read, by their numbers."""
    fragments: NDArray[np.void] | None = None
    """Rows of FRAGMENT: checksums of what was read; None if they were not asked for."""


class Workers(Protocol):
    """Processes that do tasks."""

    def run(self, work: Work, tasks: Iterator[Task]) -> Generator[Done, None, None]:
        """Do tasks, as many at once as there is room for; what came of them in the order in which they end.

        When it is closed, or raises, no task is running any more.

        Raises:
            CkptError: A task failed, or nobody is left to do it.
        """


def run(
    plan: CopyPlan, output: Output, workers: Workers, *, jobs: int | None, memory: int, advance: Advance,
    task_bytes: int | None = None, checks: ReadChecks | None = None,
) -> int:  # fmt: skip
    """Write every file of a plan; its comparisons are made here, before the first task.

    Args:
        plan: What to write.
        output: Where to.
        workers: Who does it.
        jobs: Threads of each task; None for one between local files, and REMOTE_JOBS elsewhere.
        memory: Bytes that windows in flight may take together in each task; one is always allowed.
        advance: Told of bytes written.
        task_bytes: What a task writes at least; None for TASK_BYTES.
        checks: Compares what is read with recorded checksums; None to copy without.

    Returns:
        Finite elements that became infinite in a narrower type.

    Raises:
        LayoutError: A comparison of the plan does not hold; nothing was written.
        StorageError: Reading or writing failed, a source changed meanwhile, or a node does not see the same files.
    """
    with Sources(plan.sources) as sources:
        if plan.consistency is not None:
            for problem in failed_proofs(plan.consistency, advance=lambda _: None, sources=sources):
                raise problem
        place = output.place()
        work = Work(
            tuple(map(_absolute, plan.sources)), plan.casts, place, copies=place is not None and not sources.remote,
            jobs=jobs, memory=memory, checked=checks is not None,
        )  # fmt: skip
    begun: dict[int, list[Target]] = {}
    given: dict[int, Task] = {}
    overflowed, opened = 0, set[int]()

    def tasks() -> Iterator[Task]:
        for number, found in enumerate(_cut(plan, output, work, task_bytes or TASK_BYTES, advance, checks)):
            begun[number] = [target for target, _ in found]
            given[number] = Task(number, tuple(piece for _, piece in found))
            yield given[number]

    with contextlib.closing(workers.run(work, tasks())) as finished:
        for done in finished:
            overflowed += done.overflowed
            opened |= done.opened
            if checks is not None and done.fragments is not None:
                checks.add(done.fragments)
                checks.note_files(done.opened)
            pieces = given.pop(done.number).pieces
            for target, piece, results in zip(begun.pop(done.number), pieces, done.results, strict=True):
                for (start, end), result in zip(piece.windows, results, strict=True):
                    target.accept(start, end - start, result)
                    advance(end - start)
    with Sources(plan.sources, checks) as sources:
        sources.check_as_planned(sorted(opened))
        sources.finish_checks()
    return overflowed


# ----------------------------------------------------------------------------------------------------- cutting


def _cut(
    plan: CopyPlan, output: Output, work: Work, task_bytes: int, advance: Advance, checks: ReadChecks | None
) -> Iterator[list[tuple[Target, Piece]]]:
    """What each task is to write; files are begun when the first task that writes them is asked for."""
    found: list[tuple[Target, Piece]] = []
    held = 0
    for target, piece in _pieces(plan, output, work, task_bytes, advance, checks):
        found.append((target, piece))
        held += sum(end - start for start, end in piece.windows)
        if held >= task_bytes or len(found) == MAX_PIECES:
            yield found
            found, held = [], 0
    if found:
        yield found


def _pieces(
    plan: CopyPlan, output: Output, work: Work, task_bytes: int, advance: Advance, checks: ReadChecks | None
) -> Iterator[tuple[Target, Piece]]:
    for file in plan.files:
        if output.has(file):
            advance(file.nbytes)
            if checks is not None:
                checks.require_all(ranges_read(plan, file))
            continue
        skipped = False
        target, splitter = output.begin(file), FileSplitter(plan.casts, file)
        writer, size = target.part_writer(), target.part_bytes
        step = task_bytes if work.copies else -(-task_bytes // size) * size
        for start in range(0, max(file.nbytes, 1), step):
            end = min(start + step, file.nbytes)
            if work.copies:
                yield target, Piece(writer, splitter.beginning(start, end), ((start, end),))
                continue
            windows = []
            for low in range(start, max(end, 1), size):
                high = min(low + size, end)
                if target.has(low, high - low):
                    advance(high - low)
                    skipped = True
                else:
                    windows.append((low, high))
            if windows:
                yield target, Piece(writer, splitter.overlapping(windows[0][0], windows[-1][1]), tuple(windows))
        if skipped and checks is not None:
            checks.require_all(ranges_read(plan, file))


# ------------------------------------------------------------------------------------------------------- doing


def do(work: Work, task: Task, *, node: str = "") -> Done:
    """Do a task; in any process, any number of times.

    Args:
        work: What it is part of.
        task: What to do.
        node: What errors call the node that this is; "" on the one that has made the plan.

    Raises:
        StorageError: Reading or writing failed, a source changed meanwhile, or files are not the same here.
        ContainerError: A source is not what was saved.
    """
    if work.place is not None:
        _check_place(work.place, node)
    plan = CopyPlan(work.sources, work.casts, ())
    checks = ReadChecks(work.sources) if work.checked else None
    with _SourcesOf(work.sources, node, checks) as sources:
        results: tuple[tuple[Any, ...], ...]
        if work.copies:
            overflowed = sum(_copy(plan, piece, sources, work.jobs or 1) for piece in task.pieces)
            results = tuple((None,) * len(piece.windows) for piece in task.pieces)
        else:
            overflowed, results = _assemble(plan, task, sources, work)
        fragments = None if checks is None else checks.take_fragments()
        return Done(task.number, results, overflowed, frozenset(sources.opened), fragments)


def _check_place(place: Place, node: str) -> None:
    for pause in (*PAUSES, 0.0):
        if place.is_here():
            return
        time.sleep(pause)
    problem = f"is not the same directory on node {node}" if node else "was removed while it was being written"
    raise StorageError(place.directory, problem, SHARE if node else "try again")


def _absolute(file: SourceFile) -> SourceFile:
    """A source by its full path: processes on other nodes have other working directories."""
    return file if file.storage.remote else replace(file, path=os.path.abspath(file.path))


class _SourcesOf(Sources):
    """Sources that are read on another node than the one that has made the plan."""

    def __init__(self, files: tuple[SourceFile, ...], node: str, checks: ReadChecks | None) -> None:
        super().__init__(files, checks)
        self._node = node

    def open_as_planned(self, file: SourceFile) -> Reader:
        try:
            return super().open_as_planned(file)
        except StorageError as error:
            if not self._node or file.storage.remote:
                raise
            raise StorageError(file.path, f"{error.problem}, as node {self._node} sees it", SHARE) from error


def _copy(plan: CopyPlan, piece: Piece, sources: Sources, jobs: int) -> int:
    """Between local files: nothing is brought together in memory."""
    if not isinstance(piece.writer, LocalPartWriter):
        raise TypeError(f"{piece.part.name} is no local file")
    path = piece.writer.path
    with piece.writer.opened() as fd:
        for offset, data in piece.part.literals:
            write_at(fd, data, offset, path)
        return local.fill(plan, piece.part, sources, fd, path, jobs=jobs, advance=lambda _: None)


def _assemble(plan: CopyPlan, task: Task, sources: Sources, work: Work) -> tuple[int, tuple[tuple[Any, ...], ...]]:
    budget = MemoryBudget(work.memory)
    results: list[list[Any]] = [[None] * len(piece.windows) for piece in task.pieces]

    def calls() -> Iterator[Callable[[], int]]:
        for piece, into in zip(task.pieces, results, strict=True):
            windows = Windows(plan, piece.part, sources)
            for number, (start, end) in enumerate(piece.windows):
                give_back = partial(budget.give_back, budget.take(windows.cost(end - start)))
                yield partial(_write, windows, piece.writer, start, end, give_back, into, number)

    with contextlib.closing(in_threads(calls(), work.jobs or default_jobs(remote=True))) as counts:
        overflowed = sum(counts)
    return overflowed, tuple(tuple(row) for row in results)


def _write(
    windows: Windows,
    writer: PartWriter,
    start: int,
    end: int,
    give_back: Callable[[], None],
    into: list[Any],
    number: int,
) -> int:
    try:
        data, overflowed = windows.assemble(start, end)
        into[number] = writer.write(start, data)
    finally:
        give_back()
    return overflowed
