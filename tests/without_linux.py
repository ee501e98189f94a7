"""A plugin of pytest that takes away what only Linux has, for ``make portable``: the commands do without.

A job of the workflow runs the same tests on macOS.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import mmap
import os
import sys
from typing import Any

CALLS = {"renameat2", "fallocate", "sync_file_range", "copy_file_range", "posix_fadvise"}
"""Functions of the C library."""
NAMES = (
    "copy_file_range", "O_DIRECT", "O_PATH", "O_NOATIME", "posix_fadvise", "posix_fallocate", "fdatasync",
    "sched_getaffinity", "memfd_create", "eventfd", "pidfd_open",
)  # fmt: skip
"""Names of ``os``."""


class _Library:
    """The C library of another system."""

    def __init__(self, name: str | None, **options: Any) -> None:
        self._library = _CDLL(name, **options)

    def __getattr__(self, name: str) -> Any:
        if name in CALLS:
            raise AttributeError(name)
        return getattr(self._library, name)


def _without_proc(function: Any) -> Any:
    """Return a function with which the package finds nothing in ``/proc``; psutil does."""

    def found(path: Any, *arguments: Any, **options: Any) -> Any:
        of_package = sys._getframe(1).f_globals.get("__name__", "").startswith("ckpttool")
        if of_package and isinstance(path, str) and path.startswith("/proc/"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return function(path, *arguments, **options)

    return found


_CDLL = ctypes.CDLL
for _name in NAMES:
    with contextlib.suppress(AttributeError):
        delattr(os, _name)
for _name in [name for name in dir(mmap) if name.startswith("MADV_")]:
    delattr(mmap, _name)
ctypes.CDLL = _Library  # type: ignore[assignment,misc]
builtins.open = _without_proc(builtins.open)
os.open, os.readlink, os.listdir = map(_without_proc, (os.open, os.readlink, os.listdir))
