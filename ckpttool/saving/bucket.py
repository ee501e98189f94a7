"""What a save does in a bucket: an object is there as a whole when the store has acknowledged it, and not before."""

from __future__ import annotations

import contextlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from ckpttool.commit.marks import TAKEN, TakenError
from ckpttool.errors import CkptError
from ckpttool.storage import MANIFEST, MARK, ExistsError, is_half_removed, walk
from ckpttool.storage.removal import remove_remote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from ckpttool.checksums import Checksums
    from ckpttool.saving.payloads import OutgoingFile
    from ckpttool.storage.fsspec import RemoteStorage, Upload

LOG = logging.getLogger("ckpttool")
PARTS_AT_ONCE = 8
"""Parts that one rank uploads at the same time; each is held in memory meanwhile."""


class Bucket:
    """Saves on a distant storage.

    Args:
        storage: Where.
    """

    def __init__(self, storage: RemoteStorage) -> None:
        self.storage = storage

    def prepare(self, directory: str) -> None:
        """Stores have no directories."""
        self.storage.forget()

    def free_bytes(self, directory: str) -> int | None:
        """Stores do not say."""
        return None

    def put(self, path: str, data: bytes) -> None:
        """Write a small object.

        Raises:
            StorageError: It cannot be written.
        """
        self.storage.put(path, data)

    def put_new(self, path: str, data: bytes) -> None:
        """Write a small object where there is none.

        Raises:
            TakenError: There is one.
            StorageError: It cannot be written.
        """
        if not self.storage.put_new(path, data):
            raise TakenError(path, "is there already: another process saves the same", TAKEN)

    def take_over(self, directory: str, mark: bytes) -> None:
        """Claim a directory in which a save has died, and clear away what it left.

        Raises:
            TakenError: It was committed meanwhile, or somebody else has claimed it.
            StorageError: It cannot be cleared.
        """
        path = f"{directory}/{MARK}"
        self.storage.forget()
        seen = self.storage.entry(path).version if self.storage.exists(path) else None
        removed = seen is not None and is_half_removed(self.storage, directory)
        if not self.storage.put_new(path, mark, over=seen):
            raise TakenError(path, "was claimed by another process meanwhile", TAKEN)
        # From here on, whoever still writes there sees that it is not its own any more.
        self.storage.forget()
        if not removed and self.storage.exists(f"{directory}/{MANIFEST}"):
            self.storage.delete([path])
            raise TakenError(directory, "was committed by another process meanwhile", TAKEN)
        self._abort_uploads(directory)
        names = [name for name, _ in walk(self.storage, directory) if name != MARK]
        self.storage.delete([f"{directory}/{name}" for name in names])

    def write(self, directory: str, files: Sequence[OutgoingFile], check: Callable[[], None]) -> list[Checksums]:
        """Write a rank's files, none over another; their checksums, in order.

        Args:
            directory: Where.
            files: What.
            check: Called right before files can be seen; raises if they must not be any more.

        Raises:
            TakenError: One is there already.
            StorageError: One cannot be written.
        """
        uploads: list[Upload] = []
        try:
            with ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="ckpttool-upload") as pool:
                for file in files:
                    self._write_file(f"{directory}/{file.name}", file, pool, uploads, check)
            if uploads:
                check()
            self.storage.at_once([partial(upload.commit) for upload in uploads])
        except BaseException as error:
            # Without conditional writes, what is there under these names may be another's.
            if self.storage.parts_from_anywhere or not isinstance(error, (TakenError, ExistsError)):
                with contextlib.suppress(CkptError):
                    self.storage.at_once([partial(upload.discard) for upload in uploads])
            if isinstance(error, ExistsError):
                raise TakenError(error.path, "is there already: another process saves the same", TAKEN) from error
            raise
        return [file.checksums for file in files]

    def _write_file(
        self, path: str, file: OutgoingFile, pool: ThreadPoolExecutor, uploads: list[Upload], check: Callable[[], None]
    ) -> None:
        size = self.storage.part_bytes(file.nbytes)
        if file.nbytes <= size:
            data = b"".join(file.stream())
            check()
            self.put_new(path, data)
            return
        upload = self.storage.create(path, file.nbytes, new=True)
        uploads.append(upload)
        parts = _parts(file.stream(), size)
        room, failed = threading.Semaphore(PARTS_AT_ONCE), threading.Event()
        running: list[Future[None]] = []

        def send(start: int, data: bytearray) -> None:
            try:
                upload.write(start, memoryview(data))
            except BaseException as error:
                failed.set()
                upload.give_up(error)
                raise
            finally:
                room.release()

        try:
            for start in range(0, file.nbytes, size):
                room.acquire()
                if failed.is_set():
                    break
                # in order, so that what has to be written in order never waits for what has not begun
                running.append(pool.submit(send, start, next(parts)))
            for future in running:
                future.result()
        finally:
            for future in running:
                future.cancel()

    def delete(self, path: str) -> None:
        """Remove an object, if it is there.

        Raises:
            StorageError: It cannot be removed.
        """
        self.storage.delete([path])

    def remove(self, directory: str) -> None:
        """Remove all objects of a directory so that what is left of it if that fails is not taken for whole.

        Raises:
            StorageError: One cannot be removed.
        """
        self.storage.forget()
        self._abort_uploads(directory)  # before the mark goes: who is killed here does it again
        remove_remote(self.storage, directory)

    def _abort_uploads(self, directory: str) -> None:
        prefix = f"{self.storage.object_name(directory)}/"
        try:
            begun = [key.removeprefix(prefix) for key in self.storage.uploads(directory)]
            if begun:
                self.storage.abort_uploads(directory, begun)
        except CkptError as error:  # these credentials may not see them
            LOG.warning("uploads that a killed save began were not given up: %s", error)

    def set_aside(self, directory: str, aside: str) -> bool:
        """Objects cannot be renamed."""
        return False


def _parts(stream: Iterable[bytes | memoryview], size: int) -> Iterator[bytearray]:
    """Bytes in parts of one size, but for the last."""
    part = bytearray()
    for data in stream:
        view = memoryview(data)
        while view:
            count = min(size - len(part), len(view))
            part += view[:count]
            view = view[count:]
            if len(part) == size:
                yield part
                part = bytearray()
    if part:
        yield part
