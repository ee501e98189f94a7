"""What a save does on local disk, or on a file system that nodes share: every step durable before the next.

Source of the order of steps: POSIX, rename() and fsync(): a file's bytes are safe after fsync of the file, its name
after fsync of the directory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ckpttool.commit.marks import PARTIAL, TAKEN, TakenError
from ckpttool.storage import (
    LOCAL,
    MANIFEST,
    MARK,
    REMOVED,
    remove_directory,
    rename_new,
    reserve,
    sync_directory,
    translate_os_errors,
)
from ckpttool.storage.local import CREATE
from ckpttool.storage.safe_files import temporary_name
from ckpttool.storage.stream_writer import BlockWriter, write_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpttool.checksums import Checksums
    from ckpttool.saving.payloads import OutgoingFile


class Disk:
    """Saves on local disk."""

    storage = LOCAL

    def __init__(self) -> None:
        self._blocks = BlockWriter()

    def prepare(self, directory: str) -> None:
        """Make a directory, and those above it.

        Raises:
            StorageError: It cannot be made.
        """
        with translate_os_errors(directory):
            missing = []
            above = directory
            while above and not os.path.isdir(above):
                missing.append(above)
                above = os.path.dirname(above)
            for path in reversed(missing):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path)
                sync_directory(os.path.dirname(path) or ".")

    def free_bytes(self, directory: str) -> int | None:
        """Bytes that can still be written."""
        with translate_os_errors(directory):
            info = os.statvfs(directory)
        return info.f_bavail * info.f_frsize

    def put(self, path: str, data: bytes) -> None:
        """Write a small file: as a whole, or what was there stays.

        Raises:
            StorageError: It cannot be written.
        """
        self._write(path, lambda fd, _: write_all(fd, data, 0), new=False)
        with translate_os_errors(path):
            sync_directory(os.path.dirname(path))

    def put_new(self, path: str, data: bytes) -> None:
        """Write a small file where there is none.

        Raises:
            TakenError: There is one.
            StorageError: It cannot be written.
        """
        self._write(path, lambda fd, _: write_all(fd, data, 0), new=True)
        with translate_os_errors(path):
            sync_directory(os.path.dirname(path))

    def take_over(self, directory: str, mark: bytes) -> None:
        """Clear away what a save that has died left of a directory, and claim it.

        Raises:
            TakenError: It was committed meanwhile, or somebody else has claimed it.
            StorageError: It cannot be cleared.
        """
        above, name = os.path.split(directory)
        aside = os.path.join(above, f".{name}.{secrets.token_hex(4)}{REMOVED}")
        with translate_os_errors(directory):
            os.rename(directory, aside)  # from here on, whoever still writes there finds none of its files
            sync_directory(above)
            if os.path.lexists(os.path.join(aside, MANIFEST)):
                os.rename(aside, directory)
                sync_directory(above)
                raise TakenError(directory, "was committed by another process meanwhile", TAKEN)
        remove_directory(aside)
        self.prepare(directory)
        self.put_new(os.path.join(directory, MARK), mark)

    def write(self, directory: str, files: Sequence[OutgoingFile], check: Callable[[], None]) -> list[Checksums]:
        """Write a rank's files, none over another; their checksums, in order.

        Args:
            directory: Where.
            files: What.
            check: Called right before a file gets its name; raises if it must not any more.

        Raises:
            TakenError: One is there already.
            StorageError: One cannot be written.
        """
        directories = {directory}
        with ThreadPoolExecutor(1, thread_name_prefix="ckpttool-hash") as pool:
            for file in files:
                path = os.path.join(directory, file.name)
                if os.path.dirname(path) not in directories:
                    self.prepare(os.path.dirname(path))
                    directories.add(os.path.dirname(path))
                self._write_file(path, file, pool, check)
        for one in directories:
            with translate_os_errors(one):
                sync_directory(one)
        return [file.checksums for file in files]

    def _write_file(self, path: str, file: OutgoingFile, pool: ThreadPoolExecutor, check: Callable[[], None]) -> None:
        def fill(fd: int, partial: str) -> None:
            reserve(fd, file.nbytes, path)
            self._blocks.write(fd, partial, file.nbytes, file.stream(pool.map))

        self._write(path, fill, new=True, check=check)

    @staticmethod
    def _write(
        path: str, fill: Callable[[int, str], None], *, new: bool, check: Callable[[], None] = lambda: None
    ) -> None:
        above, name = os.path.split(path)
        partial = os.path.join(above, temporary_name(name, PARTIAL))  # another process may be writing the same
        with translate_os_errors(path):
            fd = os.open(partial, CREATE, 0o666)
            try:
                try:
                    fill(fd, partial)
                    os.fsync(fd)
                finally:
                    os.close(fd)
                check()
                if new:
                    _rename_new(partial, path)
                else:
                    os.rename(partial, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(partial)
                raise

    def delete(self, path: str) -> None:
        """Remove a file, if it is there.

        Raises:
            StorageError: It cannot be removed.
        """
        with translate_os_errors(path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            sync_directory(os.path.dirname(path))

    def remove(self, directory: str) -> None:
        """Remove a directory so that what is left of it if that fails is not taken for whole.

        Raises:
            StorageError: Something in it cannot be removed.
        """
        remove_directory(directory)

    def set_aside(self, directory: str, aside: str) -> bool:
        """Give a directory another name; False where that cannot be done at once.

        Raises:
            StorageError: It cannot be renamed.
        """
        with translate_os_errors(directory):
            os.rename(directory, aside)
            sync_directory(os.path.dirname(directory))
        return True


def _rename_new(partial: str, path: str) -> None:
    try:
        rename_new(partial, path)
    except FileExistsError as error:
        raise TakenError(path, "is there already: another process saves the same", TAKEN) from error
