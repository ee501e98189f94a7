"""The place of a tensor's elements in the files of a checkpoint.

A place computes its rows on demand: showing a layout needs neither rows nor numpy.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from ckpttool.dtypes import itemsize

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

_ROW = struct.Struct("<QQIQQQQQ")
"""The bytes of one row of EXTENT."""


class Place(ABC):
    """The place of the elements of a tensor. Callers must not change it."""

    __slots__ = ()

    @property
    @abstractmethod
    def rows(self) -> NDArray[np.void]:
        """Rows of EXTENT in ascending start; read-only."""

    @abstractmethod
    def sound(self, numel: int, dtype: str, sizes: Sequence[int]) -> bool:
        """Return whether the place surely has each element exactly once, inside its files; if False, its rows must be
        checked.

        Args:
            numel: Elements of the tensor.
            dtype: Its type, safetensors' spelling.
            sizes: Bytes of each file.
        """


class Table(Place):
    """Elements in any order and any number of runs.

    Args:
        rows: Rows of EXTENT in ascending start.
    """

    __slots__ = ("_rows",)

    def __init__(self, rows: NDArray[np.void]) -> None:
        rows.flags.writeable = False
        self._rows = rows

    @property
    def rows(self) -> NDArray[np.void]:
        """The rows."""
        return self._rows

    def sound(self, numel: int, dtype: str, sizes: Sequence[int]) -> bool:
        """Return False: the rows must be checked."""
        return False


class Computed(Place):
    """No place: the values are computed by a formula.

    Args:
        numel: Elements of the tensor.
    """

    __slots__ = ("numel",)

    def __init__(self, numel: int) -> None:
        self.numel = numel

    @property
    def rows(self) -> NDArray[np.void]:
        """No rows."""
        import numpy as np

        from ckpttool.model.extents import EXTENT

        return np.frombuffer(b"", dtype=EXTENT)

    def sound(self, numel: int, dtype: str, sizes: Sequence[int]) -> bool:
        """Return whether the formula has an element for each of the tensor."""
        return numel == self.numel


class Renumbered(Place):
    """The place of a tensor in a combination of checkpoints, whose files have consecutive numbers.

    Args:
        place: The place in its own checkpoint.
        by: Number of files before that checkpoint's.
    """

    __slots__ = ("_by", "_place", "_rows")

    def __init__(self, place: Place, by: int) -> None:
        self._place = place
        self._by = by
        self._rows: NDArray[np.void] | None = None

    def __reduce__(self) -> tuple[type[Renumbered], tuple[Place, int]]:
        return type(self), (self._place, self._by)  # rows are larger, and quick to compute again

    @property
    def rows(self) -> NDArray[np.void]:
        """The rows with the new numbers."""
        if self._rows is None:
            rows = self._place.rows.copy()
            rows["file"] += self._by
            rows.flags.writeable = False
            self._rows = rows
        return self._rows

    def sound(self, numel: int, dtype: str, sizes: Sequence[int]) -> bool:
        """Return True: its own checkpoint was checked when it was opened."""
        return True


class Contiguous(Place):
    """All elements in order, contiguous in one file.

    Args:
        numel: Elements.
        file: Index into the checkpoint's files.
        offset: First byte, counted from the start of the file.
    """

    __slots__ = ("file", "numel", "offset")

    def __init__(self, numel: int, file: int, offset: int) -> None:
        self.numel = numel
        self.file = file
        self.offset = offset

    @property
    def rows(self) -> NDArray[np.void]:
        """One row; none for a tensor without elements."""
        import numpy as np

        from ckpttool.model.extents import EXTENT

        row = _ROW.pack(0, self.numel, self.file, self.offset, 0, 1, 0, 0) if self.numel else b""
        return np.frombuffer(row, dtype=EXTENT)

    def sound(self, numel: int, dtype: str, sizes: Sequence[int]) -> bool:
        """Return whether the run has the tensor's length and ends inside its file."""
        if numel != self.numel:
            return False
        return not numel or self.offset + numel * itemsize(dtype) <= sizes[self.file]


class Runs(Place):
    """Elements in order, in several runs that are contiguous each.

    Args:
        numel: Elements of the tensor.
        runs: Of each run: first element, elements, index into the checkpoint's files, first byte; in ascending order.
    """

    __slots__ = ("_packed", "numel")

    def __init__(self, numel: int, runs: Iterable[tuple[int, int, int, int]]) -> None:
        self.numel = numel
        self._packed = b"".join(_ROW.pack(*run, 0, 1, 0, 0) for run in runs)

    @property
    def rows(self) -> NDArray[np.void]:
        """A row for each run."""
        import numpy as np

        from ckpttool.model.extents import EXTENT

        return np.frombuffer(self._packed, dtype=EXTENT)

    def sound(self, numel: int, dtype: str, sizes: Sequence[int]) -> bool:
        """Return whether each run begins where the one before ends, and all end inside their files."""
        at, width = 0, itemsize(dtype)
        for start, count, file, offset, *_ in _ROW.iter_unpack(self._packed):
            if start != at or offset + count * width > sizes[file]:
                return False
            at += count
        return at == numel == self.numel
