"""A file of a plan, streamed as a file of a save: assembled from its sources part by part, with its checksums."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ckpttool.checksums import chunk_bytes, crc32, cuts, of_pieces
from ckpttool.execution.copy import PartAssembler

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from ckpttool.checksums import Checksums
    from ckpttool.execution.sources import Sources
    from ckpttool.plan import CopyPlan, TargetFile
    from ckpttool.saving.payloads import Hashed, Mapper
    from ckpttool.units import Advance

PART_BYTES = 1 << 23
"""Bytes of the file that are assembled at once."""


class PlannedFile:
    """A file of a plan that ``saving.files`` writes; see ``OutgoingFile``.

    Args:
        plan: The plan.
        file: One of its files.
        sources: The source files of the plan; the caller closes them.
        jobs: Parts that are assembled concurrently.
        memory: Bytes of parts in flight; one part is always allowed.
        advance: Called with the number of bytes streamed since the last call.
    """

    def __init__(
        self, plan: CopyPlan, file: TargetFile, sources: Sources, *, jobs: int, memory: int, advance: Advance
    ) -> None:
        self.name = file.name
        self.nbytes = file.nbytes
        self._assembler = PartAssembler(plan, file, sources)
        self._jobs = max(1, min(jobs, memory // self._assembler.cost(PART_BYTES)))
        self._advance = advance
        self._hashed: list[Hashed] = []
        self.overflowed = 0
        """Finite values that were cast to infinity; known when ``stream`` has ended."""

    @property
    def checksums(self) -> Checksums:
        """Checksums of the file; known when ``stream`` has ended."""
        return of_pieces(self.nbytes, self._hashed)

    def stream(self, mapped: Mapper = map) -> Iterator[bytes | memoryview]:
        """Yield all bytes of the file, in order.

        Raises:
            StorageError: Reading failed, or a source changed meanwhile.
        """
        size = chunk_bytes(self.nbytes)
        self._hashed, self.overflowed = [], 0
        for start, data in self._parts():
            self._hashed += [
                (a, b - a, crc32(data[a - start : b - start])) for a, b in cuts(start, start + len(data), size)
            ]
            yield data
            self._advance(len(data))

    def _parts(self) -> Iterator[tuple[int, memoryview]]:
        """Assemble the parts in threads, a few ahead; yield them in order."""
        waiting: deque[tuple[int, Future[tuple[memoryview, int]]]] = deque()
        with ThreadPoolExecutor(self._jobs, thread_name_prefix="ckpttool-assemble") as pool:
            try:
                for start in range(0, self.nbytes, PART_BYTES):
                    if len(waiting) > self._jobs:
                        yield self._taken(*waiting.popleft())
                    end = min(start + PART_BYTES, self.nbytes)
                    waiting.append((start, pool.submit(self._assembler.assemble, start, end)))
                while waiting:
                    yield self._taken(*waiting.popleft())
            finally:
                for _, future in waiting:
                    future.cancel()

    def _taken(self, start: int, future: Future[tuple[memoryview, int]]) -> tuple[int, memoryview]:
        data, overflowed = future.result()
        self.overflowed += overflowed
        return start, data
