"""Runs a plan: the only place where tensor bytes move.

Memory is a few small buffers for each thread, whatever the size of the checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ckpttool.casts import cast, same_values
from ckpttool.dtypes import SHORT_NAMES, itemsize, numpy_dtype
from ckpttool.errors import CkptError, LayoutError, StorageError
from ckpttool.storage import WAIT, LocalReader, copy_range, translate_os_errors, write_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from ckpttool.plan import CopyPlan, Proofs, SourceFile, TargetFile

T = TypeVar("T")
Advance = Callable[[int], None]
"""Called with the number of bytes done since the last call, from any thread."""

CAST_ELEMENTS = 1 << 19
"""Elements cast at a time: source and result together stay in a core's cache."""
BUFFER_BYTES = 1 << 20
"""Bytes copied at a time where they pass through this process."""
KERNEL_COPY_BYTES = 1 << 26
"""Bytes that the kernel copies between two reports of progress."""
TASK_ELEMENTS = 1 << 24
"""Elements that a thread takes on at a time: 64 MB of fp32."""
MAX_JOBS = 4
"""Threads that are used unasked."""
PAGE_BYTES = 4096
"""The unit in which kernels keep files in memory."""


@dataclass(slots=True)
class Result:
    """What running a plan found out."""

    overflowed: int = 0
    """Finite elements that became infinite in a narrower type."""


def run(plan: CopyPlan, directory: str, *, jobs: int | None, advance: Advance) -> Result:
    """Write every file of a plan into a directory.

    Args:
        plan: What to write.
        directory: An existing directory, which nobody reads yet.
        jobs: Threads; None for one where bytes are only copied, and as many as there are cores, up to MAX_JOBS, where
            they are cast. One file system writes one file for one thread at a time: more only wait for each other.
        advance: Told of bytes written.

    Raises:
        LayoutError: A comparison of the plan does not hold; nothing was written.
        StorageError: Reading or writing failed, or a source changed meanwhile.
    """
    result = Result()
    with Sources(plan.sources) as sources:
        if plan.proofs is not None:
            for problem in failed_proofs(plan.proofs, advance=lambda _: None, sources=sources):
                raise problem
        for file in plan.files:
            path = os.path.join(directory, file.name)
            fd = _create(path, file)
            threads = jobs or (default_jobs() if _casts(plan, file) else 1)
            try:
                tasks = (partial(_copy, plan, sources, rows, fd, path, advance) for rows in _split(plan, file))
                # closing(): no thread may be left writing when the file is closed, whatever happens here.
                with contextlib.closing(in_threads(tasks, threads)) as results:
                    result.overflowed += sum(results)
            finally:
                os.close(fd)
        sources.check_unchanged()
    return result


def failed_proofs(proofs: Proofs, *, advance: Advance, sources: Sources | None = None) -> Iterator[CkptError]:
    """Make every comparison and yield an error for each parameter that fails one."""
    opened = sources or Sources(proofs.sources)
    failed: set[int] = set()
    sides = Scratch(), Scratch()
    try:
        for row in proofs.rows:
            name = int(row["name"])
            if name not in failed and not _holds(proofs, opened, row, sides, advance):
                failed.add(name)
                master, copy = (SHORT_NAMES.get(d, d) for d in proofs.casts[int(row["cast"])])
                yield LayoutError(
                    proofs.sources[int(row["copy_source"])].path,
                    f"the {copy} copy of {proofs.names[name]} is not what its {master} master in "
                    f"{os.path.basename(proofs.sources[int(row['source'])].path)} says",
                    "two saves are mixed (restore it from a copy), or the model was changed after the optimizer's last "
                    "step (then --weights module writes the model's own copies)",
                )
    finally:
        if sources is None:
            opened.close()


def _holds(proofs: Proofs, sources: Sources, row: Any, sides: tuple[Scratch, Scratch], advance: Advance) -> bool:
    master, copy = proofs.casts[int(row["cast"])]
    start, copy_start, left = int(row["start"]), int(row["copy_start"]), int(row["numel"])
    while left:
        count = min(left, CAST_ELEMENTS)
        ours = sides[0].read(sources[int(row["source"])], start, count, master)
        theirs = sides[1].read(sources[int(row["copy_source"])], copy_start, count, copy)
        if not same_values(cast(ours, copy), theirs).all():
            return False
        advance(ours.nbytes + theirs.nbytes)
        start += ours.nbytes
        copy_start += theirs.nbytes
        left -= count
    return True


class Scratch:
    """Memory to read into, used again and again: fresh memory for every chunk costs more than reading it does."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def read(self, reader: LocalReader, start: int, count: int, dtype: str) -> NDArray[Any]:
        """Read elements of a type from a byte of a file; they are valid until the next call."""
        nbytes = count * itemsize(dtype)
        if len(self._memory) < nbytes:
            self._memory = bytearray(nbytes)
        reader.read_into(start, memoryview(self._memory)[:nbytes])
        return np.frombuffer(self._memory, dtype=numpy_dtype(dtype), count=count)


# ------------------------------------------------------------------------------------------------- one target file


def _create(path: str, file: TargetFile) -> int:
    with translate_os_errors(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with translate_os_errors(path):
            os.ftruncate(fd, file.nbytes)
        for offset, data in file.literals:
            write_at(fd, data, offset, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def default_jobs() -> int:
    """Threads for work that keeps a core busy."""
    return min(MAX_JOBS, os.cpu_count() or 1)


def _casts(plan: CopyPlan, file: TargetFile) -> bool:
    return any(plan.casts[i][0] != plan.casts[i][1] for i in np.unique(file.copies["cast"]))


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
    for row in rows:
        source = sources[int(row["source"])]
        pair = plan.casts[int(row["cast"])]
        start, numel, target = int(row["start"]), int(row["numel"]), int(row["target"])
        if pair[0] == pair[1]:
            _copy_bytes(source, start, numel * itemsize(pair[0]), fd, target, path, advance)
        else:
            overflowed += _copy_cast(source, start, numel, pair, fd, target, path, advance)
    return overflowed


def _copy_bytes(
    source: LocalReader, start: int, nbytes: int, fd: int, target: int, path: str, advance: Advance
) -> None:
    """Copy bytes as they are.

    The kernel's own copy moves (or, where the file system can, shares) whole pages if source and target lie at the same
    place in a page. If they do not it splits every page, and one large buffer is cheaper.
    """
    by_kernel = (start - target) % PAGE_BYTES == 0
    buffer = memoryview(b"")
    done = 0
    while done < nbytes:
        if by_kernel:
            count = min(KERNEL_COPY_BYTES, nbytes - done)
            by_kernel = copy_range(source, start + done, fd, target + done, count, path)
            if not by_kernel:
                continue
        else:
            buffer = buffer or memoryview(bytearray(min(BUFFER_BYTES, nbytes)))
            count = min(len(buffer), nbytes - done)
            source.read_into(start + done, buffer[:count])
            write_at(fd, buffer[:count], target + done, path)
        done += count
        advance(count)


def _copy_cast(
    source: LocalReader, start: int, numel: int, pair: tuple[str, str], fd: int, target: int, path: str,
    advance: Advance,
) -> int:  # fmt: skip
    overflowed = 0
    scratch = Scratch()
    while numel:
        count = min(numel, CAST_ELEMENTS)
        values = scratch.read(source, start, count, pair[0])
        result = cast(values, pair[1])
        write_at(fd, result.view(np.uint8).data, target, path)
        overflowed += _overflowed(values, result)
        advance(result.nbytes)
        start += values.nbytes
        target += result.nbytes
        numel -= count
    return overflowed


def _overflowed(values: NDArray[Any], result: NDArray[Any]) -> int:
    """Elements that the cast made infinite. Only fp16 is narrow enough for this to happen to a weight."""
    if result.dtype != np.float16:
        return 0
    infinite = np.isinf(result)
    return int((infinite & np.isfinite(values)).sum()) if infinite.any() else 0


# ------------------------------------------------------------------------------------------------- sources, threads


class Sources:
    """The files to read, opened when first asked for."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self._open: dict[int, LocalReader] = {}
        self._lock = threading.Lock()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = len(files) + 64
        if soft < wanted and (hard == resource.RLIM_INFINITY or hard > soft):
            limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))

    def __getitem__(self, index: int) -> LocalReader:
        reader = self._open.get(index)
        if reader is None:
            with self._lock:
                reader = self._open.get(index)
                if reader is None:
                    reader = self._open[index] = self._open_as_planned(self._files[index])
        return reader

    def __enter__(self) -> Sources:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def _open_as_planned(file: SourceFile) -> LocalReader:
        reader = LocalReader(file.path)
        if (reader.nbytes, reader.version) != (file.nbytes, file.version):
            reader.close()
            raise StorageError(file.path, "changed since its layout was read", WAIT)
        return reader

    def check_unchanged(self) -> None:
        """Make sure that no file was rewritten while it was read."""
        for reader in self._open.values():
            reader.check_unchanged()

    def close(self) -> None:
        """Close all."""
        for reader in self._open.values():
            reader.close()
        self._open.clear()


def in_threads(tasks: Iterator[Callable[[], T]], jobs: int) -> Generator[T, None, None]:
    """Run tasks, at most ``jobs`` at once and only as many waiting; the first error stops the rest."""
    if jobs <= 1:
        for task in tasks:
            yield task()
        return
    # Imported here, where it is needed: it takes a tenth of the start-up time.
    from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

    with ThreadPoolExecutor(jobs) as pool:
        running: set[Future[T]] = set()
        try:
            for task in tasks:
                if len(running) >= 2 * jobs:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    yield from (f.result() for f in done)
                running.add(pool.submit(task))
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (f.result() for f in done)
        finally:
            for future in running:
                future.cancel()
