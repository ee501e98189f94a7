"""Laws of partitioning: partitions in DeepSpeed's layout are found again, element by element."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.formats.zero import stage3, stage12

SHAPES = st.lists(
    st.one_of(st.just(()), st.tuples(st.integers(0, 9)), st.tuples(st.integers(1, 4), st.integers(1, 5))), max_size=8
)
RANKS = st.integers(1, 6)
Element = tuple[str, int]


def _named(shapes: list[tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"p{i}": shape for i, shape in enumerate(shapes)}


@given(SHAPES, RANKS, st.sampled_from([1, 4, 8]), st.sampled_from([1, 2]))
def test_stages_1_and_2_find_every_element_where_a_flat_buffer_puts_it(
    shapes: list[tuple[int, ...]], ranks: int, alignment: int, unit: int
) -> None:
    """Build the flat buffer as the engine does, one element at a time, and cut it into equal partitions."""
    named = _named(shapes)
    flat: list[Element | None] = []
    paddings: list[int] = []
    for i, (name, shape) in enumerate(named.items()):
        flat += [(name, k) for k in range(math.prod(shape))]
        padding = -len(flat) % alignment if i < len(named) - 1 else 0
        paddings.append(padding)
        flat += [None] * padding
    flat += [None] * (-len(flat) % (unit * ranks))
    partition = len(flat) // ranks

    offsets, total = stage12._offsets(named, paddings)
    assert total <= len(flat)
    fragments = stage12._fragments(named, offsets, partition, ranks)
    found: dict[tuple[int, int], Element | None] = {}
    for name, rows in fragments.items():
        for row in rows:
            rank, position = int(row["rank"]), int(row["position"])
            for k in range(int(row["numel"])):
                assert found.setdefault((rank, position + k), (name, int(row["start"]) + k)) == (
                    name,
                    int(row["start"]) + k,
                )
            for k in range(int(row["padding"])):
                # Alignment in front of a parameter without elements is told by the one before it.
                assert flat[rank * partition + position + int(row["numel"]) + k] is None
    expected = {divmod(i, partition): e for i, e in enumerate(flat) if e is not None} if partition else {}
    assert found == expected


@given(SHAPES, RANKS)
def test_stage_3_finds_every_element_where_the_ranks_pieces_put_it(shapes: list[tuple[int, ...]], ranks: int) -> None:
    named = _named(shapes)
    partitions: list[list[Element | None]] = [[] for _ in range(ranks)]
    for name, shape in named.items():
        numel = math.prod(shape)
        piece = math.ceil(numel / ranks)
        for rank in range(ranks):
            for k in range(rank * piece, (rank + 1) * piece):
                partitions[rank].append((name, k) if k < numel else None)

    fragments, length = stage3._fragments(named, ranks)
    assert {len(p) for p in partitions} == {length}
    found: list[list[Element | None]] = [[None] * length for _ in range(ranks)]
    for name, rows in fragments.items():
        for row in rows:
            for k in range(int(row["numel"])):
                found[int(row["rank"])][int(row["position"]) + k] = (name, int(row["start"]) + k)
        assert int(rows["numel"].sum()) == math.prod(named[name])
        assert np.all(rows["numel"] + rows["padding"] == math.ceil(math.prod(named[name]) / ranks))
    assert found == partitions
