"""Fail or interrupt a chosen system call of the code under test."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WATCHED = (
    "open", "mkdir", "ftruncate", "pwrite", "pread", "preadv", "copy_file_range", "replace", "unlink", "listdir",
)  # fmt: skip
"""Functions of ``os`` by which ckpttool reads sources and changes disks."""


class Disk:
    """Counts operations, and runs an action at one of them.

    Args:
        at: Number of the operation at which to act, counted from 0; -1 for none.
        act: The action, which runs before the operation and usually raises an error.
        only: Names of operations to count; default: all watched ones.
    """

    def __init__(self, at: int = -1, act: Callable[[], object] | None = None, only: tuple[str, ...] = WATCHED) -> None:
        self.at = at
        self.act = act
        self.only = only
        self.operations: list[str] = []
        """Names of the operations so far."""
        self.acted = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[Disk]:
        """Watch the operations of the body."""
        with contextlib.ExitStack() as stack:
            for name in self.only:
                stack.enter_context(mock.patch.object(os, name, self._wrapped(name, getattr(os, name))))
            yield self

    def _wrapped(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            # Cleanup after a failure is not counted.
            if self.acted or _cleans_up() or (arguments and isinstance(arguments[0], int) and name == "listdir"):
                return operation(*arguments, **options)
            self.operations.append(name)
            if len(self.operations) - 1 == self.at and self.act is not None:
                self.acted = True
                self.act()
            return operation(*arguments, **options)

        return wrapper


def _cleans_up() -> bool:
    """Return whether the caller is ``shutil.rmtree`` or removes a staging directory."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(("shutil", "ckpttool.storage.safe")):
        if frame.f_code.co_name == "_remove":
            return True
        frame = frame.f_back
    return bool(frame.f_globals["__name__"] == "shutil")


def failing(code: int) -> Callable[[], object]:
    """Return an action that raises an OSError."""

    def act() -> None:
        raise OSError(code, os.strerror(code))

    return act


def interrupting() -> None:
    """Interrupt as Ctrl-C does."""
    raise KeyboardInterrupt
