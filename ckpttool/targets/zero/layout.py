"""Compute where DeepSpeed puts each parameter for a number of ranks.

Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py (``__init__``,
``get_data_parallel_partitions``) and runtime/zero/stage3.py (``_create_fp16_sub_groups``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ALIGNMENT = 2
"""Elements for each rank that the length of a flat buffer is a multiple of (``nccl_start_alignment_factor``)."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """A run of a parameter's elements in one rank's partition."""

    name: str
    """The parameter."""
    first: int
    """First element, of the flattened parameter."""
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
    """Ranks that share it."""
    alignment: int = 1
    """Elements that the place of every parameter is a multiple of (``parameter_alignment``)."""

    @property
    def numel(self) -> int:
        """Elements without the padding at the end."""
        return sum(self.sizes.values()) + sum(self.paddings())

    def paddings(self) -> list[int]:
        """Elements of padding behind each parameter but the last."""
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
        """Elements of padding at the end of a rank's partition."""
        return min(self.partition, max(0, (rank + 1) * self.partition - self.numel))

    def offsets(self) -> dict[str, int]:
        """First element of each parameter in the buffer."""
        result, at = {}, 0
        for (name, numel), padding in zip(self.sizes.items(), self.paddings(), strict=True):
            result[name] = at
            at += numel + padding
        return result

    def fragments(self) -> list[list[Fragment]]:
        """The fragments in each rank's partition."""
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
    """One flat buffer of stage 3: an equal piece of every parameter for each rank, each padded."""

    sizes: Mapping[str, int]
    """Elements of each parameter, in the order of the buffer."""
    ranks: int
    """Ranks that share it."""

    @property
    def partition(self) -> int:
        """Elements that each rank holds, padding included."""
        return sum(piece(n, self.ranks) for n in self.sizes.values())

    def fragments(self) -> list[list[Fragment]]:
        """The fragments on each rank."""
        return [self.rank_fragments(rank) for rank in range(self.ranks)]

    def rank_fragments(self, rank: int) -> list[Fragment]:
        """The fragments on one rank."""
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
    """Elements of a parameter that each rank holds at stage 3, padding included."""
    return -(-numel // ranks)


def sub_groups(sizes: Mapping[str, int], ranks: int, limit: int) -> Iterator[SubGroup]:
    """Cut a parameter group of stage 3 into sub-groups; the parameter that crosses the limit still belongs to one."""
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
