"""Write the files of one rank into the directory of a checkpoint."""

from __future__ import annotations

import contextlib
import posixpath
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ckpttool.commit.marks import TAKEN, TakenError
from ckpttool.errors import CkptError
from ckpttool.storage import MANIFEST, MARK, ExistsError, aside_name, is_half_removed, walk
from ckpttool.storage.streams import write_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckpttool.checksums import Checksums
    from ckpttool.saving.payloads import OutgoingFile
    from ckpttool.storage import WritableStorage

ALREADY = "exists already: another process saves the same checkpoint"


def write_files(
    storage: WritableStorage, directory: str, files: Sequence[OutgoingFile], check: Callable[[], None],
    mode: int = 0o666,
) -> list[Checksums]:  # fmt: skip
    """Write new files; return their checksums, in order.

    Args:
        storage: Storage of the checkpoint.
        directory: Directory of the checkpoint.
        files: The files of this rank.
        check: Called right before the commit of each file; raises an error if another save has taken the directory.
        mode: Permissions of the files before the umask, on storages with permissions.

    Raises:
        TakenError: Another process has written one of the files.
        StorageError: A file cannot be written.
    """
    directories = {directory}
    with ThreadPoolExecutor(1, thread_name_prefix="ckpttool-hash") as pool:
        for file in files:
            path = posixpath.join(directory, file.name)
            if posixpath.dirname(path) not in directories:
                storage.make_directory(posixpath.dirname(path))
                directories.add(posixpath.dirname(path))
            _write_file(storage, path, file, pool, check, mode)
    for one in directories:
        storage.sync(one)
    return [file.checksums for file in files]


def _write_file(
    storage: WritableStorage, path: str, file: OutgoingFile, pool: ThreadPoolExecutor, check: Callable[[], None],
    mode: int,
) -> None:  # fmt: skip
    try:
        writer = storage.writer(path, file.nbytes, new=True, mode=mode)
        try:
            write_stream(writer, file.stream(pool.map), at_once=storage.parts_at_once)
            check()
            writer.commit()
        except BaseException:
            with contextlib.suppress(CkptError):
                writer.discard()
            raise
    except ExistsError as error:
        raise TakenError(path, ALREADY, TAKEN) from error


def put_new(storage: WritableStorage, path: str, data: bytes) -> None:
    """Write a new small file.

    Raises:
        TakenError: Another process has written the file.
        StorageError: The file cannot be written.
    """
    if not storage.put_new(path, data):
        raise TakenError(path, ALREADY, TAKEN)


def take_over(storage: WritableStorage, directory: str, mark: bytes) -> None:
    """Claim the directory of a dead save, and remove its files.

    Args:
        storage: Storage of the checkpoint.
        directory: Directory of the checkpoint.
        mark: The in-progress marker of this save.

    Raises:
        TakenError: Another process has committed or claimed the directory meanwhile.
        StorageError: The directory cannot be cleared.
    """
    above, name = posixpath.split(directory)
    aside = posixpath.join(above, aside_name(f"{name}.{secrets.token_hex(4)}"))
    path = posixpath.join(directory, MARK)
    # After the rename a save that still runs finds none of its files in the directory.
    if storage.rename(directory, aside):
        if storage.exists(posixpath.join(aside, MANIFEST)):
            storage.rename(aside, directory)
            raise TakenError(directory, "was committed by another process meanwhile", TAKEN)
        storage.remove_tree(aside)
        storage.make_directory(directory)
        put_new(storage, path, mark)
        return
    storage.refresh([])
    seen = _version(storage, directory)
    removed = bool(seen) and is_half_removed(storage, directory)
    if not storage.put_new(path, mark, over=seen):
        raise TakenError(path, "was claimed by another process meanwhile", TAKEN)
    # From now on a save that still runs finds the marker of another save.
    storage.refresh([])
    if not removed and storage.exists(posixpath.join(directory, MANIFEST)):
        storage.delete([path])
        raise TakenError(directory, "was committed by another process meanwhile", TAKEN)
    storage.abandon(directory)
    storage.delete([posixpath.join(directory, name) for name, _ in walk(storage, directory) if name != MARK])


def _version(storage: WritableStorage, directory: str) -> str | None:
    """Return the version of a directory's in-progress marker; None without a marker."""
    if not storage.is_dir(directory):
        return None
    return next((entry.version for entry in storage.listing(directory) if entry.name == MARK), None)
