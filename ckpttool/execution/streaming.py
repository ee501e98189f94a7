"""Runs a plan between storages that are read by requests or written in parts.

Each window of a file is one task: what it needs is asked for at once, put together in memory and written. Memory is the
windows in flight, whatever the size of the checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ckpttool.concurrency import default_jobs, in_threads
from ckpttool.errors import StorageError
from ckpttool.execution.assemble import Windows
from ckpttool.execution.check_copies import failed_proofs
from ckpttool.execution.output.staging import SHARED
from ckpttool.execution.sources import Sources
from ckpttool.plan import ranges_read
from ckpttool.storage import reserve, translate_os_errors, write_at
from ckpttool.storage.safe_files import opened
from ckpttool.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckpttool.execution.output.staging import Journal
    from ckpttool.execution.read_checks import ReadChecks
    from ckpttool.plan import ConsistencyChecks, CopyPlan, TargetFile
    from ckpttool.storage import PartWriter
    from ckpttool.storage.safe_files import Directory
    from ckpttool.units import Advance

MEMORY = 256 << 20
"""Bytes that windows in flight take together, unless another number is asked for."""
LOCAL_PART_BYTES = 4 << 20
"""What is fetched at once for a file on local disk."""


def memory_bytes(memory: int | str | None) -> int:
    """What may be in flight: bytes, a text like "256MB", or None for MEMORY.

    Raises:
        ValueError: It is no size.
    """
    return MEMORY if memory is None else parse_size(str(memory))


class Target(Protocol):
    """One file that is being written. Threads may share it."""

    part_bytes: int
    """Size of every window but the last; a multiple of 64, so that no element is cut."""

    def open(self) -> None:
        """Make all ready that the first window needs: not to be waited for before it is read.

        Raises:
            StorageError: The file cannot be created.
        """

    def has(self, start: int, nbytes: int) -> bool:
        """Whether the window that begins at a byte is there already."""

    def write(self, start: int, data: memoryview) -> None:
        """Write a window.

        Raises:
            StorageError: It cannot be written.
        """

    def fail(self, error: BaseException) -> None:
        """A window will never come, and why: let nobody wait for it."""

    def part_writer(self) -> PartWriter:
        """What other processes write windows with; all of them from now on.

        Raises:
            StorageError: One process alone can write the file.
        """

    def accept(self, start: int, nbytes: int, result: Any) -> None:
        """Another process has written a window, and got this for it.

        Raises:
            StorageError: It cannot be written after all.
        """


class Output(Protocol):
    """Where a plan's files go."""

    def has(self, file: TargetFile) -> bool:
        """Whether a run before this one has completed the file."""

    def begin(self, file: TargetFile) -> Target:
        """Begin to write a file.

        Raises:
            StorageError: It cannot be created.
        """

    def place(self) -> Place | None:
        """The directory that other processes must see to write here; None where they need none.

        Raises:
            StorageError: It cannot be written.
        """


@dataclass(frozen=True, slots=True)
class Place:
    """A directory that other nodes are to write into as well."""

    directory: str
    """Its full path."""
    token: str
    """What the file SHARED in it holds: a directory of that name that is another node's own holds something else."""

    def is_here(self) -> bool:
        """Whether this process sees the directory that is meant."""
        try:
            with opened(self.directory) as directory, open(directory.open_file(SHARED, os.O_RDONLY), "rb") as file:
                return file.read() == self.token.encode()
        except (OSError, StorageError):
            return False


def run(
    plan: CopyPlan,
    output: Output,
    *,
    jobs: int | None,
    memory: int,
    advance: Advance,
    checks: ReadChecks | None = None,
) -> int:
    """Write every file of a plan.

    Args:
        plan: What to write.
        output: Where to.
        jobs: Threads; None for DISTANT_JOBS.
        memory: Bytes that windows in flight may take together; one is always allowed.
        advance: Told of bytes written.
        checks: Compares what is read with recorded checksums; None to copy without.

    Returns:
        Finite elements that became infinite in a narrower type.

    Raises:
        ChecksumError: What was read is not what was saved; what was written is of no use.
        LayoutError: A comparison of the plan does not hold; what was written until then is of no use.
        StorageError: Reading or writing failed, or a source changed meanwhile.
    """
    with Sources(plan.sources, checks) as sources:
        budget = Budget(memory)
        tasks = _tasks(plan, sources, output, budget, advance, checks)
        with contextlib.closing(in_threads(tasks, jobs or default_jobs(distant=True))) as results:
            overflowed = sum(results)
        sources.finish_checks(jobs=jobs)
        sources.check_unchanged()
    return overflowed


class Budget:
    """Lets so many windows be in flight as fit into memory, and one in any case.

    Args:
        nbytes: What they may take together.
    """

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes
        self._whole = nbytes
        self._freed = threading.Condition()

    def take(self, nbytes: int) -> int:
        """Wait until so much is free; returns what to give back."""
        nbytes = min(nbytes, self._whole)
        with self._freed:
            self._freed.wait_for(lambda: self._left >= nbytes)
            self._left -= nbytes
        return nbytes

    def give_back(self, nbytes: int) -> None:
        """Free what was taken."""
        with self._freed:
            self._left += nbytes
            self._freed.notify_all()


def _tasks(
    plan: CopyPlan, sources: Sources, output: Output, budget: Budget, advance: Advance, checks: ReadChecks | None
) -> Iterator[Callable[[], int]]:
    if plan.consistency is not None:
        # The first, but not waited for: it is many small requests, whose round trips need not add to the time.
        yield partial(_prove, plan.consistency, sources)
    for file in plan.files:
        if output.has(file):
            advance(file.nbytes)
            if checks is not None:
                checks.require_all(ranges_read(plan, file))
            continue
        target, windows = output.begin(file), Windows(plan, file, sources)
        yield partial(_open, target)
        skipped = False
        for start in range(0, max(file.nbytes, 1), target.part_bytes):
            end = min(start + target.part_bytes, file.nbytes)
            if target.has(start, end - start):
                advance(end - start)
                skipped = True
            else:
                # Taken here, in order: a target that is written in order waits for its earlier windows, and they must
                # not wait for memory that the later ones have.
                taken = budget.take(windows.cost(end - start))
                yield partial(_one, windows, target, start, end, partial(budget.give_back, taken), advance)
        if skipped and checks is not None:
            checks.require_all(ranges_read(plan, file))


def _prove(proofs: ConsistencyChecks, sources: Sources) -> int:
    for problem in failed_proofs(proofs, advance=lambda _: None, sources=sources):
        raise problem
    return 0


def _open(target: Target) -> int:
    target.open()
    return 0


def _one(
    windows: Windows, target: Target, start: int, end: int, give_back: Callable[[], None], advance: Advance
) -> int:
    try:
        data, overflowed = windows.assemble(start, end)
        target.write(start, data)
    except BaseException as error:
        target.fail(error)
        raise
    finally:
        give_back()
    advance(end - start)
    return overflowed


class DirectoryOutput:
    """A directory on local disk.

    Args:
        directory: It exists, and nobody reads it yet.
        journal: Knows the files that are there already, and is told of those that are complete.
    """

    def __init__(self, directory: Directory, journal: Journal | None) -> None:
        self.directory = directory
        self.journal = journal
        self._begun: list[_LocalTarget] = []

    def __enter__(self) -> DirectoryOutput:
        return self

    def __exit__(self, *_: object) -> None:
        for target in self._begun:
            target.close()

    def has(self, file: TargetFile) -> bool:
        """Whether a run before this one has completed the file."""
        return self.journal is not None and self.journal.has(file.name, file.nbytes)

    def begin(self, file: TargetFile) -> Target:
        """Begin to write a file.

        Raises:
            StorageError: It cannot be created.
        """
        target = _LocalTarget(self.directory, file, self.journal)
        self._begun.append(target)
        return target

    def place(self) -> Place:
        """The directory, with what tells other nodes that they see the same.

        Raises:
            StorageError: It cannot be written.
        """
        place = Place(os.path.abspath(self.directory.path), secrets.token_hex(16))
        path = os.path.join(place.directory, SHARED)
        with translate_os_errors(path):
            with contextlib.suppress(FileNotFoundError):  # of a run before this one
                self.directory.remove(SHARED)
            with open(self.directory.create(SHARED), "w", encoding="utf-8") as file:
                file.write(place.token)
        return place


@dataclass(frozen=True, slots=True)
class LocalPartWriter:
    """Writes into a file that is there already, and as large as it will be."""

    directory: str
    """The full path of the directory that is written."""
    name: str
    """Its name there."""

    @property
    def path(self) -> str:
        """Its full path."""
        return os.path.join(self.directory, self.name)

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """The file, open for writing.

        Raises:
            StorageError: It cannot be opened, or the file system tells when it is closed that it could not be written.
        """
        with translate_os_errors(self.path), opened(self.directory) as directory:
            fd = directory.open_file(self.name, os.O_RDWR)
        try:
            yield fd
        except BaseException:
            os.close(fd)
            raise
        with translate_os_errors(self.path):
            os.close(fd)  # only now do file systems of networks send what was written

    def write(self, start: int, data: memoryview) -> None:
        """Write the window that begins at a byte.

        Raises:
            StorageError: It cannot be written.
        """
        with self.opened() as fd:
            write_at(fd, memoryview(data), start, self.path)


class _LocalTarget:
    part_bytes = LOCAL_PART_BYTES

    def __init__(self, directory: Directory, file: TargetFile, journal: Journal | None) -> None:
        path = self._path = os.path.join(directory.path, file.name)
        self._directory = directory.path
        self._name = file.name
        self._nbytes = self._left = file.nbytes
        self._journal = journal
        self._lock = threading.Lock()
        with translate_os_errors(path):
            self._fd = directory.create(file.name, file.mode)
        try:
            reserve(self._fd, file.nbytes, path)
        except BaseException:
            self.close()
            raise

    def open(self) -> None:
        pass

    def has(self, start: int, nbytes: int) -> bool:
        return False

    def write(self, start: int, data: memoryview) -> None:
        write_at(self._fd, memoryview(data), start, self._path)
        self.accept(start, len(data), None)

    def part_writer(self) -> PartWriter:
        self.close()  # one open file for each would be too many, where they are small
        return LocalPartWriter(os.path.abspath(self._directory), self._name)

    def accept(self, start: int, nbytes: int, result: Any) -> None:
        with self._lock:
            self._left -= nbytes
            if self._left:
                return
            self.close()
            if self._journal is not None:
                self._journal.add(self._name, self._nbytes)

    def fail(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
