"""Writing past the page cache.

Through the page cache each byte is copied to memory that the kernel must find first, and that pushes out what others
read; past it the disk takes them from here.

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
"""Those that are written past the page cache. Those of networks have caches and locks of their own."""
SHARING = {"xfs"}
"""Those of them in which files may share blocks, which is better than any copy of whole pages."""
ALIGNMENT = 4096
"""What memory, offset and length of such a write are a multiple of, in bytes; disks that want more refuse it."""


def open_direct(path: str, directory: Directory | None = None) -> int:
    """Open a file that is there for writing past the page cache; -1 if it takes no such writes.

    Args:
        path: Where it is, or its name in the directory.
        directory: What holds it.
    """
    flags = os.O_WRONLY | os.O_DIRECT
    with contextlib.suppress(OSError):
        if directory is not None:
            return directory.open_file(path, flags)
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    return -1


def write_direct(fd: int, data: memoryview, start: int) -> int:
    """Write aligned bytes past the page cache; how many were, none if the disk wants them aligned otherwise.

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
