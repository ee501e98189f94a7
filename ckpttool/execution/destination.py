"""Write a plan to OUT, a local directory or a bucket prefix: check OUT, report the needs of the run, run the plan,
commit.

Also compares an existing OUT with a plan, for runs that resume, and writes single files, such as pages and tensors.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.arguments import checked_path
from ckpttool.commit import read_mark
from ckpttool.concurrency import default_jobs
from ckpttool.errors import ChecksumError, LayoutError, StorageError
from ckpttool.execution.output import DirectoryOutput
from ckpttool.execution.permissions import with_permissions
from ckpttool.execution.run import Output, Work, run
from ckpttool.execution.sources import change_times
from ckpttool.storage import (
    BESIDE,
    LOCAL,
    MARK,
    Writer,
    connect,
    is_url,
    local_path,
    open_storage,
    staging,
    walk,
    without_credentials,
)
from ckpttool.storage.base import WHOLE
from ckpttool.storage.journal import Journal
from ckpttool.units import Meter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from ckpttool.execution.checks import ReadChecks
    from ckpttool.execution.distributed import Workers
    from ckpttool.execution.output_bucket import BucketOutput
    from ckpttool.model import Checkpoint
    from ckpttool.plan import CopyPlan, TargetFile
    from ckpttool.storage import Storage, WritableStorage
    from ckpttool.storage.fsspec import RemoteStorage
    from ckpttool.units import Progress


THREAD_BYTES = 2 << 20
"""Buffers of one thread that copies between local files."""
CODE_BYTES = 8 << 20
"""Modules that a run imports."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Disk space and memory of a run. The report itself has the bytes read and written."""

    free_bytes: int | None
    """Free bytes of the file system of OUT; None where the storage does not report them."""
    memory_bytes: int
    """Peak memory of this process, in bytes: its memory now and the buffers of the run. For Ray, of one task."""


def resident_bytes() -> int:
    """Return the memory of this process in bytes; where the system does not report it, its peak."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


_KINDS = [
    re.compile(rf"({names})(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
    for names in ("model|pytorch_model|optimizer", "adapter_model")
]
"""Names of the files of each kind of output. A base model and an adapter may share one directory."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of the run of a plan."""

    jobs: int | None
    """Threads, of each worker if there are workers; None for the default."""
    memory: int
    """Bytes of parts in flight; copies between local files ignore it."""
    progress: Progress | None
    """Called with (bytes done, bytes in all)."""
    checks: ReadChecks | None
    """Compares the bytes read with recorded checksums; None to copy without."""
    workers: AbstractContextManager[Workers] | None
    """Worker processes; None to run in this process."""


class Destination:
    """OUT: a directory on local disk, or a prefix of a bucket.

    Args:
        out: Path or URL.
        options: Arguments of the storage's fsspec class.
        parent_mode: Permissions of OUT's parent directory on local disk, if this creates it, before the umask.

    Raises:
        ArgumentError: The path is empty.
        StorageError: The URL is invalid.
    """

    def __init__(self, out: str, options: Mapping[str, Any] | None, parent_mode: int = 0o777) -> None:
        checked_path("out", out)
        self.out = without_credentials(local_path(out))
        self._remote: RemoteStorage | None = None
        if is_url(out):
            from ckpttool.storage.opening import open_remote

            self._remote = open_remote(out, options or {})
        self._options = options
        self._parent_mode = parent_mode

    def within(self, name: str, mode: int) -> Destination:
        """Return a subdirectory as a destination; if created, this directory gets the permissions ``mode``."""
        return Destination(f"{self.out.rstrip('/')}/{name}", self._options, mode)

    @property
    def storage(self) -> WritableStorage:
        """The storage of OUT."""
        return LOCAL if self._remote is None else self._remote

    def names(self) -> set[str]:
        """Return the names of the files and directories in OUT; empty if it is not a directory."""
        self.storage.refresh([])
        return {e.name for e in self.storage.listing(self.out)} if self.storage.is_dir(self.out) else set()

    def put(self, name: str, data: bytes, mode: int = 0o666) -> None:
        """Write a small file atomically; replace a file of that name.

        Args:
            name: Name of the file in OUT.
            data: Its content.
            mode: Its permissions on local disk, before the umask.

        Raises:
            StorageError: The file cannot be written.
        """
        self.storage.put(f"{self.out.rstrip('/')}/{name}", data, mode=mode)

    @property
    def remote(self) -> bool:
        """Whether OUT is remote."""
        return self._remote is not None

    def check_target(self, *, overwrite: bool | None) -> None:
        """Refuse an OUT that cannot or must not be written, before any work is done.

        Args:
            overwrite: Whether OUT may contain files; None if the command has no ``overwrite``.

        Raises:
            StorageError: OUT is not a directory, is not empty, or cannot be written.
        """
        if self._remote is None:
            staging.check_target(self.out, overwrite=overwrite)
        else:
            from ckpttool.execution import output_bucket

            output_bucket.check_target(self._remote, self.out, overwrite=overwrite)
        if overwrite and "machine" in read_mark(self.storage, self.out):
            problem = "holds a checkpoint that is being saved, or whose save was killed"
            raise StorageError(self.out, problem, "choose another OUT")

    def check_shareable(self) -> None:
        """Refuse an OUT that several processes cannot write.

        Raises:
            StorageError: Only one process can write a file of this storage.
        """
        if self._remote is not None and not self._remote.parts_from_anywhere:
            problem = "is in a storage whose files only one process can write"
            raise StorageError(self.out, problem, "write to S3 or to a directory that all nodes share, or without Ray")

    def check_other(self, paths: Iterable[str]) -> None:
        """Refuse an output that is a source by its path, before it is refused as one that is not empty.

        Raises:
            StorageError: OUT is the source.
        """
        for path in paths:
            if not is_url(path) and self._remote is None and os.path.realpath(path) == os.path.realpath(self.out):
                raise StorageError(self.out, f"would be written over the checkpoint in {path}", "choose another OUT")

    def check_apart(self, checkpoint: Checkpoint) -> None:
        """Refuse to overwrite the source.

        Raises:
            StorageError: OUT is the source or contains it.
        """
        directories = {checkpoint.location, *(f.directory for f in checkpoint.files if f.directory)}
        if self._remote is None:
            for directory in () if checkpoint.storage.remote else directories:
                staging.check_apart(self.out, directory)
        elif self._remote.is_same(connect(checkpoint.storage)):
            from ckpttool.execution import output_bucket

            for directory in directories:
                output_bucket.check_apart(self._remote, self.out, directory)

    def holds_output(self, plan: CopyPlan, options: RunOptions) -> bool:
        """Return whether OUT contains exactly the files of a plan; compares every byte with the sources.

        If so, removes the marker of a run that was killed right after its commit.

        Args:
            plan: The plan.
            options: As for ``write``; recorded checksums are not compared.

        Raises:
            StorageError: Reading failed, or a source changed meanwhile.
        """
        storage, out = self.storage, self.out.rstrip("/")
        storage.refresh([])
        if not storage.is_dir(out) or storage.exists(f"{out}/{MARK}"):
            return False
        held = {name: entry.nbytes for name, entry in walk(storage, out) if name not in BESIDE}
        if held != {file.name: file.nbytes for file in plan.files}:
            return False
        work = Work(plan, _Comparison(storage, out), Meter(plan.nbytes_written, options.progress), None)
        try:
            run(work, jobs=options.jobs, memory=options.memory)
        except _DiffersError:
            return False
        storage.delete([f"{out}/{WHOLE}"])
        return True

    def write(
        self,
        plan: CopyPlan,
        options: RunOptions,
        *,
        last: Sequence[str],
        verify: Callable[[str], str | None] | None = None,
        overwrite: bool | None,
        resume: bool | None,
    ) -> tuple[int, str | None]:
        """Run a plan and commit its files.

        Args:
            plan: The plan.
            options: Threads, memory, progress, checks and workers of the run.
            last: Names of the files to commit last (``latest``, an index), in this order.
            verify: Called with the written directory before the commit; returns a digest, and raises if the output is
                wrong. None for no such comparison.
            overwrite: As for ``check_target``: another run may have written OUT meanwhile.
            resume: Whether to resume from the files of an interrupted run; None if the command cannot resume.

        Returns:
            Number of finite elements cast to infinity, and the result of ``verify``.
        """
        mode = 0o777
        if self._remote is None:
            staging.check_space(self.out, plan.nbytes_written)
            plan, mode = with_permissions(plan)
        key = "" if resume is None else plan.fingerprint(change_times(plan.sources))
        meter = Meter(plan.nbytes_written, options.progress)
        with (
            options.workers or nullcontext() as workers,
            self._output(plan, last, key, mode, overwrite=overwrite, resume=bool(resume)) as output,
        ):
            work = Work(plan, output, meter, options.checks)
            if workers is None:
                overflowed = run(work, jobs=options.jobs, memory=options.memory)
            else:
                from ckpttool.execution import distributed

                overflowed = distributed.run_in_workers(work, workers=workers, jobs=options.jobs, memory=options.memory)
            output.complete()
            return overflowed, None if verify is None else verify(output.path)

    @contextmanager
    def _output(
        self, plan: CopyPlan, last: Sequence[str], key: str, mode: int, *, overwrite: bool | None, resume: bool
    ) -> Iterator[DirectoryOutput | BucketOutput]:
        """Context manager: yield the output of a plan; commit it if the body succeeds, discard it if not."""
        replaces = _of_same_kind(plan)
        if self._remote is not None:
            from ckpttool.execution.output_bucket import BucketOutput

            uploads = BucketOutput(
                self._remote, self.out, plan, overwrite=overwrite, replaces=replaces, last=last, key=key, resume=resume
            )
            with uploads.committed():
                yield uploads
            return
        names = {file.name.split("/")[0] for file in plan.files}
        mark = json.dumps({"key": key, "files": sorted(names), "over": []})
        with staging.staged(
            self.out,
            overwrite=overwrite,
            replaces=replaces,
            last=last,
            mark=mark,
            resume=resume,
            mode=mode,
            parent_mode=self._parent_mode,
        ) as directory:
            journal = Journal(directory) if resume else None
            if journal is not None:
                journal.check([(file.name, file.nbytes) for file in plan.files], default_jobs())
            try:
                with DirectoryOutput(directory, journal) as output:
                    yield output
            except (LayoutError, ChecksumError):
                if journal is not None:
                    journal.clear()  # a resumed run must not keep wrong files
                raise

    def forecast(self, plan: CopyPlan, options: RunOptions) -> Needs:
        """Return the memory and the disk space that ``write`` needs; nothing is read or written.

        Args:
            plan: The plan.
            options: As for ``write``.

        Raises:
            StorageError: OUT's file system has less free space, or cannot be asked.
        """
        if self._remote is None:
            staging.check_space(self.out, plan.nbytes_written)
        free = staging.free_bytes(self.out) if self._remote is None else self._remote.free_bytes(self.out)
        if self.remote or any(file.storage.remote for file in plan.sources):
            buffers = min(options.memory, 4 * plan.nbytes_written)
        else:
            buffers = (options.jobs or default_jobs()) * THREAD_BYTES
        return Needs(free, resident_bytes() + CODE_BYTES + buffers)


class _DiffersError(Exception):
    """A file of OUT has other bytes than the plan."""


class _Comparison(Output):
    """An ``Output`` that compares the bytes of a plan with the files of OUT instead of writing them."""

    def __init__(self, storage: Storage, out: str) -> None:
        self._storage = storage
        self._out = out

    def begin(self, file: TargetFile) -> Writer:
        return _ComparedFile(self._storage, f"{self._out}/{file.name}")


class _ComparedFile(Writer):
    part_bytes = 1 << 22

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage = storage
        self.path = path

    def write(self, start: int, data: bytes | memoryview) -> None:
        with self._storage.open(self.path) as reader:  # only for a moment: there may be thousands of files
            if reader.read(start, start + len(data)) != data:
                raise _DiffersError


def _of_same_kind(plan: CopyPlan) -> Callable[[str], bool]:
    """Return a function that selects, by name, the files of an existing OUT that the output of a plan replaces."""
    kinds = [kind for kind in _KINDS if any(kind.fullmatch(file.name) for file in plan.files)]
    return lambda name: any(kind.fullmatch(name) for kind in kinds)


def check_file(out: str, *, overwrite: bool, options: Mapping[str, Any] | None) -> None:
    """Refuse a file that must not be written, before any work is done.

    Args:
        out: Path or URL.
        overwrite: Whether to replace an existing file.
        options: Arguments of the storage's fsspec class.

    Raises:
        ArgumentError: The path is empty.
        StorageError: The file exists and ``overwrite`` is False.
    """
    checked_path("out", out)
    shown = without_credentials(local_path(out))
    if not overwrite and open_storage(out, options).exists(shown):
        raise _exists(shown)


def _exists(path: str) -> StorageError:
    return StorageError(path, "exists already", "choose another name, or pass overwrite=True", ("overwrite",))


def write_file(
    out: str,
    parts: Sequence[bytes | memoryview],
    *,
    overwrite: bool,
    options: Mapping[str, Any] | None,
    mode: int = 0o666,
) -> str:
    """Write a small file atomically; return its path or URL without credentials.

    Args:
        out: Path or URL.
        parts: Its content, in pieces.
        overwrite: Whether to replace an existing file.
        options: Arguments of the storage's fsspec class.
        mode: Its permissions on local disk, before the umask.

    Raises:
        StorageError: The file exists and ``overwrite`` is False, or it cannot be written.
    """
    storage = open_storage(out, options)
    shown = without_credentials(local_path(out))
    if overwrite:
        storage.put(shown, *parts, mode=mode)
    elif storage.exists(shown) or not storage.put_new(shown, *parts, mode=mode):
        raise _exists(shown)
    return shown
