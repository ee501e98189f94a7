"""The fragments of a parameter in the partitions of a flat buffer, one partition for each data-parallel rank.

A checkpoint has a fragment for each parameter, state and rank: millions at a thousand ranks. They follow from a few
numbers, and become rows of numpy when a state's elements are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpttool.dtypes import itemsize
from ckpttool.model.places import Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


class BufferSlice(NamedTuple):
    """Elements of a flat buffer that is cut into equal partitions (stages 1 and 2)."""

    numel: int
    """Elements of the parameter."""
    offset: int
    """First element in the flat buffer."""
    end: int
    """First element of the next parameter, or the end of the buffer."""
    partition: int
    """Elements of each partition, padding included."""

    @property
    def ranks(self) -> range:
        """Ranks whose partition holds some of the elements."""
        if not self.numel:
            return range(0)
        return range(self.offset // self.partition, (self.offset + self.numel - 1) // self.partition + 1)

    def numel_on(self, rank: int) -> int:
        """Return the number of elements in the partition of a rank."""
        begin = rank * self.partition
        return max(0, min(begin + self.partition, self.offset + self.numel) - max(begin, self.offset))

    def columns(self) -> tuple[NDArray[np.int64], ...]:
        """Cut the parameter at the borders of the partitions; one row for each fragment, in ascending start.

        Returns:
            First element, in elements of the flattened parameter; elements; data-parallel rank of the partition; first
            element, counted from the start of the rank's partition; elements of padding behind the fragment.
        """
        import numpy as np

        rank = np.arange(self.ranks.start, self.ranks.stop, dtype=np.int64)
        begin = np.maximum(rank * self.partition, self.offset)
        numel = np.minimum((rank + 1) * self.partition, self.offset + self.numel) - begin
        padding = np.zeros_like(rank)
        padding[-1:] = min(self.end, self.ranks.stop * self.partition) - (self.offset + self.numel)
        return begin - self.offset, numel, rank, begin - rank * self.partition, padding

    def too_short(self, partitions: StoredPartitions) -> int | None:
        """Return the first rank whose partition ends before its fragment; None if there is none."""
        end = self.offset + self.numel
        return next(
            (r for r in self.ranks if partitions.numels[r] < min(end - r * self.partition, self.partition)), None
        )


class EqualParts(NamedTuple):
    """A parameter that is cut into one part per rank, of ceil(numel / ranks) elements; the last ones are padded."""

    numel: int
    """Elements of the parameter."""
    ranks: int
    """Number of ranks."""
    position: int
    """First element of each part, counted from the start of the rank's partition."""

    @property
    def part(self) -> int:
        """Elements of each part, padding included."""
        return -(-self.numel // self.ranks)

    def columns(self) -> tuple[NDArray[np.int64], ...]:
        """Cut the parameter into its parts; see ``BufferSlice.columns``."""
        import numpy as np

        rank = np.arange(self.ranks, dtype=np.int64)
        numel = np.clip(self.numel - rank * self.part, 0, self.part)
        start = np.minimum(rank * self.part, self.numel)
        return start, numel, rank, np.full_like(rank, self.position), self.part - numel

    def too_short(self, partitions: StoredPartitions) -> int | None:
        """Return the first rank whose partition ends before its part; None if there is none."""
        if partitions.shortest >= self.position + self.part:
            return None
        left = ((r, max(0, min(self.part, self.numel - r * self.part))) for r in range(self.ranks))
        return next((r for r, numel in left if partitions.numels[r] < self.position + numel), None)


Fragments = BufferSlice | EqualParts
"""The elements of one parameter in the partitions of a flat buffer."""


class StoredPartitions:
    """One state of a flat buffer: the place of each rank's partition.

    Args:
        dtype: Type of the elements.
        places: Index of the file, first byte in it, and number of stored elements, for each rank.
    """

    __slots__ = ("_checked", "dtype", "files", "numels", "offsets", "shortest")

    def __init__(self, dtype: str, places: Sequence[tuple[int, int, int]]) -> None:
        self.dtype = dtype
        self.files, self.offsets, self.numels = (tuple(column) for column in zip(*places, strict=True))
        self.shortest = min(self.numels)
        """Elements of the shortest partition."""
        self._checked: tuple[Sequence[int], bool] = ((), False)

    def __reduce__(self) -> tuple[type[StoredPartitions], tuple[str, list[tuple[int, int, int]]]]:
        return type(self), (self.dtype, [*zip(self.files, self.offsets, self.numels, strict=True)])

    def inside(self, sizes: Sequence[int]) -> bool:
        """Return whether each partition ends inside its file; keep the answer, which each parameter asks for.

        Args:
            sizes: Bytes of each file.
        """
        if self._checked[0] is not sizes:
            width = itemsize(self.dtype)
            places = zip(self.files, self.offsets, self.numels, strict=True)
            self._checked = sizes, all(offset + numel * width <= sizes[file] for file, offset, numel in places)
        return self._checked[1]


class Partitioned(Place):
    """One state of a parameter: its fragments in the partitions of a flat buffer.

    Args:
        partitions: The partitions of the state.
        fragments: The fragments, none of them longer than its partition: ``too_short`` is None.
    """

    __slots__ = ("_fragments", "_partitions", "_rows")

    def __init__(self, partitions: StoredPartitions, fragments: Fragments) -> None:
        self._partitions = partitions
        self._fragments = fragments
        self._rows: NDArray[np.void] | None = None

    def __reduce__(self) -> tuple[type[Partitioned], tuple[StoredPartitions, Fragments]]:
        return type(self), (self._partitions, self._fragments)  # rows are larger, and soon made again

    @property
    def rows(self) -> NDArray[np.void]:
        """One row for each fragment."""
        if self._rows is None:
            self._rows = self._table()
        return self._rows

    def _table(self) -> NDArray[np.void]:
        import numpy as np

        from ckpttool.model.extents import blank_rows

        start, numel, rank, position, padding = self._fragments.columns()
        first, last = (int(rank[0]), int(rank[-1]) + 1) if len(rank) else (0, 0)
        stored = self._partitions
        file, offset, held = (
            np.array(column[first:last], dtype=np.int64) for column in (stored.files, stored.offsets, stored.numels)
        )
        table = blank_rows(len(rank))
        table["start"], table["numel"], table["file"] = start, numel, file
        table["offset"] = offset + position * itemsize(stored.dtype)
        # Stages 1 and 2 save masters without the padding at the end, and moments with it.
        table["padding"] = np.minimum(padding, held - (position + numel))
        table.flags.writeable = False
        return table

    def sound(self, numel: int, dtype: str, sizes: Sequence[int]) -> bool:
        """Return whether the fragments are of such a tensor, and the partitions inside their files."""
        stored = self._partitions
        return numel == self._fragments.numel and dtype == stored.dtype and stored.inside(sizes)
