"""Laws of partitioning: partitions in DeepSpeed's layout are found again, element by element."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from ckpttool.formats.zero import stage3, stage12
from ckpttool.formats.zero.partitions import BufferSlice, EqualParts, Fragments, Partitioned, StoredPartitions
from ckpttool.model.extents import suspects

SHAPES = st.lists(
    st.one_of(st.just(()), st.tuples(st.integers(0, 9)), st.tuples(st.integers(1, 4), st.integers(1, 5))), max_size=8
)
RANKS = st.integers(1, 6)
Element = tuple[str, int]


def _named(shapes: list[tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"p{i}": shape for i, shape in enumerate(shapes)}


def _rows(fragment: Fragments) -> list[tuple[int, ...]]:
    """Start, elements, rank, position and padding of each fragment."""
    return [*zip(*(column.tolist() for column in fragment.columns()), strict=True)]


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

    offsets = stage12._offsets(named, paddings)
    fragments = stage12._fragments(named, offsets, partition, ranks)
    found: dict[tuple[int, int], Element | None] = {}
    for name, fragment in fragments.items():
        rows = _rows(fragment)
        assert [rank for _, _, rank, _, _ in rows] == [*fragment.ranks]
        assert {rank: numel for _, numel, rank, _, _ in rows if numel} == {
            rank: numel for rank in range(ranks) if (numel := fragment.numel_on(rank))
        }
        for start, numel, rank, position, padding in rows:
            for k in range(numel):
                assert found.setdefault((rank, position + k), (name, start + k)) == (name, start + k)
            for k in range(padding):
                # Alignment in front of a parameter without elements is told by the one before it.
                assert flat[rank * partition + position + numel + k] is None
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
    for name, fragment in fragments.items():
        rows = _rows(fragment)
        for start, numel, rank, position, _ in rows:
            for k in range(numel):
                found[rank][position + k] = (name, start + k)
        assert sum(numel for _, numel, _, _, _ in rows) == math.prod(named[name])
        assert {numel + padding for _, numel, _, _, padding in rows} == {math.ceil(math.prod(named[name]) / ranks)}
    assert found == partitions


FRAGMENTS = st.one_of(
    st.builds(
        lambda numel, offset, gap, partition: BufferSlice(numel, offset, offset + numel + gap, partition),
        st.integers(0, 30), st.integers(0, 20), st.integers(0, 3), st.integers(1, 9),
    ),
    st.builds(EqualParts, st.integers(0, 30), RANKS, st.integers(0, 9)),
)  # fmt: skip


@given(FRAGMENTS, st.data())
def test_fragments_that_need_no_rows_to_be_sound_have_sound_rows(fragment: Fragments, data: st.DataObject) -> None:
    """The quick checks agree with the rows: of the length of partitions, of the elements, and of the files' ends."""
    rows = _rows(fragment)
    ranks = 1 + max([rank for _, _, rank, _, _ in rows], default=0)
    held = data.draw(st.lists(st.integers(0, 60), min_size=ranks, max_size=ranks), label="stored elements")
    stored = StoredPartitions("F32", [(rank, 8 * rank, numel) for rank, numel in enumerate(held)])
    short = [rank for _, numel, rank, position, _ in rows if position + numel > held[rank]]
    assert fragment.too_short(stored) == (short[0] if short else None)
    if short:
        return
    place = Partitioned(stored, fragment)
    sizes = [8 * rank + 4 * numel for rank, numel in enumerate(held)]
    assert place.sound(fragment.numel, "F32", sizes)
    assert suspects([(place.rows, fragment.numel, "F32")], sizes) == []
    assert not place.sound(fragment.numel + 1, "F32", sizes)
    assert not place.sound(fragment.numel, "F32", [size - 1 for size in sizes])
