"""An open file behind another: what readers that check bytes have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from typing_extensions import Self

    from ckpttool.ranges import ByteRange
    from ckpttool.storage.base import Reader


class WrappedReader:
    """Passes on all that reads no bytes. Subclasses add ``read``, ``read_many`` and ``read_into``.

    Args:
        reader: The file.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        """The file itself."""
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
        """Be ready to read these ranges."""
        self.reader.read_ahead(ranges)

    def check_unchanged(self) -> None:
        """Make sure that the file is still the one that was opened.

        Raises:
            StorageError: It was written anew since.
        """
        self.reader.check_unchanged()

    def close(self) -> None:
        """Release the file."""
        self.reader.close()
