"""Compute the position of each parameter in DeepSpeed's partitions for a number of ranks.

Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py (``__init__``,
``get_data_parallel_partitions``) and runtime/zero/stage3.py (``_create_fp16_sub_groups``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ALIGNMENT = 2
"""Each rank's share of a flat buffer is a multiple of this number of elements (``nccl_start_alignment_factor``)."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """Consecutive elements of a parameter in one rank's partition."""

    name: str
    """Name of the parameter."""
    first: int
    """First element, in the flattened parameter."""
    numel: int
    """Elements."""
    position: int
    """First element in the rank's partition."""


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """One flat buffer of stage 1 or 2: the parameters one after another, padded at the end."""

    sizes: Mapping[str, int]
    """Elements of each parameter, in the order of the buffer."""
    ranks: int
    """Number of ranks that partition it."""
    alignment: int = 1
    """The position of every parameter is a multiple of this number of elements (``parameter_alignment``)."""

    @property
    def numel(self) -> int:
        """Elements without the padding at the end."""
        return sum(self.sizes.values()) + sum(self.paddings())

    def paddings(self) -> list[int]:
        """Return the elements of padding after each parameter except the last."""
        result, at, last = [], 0, len(self.sizes) - 1
        for number, numel in enumerate(self.sizes.values()):
            result.append(-(at + numel) % self.alignment if number < last else 0)
            at += numel + result[-1]
        return result

    @property
    def partition(self) -> int:
        """Elements of each rank's partition, padding included."""
        unit = ALIGNMENT * self.ranks
        return -(-self.numel // unit) * unit // self.ranks

    def padding(self, rank: int) -> int:
        """Return the elements of padding at the end of a rank's partition."""
        return min(self.partition, max(0, (rank + 1) * self.partition - self.numel))

    def offsets(self) -> dict[str, int]:
        """Return the position of each parameter in the buffer, in elements."""
        result, at = {}, 0
        for (name, numel), padding in zip(self.sizes.items(), self.paddings(), strict=True):
            result[name] = at
            at += numel + padding
        return result

    def fragments(self) -> list[list[Fragment]]:
        """Return the fragments in each rank's partition."""
        result: list[list[Fragment]] = [[] for _ in range(self.ranks)]
        size = self.partition
        for name, offset in self.offsets().items():
            first, numel = 0, self.sizes[name]
            while first < numel:
                rank, position = divmod(offset + first, size)
                count = min(numel - first, size - position)
                result[rank].append(Fragment(name, first, count, position))
                first += count
        return result


@dataclass(frozen=True, slots=True)
class SubGroup:
    """One flat buffer of stage 3: each rank has an equal part of every parameter, padded."""

    sizes: Mapping[str, int]
    """Elements of each parameter, in the order of the buffer."""
    ranks: int
    """Number of ranks that partition it."""

    @property
    def partition(self) -> int:
        """Elements of each rank's partition, padding included."""
        return sum(piece(n, self.ranks) for n in self.sizes.values())

    def fragments(self) -> list[list[Fragment]]:
        """Return the fragments in each rank's partition."""
        return [self.rank_fragments(rank) for rank in range(self.ranks)]

    def rank_fragments(self, rank: int) -> list[Fragment]:
        """Return the fragments in one rank's partition."""
        result: list[Fragment] = []
        position = 0
        for name, numel in self.sizes.items():
            size = piece(numel, self.ranks)
            count = min(size, numel - rank * size)
            if count > 0:
                result.append(Fragment(name, rank * size, count, position))
            position += size
        return result


def piece(numel: int, ranks: int) -> int:
    """Return the elements of each rank's part of a parameter at stage 3, padding included."""
    return -(-numel // ranks)


def sub_groups(sizes: Mapping[str, int], ranks: int, limit: int) -> Iterator[SubGroup]:
    """Split a parameter group of stage 3 into sub-groups; the parameter that crosses the limit ends a sub-group."""
    part: dict[str, int] = {}
    filled = 0
    for name, numel in sizes.items():
        part[name] = numel
        filled += piece(numel, ranks)
        if filled >= limit:
            yield SubGroup(part, ranks)
            part, filled = {}, 0
    if part:
        yield SubGroup(part, ranks)
