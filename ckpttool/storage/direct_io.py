"""Open files for direct I/O and write to them past the page cache.

The page cache costs a copy, the allocation of kernel memory, and the eviction of other files' pages; with direct I/O
the disk reads from the buffer of this process.

Source: Linux, open(2): O_DIRECT; and Wang et al., "FastPersist: Accelerating Model Checkpointing in Deep Learning"
(2024), which writes DeepSpeed's checkpoints that way.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpttool.storage.safe_files import Directory

FILE_SYSTEMS = {"ext4", "xfs"}
"""File systems for direct I/O. Network file systems have caches and locks of their own."""
SHARING = {"xfs"}
"""File systems whose files can share blocks, which is faster than any copy."""
ALIGNMENT = 4096
"""Alignment of memory, offset and length of a direct write, in bytes; disks that require more refuse the write."""


def open_direct(path: str, directory: Directory | None = None) -> int:
    """Open an existing file for direct writes; return -1 if its file system supports none.

    Args:
        path: Path of the file, or its name in ``directory``.
        directory: Directory of the file.
    """
    flags = os.O_WRONLY | os.O_DIRECT
    with contextlib.suppress(OSError):
        if directory is not None:
            return directory.open_file(path, flags)
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    return -1


def write_direct(fd: int, data: memoryview, start: int) -> int:
    """Write aligned bytes with direct I/O; return the bytes written, 0 if the disk requires another alignment.

    Raises:
        OSError: Writing failed.
    """
    try:
        return os.pwrite(fd, data, start)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0


def file_system_of(path: str) -> str:
    """Return the type of the file system of a path, such as "ext4"; "" if unknown.

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
