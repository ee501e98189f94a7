"""Base class of readers that check the bytes of another reader."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from typing_extensions import Self

    from ckpttool.ranges import ByteRange
    from ckpttool.storage.base import Reader


class WrappedReader:
    """Forwards all methods that return no bytes. Subclasses add ``read``, ``read_many`` and ``read_into``.

    Args:
        reader: The wrapped reader.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        """The wrapped reader."""
        self.path = reader.path
        self.nbytes = reader.nbytes
        self.version = reader.version
        self.remote = reader.remote

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read_ahead(self, ranges: Sequence[ByteRange]) -> None:
        """Prefetch ranges."""
        self.reader.read_ahead(ranges)

    def check_unchanged(self) -> None:
        """Check that the file has not changed since it was opened.

        Raises:
            StorageError: The file was rewritten.
        """
        self.reader.check_unchanged()

    def close(self) -> None:
        """Release the file."""
        self.reader.close()
