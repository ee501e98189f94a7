"""Scratch directories: a training framework writes to them, or reads from them, during one call.

Nothing in them is a checkpoint, so that they are written without ``ckpttool.storage``: no file is synced.
"""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def scratch_directory() -> tempfile.TemporaryDirectory[str]:
    """Create a scratch directory; as a context manager it gives the path, and removes the directory at its end."""
    return tempfile.TemporaryDirectory(prefix="ckpttool-", ignore_cleanup_errors=True)


def make_folder(directory: str, name: str) -> str:
    """Create a folder in a scratch directory; return its path."""
    path = os.path.join(directory, name)
    os.makedirs(path)
    return path


def write_file(directory: str, name: str, data: bytes | memoryview) -> None:
    """Write a file of a scratch directory.

    Args:
        directory: The scratch directory.
        name: Relative path of the file, without "..".
        data: Its content.
    """
    path = os.path.join(directory, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)


def remove_files(directory: str, matches: Callable[[str], bool]) -> None:
    """Remove the files of a scratch directory whose name matches."""
    for above, _, names in os.walk(directory):
        for name in filter(matches, names):
            os.unlink(os.path.join(above, name))
