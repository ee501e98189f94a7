"""One file written from its first byte to its last, past the page cache where a disk of this machine holds it.

A save waits until its bytes are on the disk. Through the page cache each of them is copied to memory that the kernel
must find first, and that pushes out what others read; past it the disk takes them from here. Measured with checksums,
that is 0.25 s of a processor for each GB, against 0.5 s where free memory is at hand and 3 s where it is not. What the
disk takes must be aligned, so files are packed into blocks.

Source: Linux, open(2): O_DIRECT; and Wang et al., "FastPersist: Accelerating Model Checkpointing in Deep Learning"
(2024), which writes DeepSpeed's checkpoints that way.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import itertools
import mmap
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

BLOCK_BYTES = 1 << 23
"""Bytes of one write."""
DIRECT = {"ext4", "xfs"}
"""File systems that are written past the page cache. Those of networks have caches and locks of their own."""
_SYNC_FILE_RANGE_WRITE = 2


class BlockWriter:
    """Writes files, one at a time; its memory is used again for each."""

    def __init__(self) -> None:
        self._blocks: list[Any] = []

    def write(self, fd: int, path: str, nbytes: int, stream: Iterable[bytes | memoryview]) -> None:
        """Write all of a file.

        Args:
            fd: It, open for writing.
            path: It, by name.
            nbytes: Its size.
            stream: Its bytes, in order; asked for in another thread, ahead of what is written.

        Raises:
            OSError: Writing failed.
        """
        direct = -1
        if nbytes >= BLOCK_BYTES and file_system_of(path) in DIRECT:
            with contextlib.suppress(OSError):  # it takes no such writes
                direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            self._write(fd, direct, stream)
        finally:
            if direct >= 0:
                os.close(direct)

    def _write(self, fd: int, direct: int, stream: Iterable[bytes | memoryview]) -> None:
        if not self._blocks:
            # Mapped, and so aligned. Two: one is filled while the other is written.
            self._blocks = [np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), np.uint8) for _ in range(2)]
        blocks = _packed(stream, self._blocks)
        # Whatever happens, nobody reads the stream any more when this returns: the pool is waited for.
        with ThreadPoolExecutor(1, thread_name_prefix="ckpttool-pack") as pool:
            ahead = pool.submit(next, blocks, None)
            start = 0
            while (block := ahead.result()) is not None:
                ahead = pool.submit(next, blocks, None)
                done = _write_direct(direct, block, start) if len(block) == BLOCK_BYTES else 0
                write_all(fd, block[done:], start + done)
                start += len(block)


def _packed(stream: Iterable[bytes | memoryview], blocks: Sequence[Any]) -> Iterator[memoryview]:
    """Bytes in blocks that are full, but for the last; each is valid until the next but one is asked for."""
    turns = itertools.cycle(blocks)
    block, filled = next(turns), 0
    for data in stream:
        source = np.frombuffer(data, np.uint8)
        at = 0
        while at < len(source):
            count = min(len(block) - filled, len(source) - at)
            np.copyto(block[filled : filled + count], source[at : at + count])  # others may run meanwhile
            filled += count
            at += count
            if filled == len(block):
                yield memoryview(block)
                block, filled = next(turns), 0
    if filled:
        yield memoryview(block[:filled])


def _write_direct(fd: int, block: memoryview, start: int) -> int:
    """Write a block past the page cache; how many bytes of it were."""
    if fd < 0:
        return 0
    try:
        return os.pwrite(fd, block, start)
    except OSError as error:
        if error.errno != errno.EINVAL:  # this disk wants another alignment
            raise
        return 0


def write_all(fd: int, data: bytes | memoryview, start: int) -> None:
    """Write through the page cache, and let the disk begin with it, so that it has little left to do when synced.

    Raises:
        OSError: Writing failed.
    """
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:] if done else data, start + done)
    call = _sync_file_range()
    if call is not None and data:
        call(fd, start, len(data), _SYNC_FILE_RANGE_WRITE)


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    found = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return found


def file_system_of(path: str) -> str:
    """What kind of file system holds a path, such as "ext4"; empty where that cannot be said.

    Source: Linux, proc_pid_mountinfo(5).
    """
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            found = re.match(r"\d+ \d+ (\S+) .* - (\S+) ", line)
            if found and found[1] == wanted:
                return found[2]
    return ""
