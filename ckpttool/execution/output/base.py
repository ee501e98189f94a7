"""Protocols of an output that executors write to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ckpttool.plan import TargetFile
    from ckpttool.storage import Writer


class Output(Protocol):
    """The destination of a plan's files."""

    def has(self, file: TargetFile) -> bool:
        """Whether an earlier run completed the file."""

    def begin(self, file: TargetFile) -> Writer:
        """Begin to write a file.

        Raises:
            StorageError: The file cannot be created.
        """

    def shared_file(self) -> str | None:
        """Return the full path of a file that workers must see to write here; None if they need none.

        Raises:
            StorageError: The file cannot be written.
        """
