"""Write a stream of bytes to a file in parts, concurrently if the storage gains from that."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from ckpttool.storage.buffers import give_back, take

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from concurrent.futures import Future
    from typing import TypeAlias

    from numpy.typing import NDArray

    from ckpttool.storage.base import Writer

    Buffers: TypeAlias = "queue.SimpleQueue[NDArray[np.uint8]]"


def write_stream(writer: Writer, stream: Iterable[bytes | memoryview], *, at_once: int) -> None:
    """Write all bytes of a file, in order. Memory: ``at_once + 1`` parts.

    Args:
        writer: The file.
        stream: Its bytes; another thread reads the stream, ahead of the writes.
        at_once: Parts in flight.

    Raises:
        StorageError: A part cannot be written.
    """
    buffers: Buffers = queue.SimpleQueue()
    for _ in range(at_once + 1):
        buffers.put(take(writer.part_bytes))
    parts = _packed(stream, buffers)
    # This function waits for both pools: when it returns, no thread reads the stream.
    with ThreadPoolExecutor(1, thread_name_prefix="ckpttool-pack") as packer:
        if at_once == 1:
            _write_one_by_one(writer, parts, packer, buffers)
        else:
            _write_at_once(writer, parts, buffers, at_once)
    while at_once == 1 and not buffers.empty():
        give_back(buffers.get())


def _write_one_by_one(
    writer: Writer, parts: Iterator[tuple[NDArray[np.uint8], memoryview]], packer: ThreadPoolExecutor, buffers: Buffers
) -> None:
    ahead = packer.submit(next, parts, None)
    start = 0
    while (found := ahead.result()) is not None:
        buffer, part = found
        ahead = packer.submit(next, parts, None)
        writer.write(start, part)
        start += len(part)
        buffers.put(buffer)


def _write_at_once(
    writer: Writer, parts: Iterator[tuple[NDArray[np.uint8], memoryview]], buffers: Buffers, at_once: int
) -> None:
    failed = threading.Event()
    running: list[Future[None]] = []

    def write(start: int, part: memoryview, buffer: NDArray[np.uint8]) -> None:
        try:
            writer.write(start, part)
        except BaseException as error:
            failed.set()
            writer.fail(error)
            raise
        finally:
            buffers.put(buffer)

    with ThreadPoolExecutor(at_once, thread_name_prefix="ckpttool-upload") as pool:
        try:
            start = 0
            for buffer, part in parts:
                if failed.is_set():
                    break
                # In order: a sequential writer must never wait for a part without a thread.
                running.append(pool.submit(write, start, part, buffer))
                start += len(part)
            for future in running:
                future.result()
        finally:
            for future in running:
                future.cancel()


def _packed(stream: Iterable[bytes | memoryview], buffers: Buffers) -> Iterator[tuple[NDArray[np.uint8], memoryview]]:
    """Pack the stream into full buffers, except for the last; the caller returns each buffer after its write."""
    buffer, filled = None, 0
    for data in stream:
        source = np.frombuffer(data, np.uint8)
        at = 0
        while at < len(source):
            if buffer is None:
                buffer = buffers.get()
            count = min(len(buffer) - filled, len(source) - at)
            np.copyto(buffer[filled : filled + count], source[at : at + count])  # releases the GIL
            filled += count
            at += count
            if filled == len(buffer):
                yield buffer, buffer.data
                buffer, filled = None, 0
    if buffer is not None:
        yield buffer, buffer[:filled].data
