"""Tensors that were sliced and stored in pieces are merged again unchanged."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.execution.state_reader import StateReader, whole
from ckpttool.formats.strided import Box, box, merge_slices
from ckpttool.model import State
from ckpttool.model.extents import cover_problem, file_too_short, single_runs, stored_blocks
from ckpttool.model.places import Contiguous
from ckpttool.ranges import exact_cover_problem
from tests.formats.layouts import Disk, counted
from tests.truth import gathered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)
FILES = 3


def _borders(data: st.DataObject, numel: int) -> list[int]:
    return data.draw(st.lists(st.integers(0, numel), max_size=4), label="borders")


def _assert_is(tensor: NDArray[np.float32], state: State, disk: Disk, data: st.DataObject) -> None:
    """A state holds a tensor: by the reference, by the gatherer, whole and in any window."""
    with disk.sources() as sources:
        assert state.shape == tensor.shape
        rows = single_runs(state.extents, 4)
        assert exact_cover_problem(rows["start"], rows["numel"], state.numel) is None
        assert gathered(disk.paths, state) == tensor.tobytes()
        assert np.array_equal(whole(sources, state), tensor)
        first = data.draw(st.integers(0, state.numel), label="first")
        last = data.draw(st.integers(first, state.numel), label="last")
        out = np.full(last - first, np.nan, dtype=np.float32)
        StateReader(sources).fill(state, first, out)
        assert np.array_equal(out, tensor.reshape(-1)[first:last])
        blocks = stored_blocks(state.extents, 4)
        stored = b"".join(
            disk.paths[int(b["file"])].read_bytes()[int(b["offset"]) :][: int(b["numel"]) * 4] for b in blocks
        )
        assert sorted(np.frombuffer(stored, np.float32)) == sorted(tensor.reshape(-1))


@given(SHAPES, st.data())
def test_slices_along_any_dimension_make_the_tensor(shape: tuple[int, ...], data: st.DataObject) -> None:
    tensor = counted(shape)
    dim = data.draw(st.integers(0, len(shape) - 1), label="dim")
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, shape[dim]), max_size=3), label="cuts")), shape[dim]]
    with tempfile.TemporaryDirectory() as directory:
        disk = Disk(Path(directory), FILES)
        parts = []
        for begin, end in itertools.pairwise(cuts):
            part = tensor.take(range(begin, end), axis=dim)
            state = disk.store(part, "F32", _borders(data, part.size))
            boxes = [box(part.shape, shape, dim, source=0, target=begin)] if part.size else []
            parts.append((state, boxes))
        _assert_is(tensor, merge_slices(parts, shape), disk, data)


@given(SHAPES, st.data())
def test_parts_that_are_cut_one_by_one_make_the_tensor(shape: tuple[int, ...], data: st.DataObject) -> None:
    """As a fused layer is: each rank holds a piece of the first part, then one of the second, and so on."""
    dim = data.draw(st.integers(0, len(shape) - 1), label="dim")
    ranks = data.draw(st.integers(1, 3), label="ranks")
    width = st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks)
    widths = data.draw(st.lists(width, min_size=1, max_size=3).filter(lambda w: sum(map(sum, w))), label="widths")
    shape = (*shape[:dim], sum(map(sum, widths)), *shape[dim + 1 :])
    tensor = counted(shape)
    pieces: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    target = 0
    for part in widths:
        for rank, n in enumerate(part):
            pieces[rank].append((target, n))
            target += n
    with tempfile.TemporaryDirectory() as directory:
        disk = Disk(Path(directory), FILES)
        parts = []
        for own in pieces:
            held = np.concatenate([tensor.take(range(at, at + n), axis=dim) for at, n in own], axis=dim)
            begins = np.cumsum([0, *(n for _, n in own)])
            boxes = [
                box(held.shape, shape, dim, source=int(begin), target=at, count=n)
                for begin, (at, n) in zip(begins, own, strict=False)
                if n
            ]
            if boxes:
                parts.append((disk.store(held, "F32", _borders(data, held.size)), boxes))
        _assert_is(tensor, merge_slices(parts, shape), disk, data)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 7), st.data())
def test_rows_beyond_the_whole_are_padding(rows: int, columns: int, extra: int, data: st.DataObject) -> None:
    """As those are that only fill up a vocabulary."""
    tensor = counted((rows + extra, columns))
    ranks = data.draw(st.integers(1, 3), label="ranks")
    with tempfile.TemporaryDirectory() as directory:
        disk = Disk(Path(directory), FILES)
        parts = []
        at = 0
        for part in np.array_split(tensor, ranks):
            if part.size:
                stored = disk.store(part, "F32", _borders(data, part.size))
                parts.append((stored, [box(part.shape, tensor.shape, 0, source=0, target=at)]))
            at += len(part)
        state = merge_slices(parts, (rows, columns))
        assert int(state.extents["numel"].sum()) == rows * columns
        _assert_is(tensor[:rows], state, disk, data)


@given(st.lists(st.integers(1, 4), min_size=2, max_size=3).map(tuple), st.integers(2, 4), st.data())
def test_a_mean_is_that_of_all_its_states(shape: tuple[int, ...], count: int, data: st.DataObject) -> None:
    copies = [counted(shape) * n for n in range(1, count + 1)]
    with tempfile.TemporaryDirectory() as directory:
        disk = Disk(Path(directory), FILES)
        first, *others = (disk.store(c, "F32", _borders(data, c.size)) for c in copies)
        state = State(shape, "F32", first.place, tuple(others))
        begin = data.draw(st.integers(0, state.numel), label="first")
        with disk.sources() as sources:
            out = np.zeros(state.numel - begin, dtype=np.float32)
            StateReader(sources).fill(state, begin, out)
    mean: NDArray[np.float32] = sum(copies[1:], start=copies[0].copy()) / np.float32(count)
    assert np.array_equal(out, mean.reshape(-1)[begin:])
    assert not state.plain


def test_pieces_of_a_long_state_come_in_order(tmp_path: Path) -> None:
    """Longer than what is put together at a time, and its runs lie across those borders."""
    tensor = counted((700, 1001))
    left, right = tensor[:, :600], tensor[:, 600:]
    disk = Disk(tmp_path, 2)
    parts: Sequence[tuple[State, list[Box]]] = [
        (disk.store(left, "F32", [12345]), [box(left.shape, tensor.shape, 1, source=0, target=0)]),
        (disk.store(right, "F32"), [box(right.shape, tensor.shape, 1, source=0, target=600)]),
    ]
    state = merge_slices(parts, tensor.shape)
    assert len(state.extents) < 20
    with disk.sources() as sources:
        at = 0
        for first, values in StateReader(sources).chunks(state):
            assert first == at
            assert np.array_equal(values, tensor.reshape(-1)[at : at + len(values)])
            at += len(values)
        assert at == tensor.size
        ((only, some),) = ((n, v.copy()) for n, v in StateReader(sources).chunks(state, 5, 9))
    assert (only, some.tolist()) == (5, [6.0, 7.0, 8.0, 9.0])


BOXES = st.builds(
    Box, source=st.integers(0, 3), target=st.integers(0, 8), runs=st.integers(0, 3), numel=st.integers(0, 5),
    stride=st.integers(1, 6), pitch=st.integers(1, 6),
)  # fmt: skip


@given(st.lists(BOXES, min_size=1, max_size=3), st.integers(1, 12), st.data())
def test_a_layout_that_looks_sound_without_its_rows_is_sound(boxes: list[Box], numel: int, data: st.DataObject) -> None:
    """Random boxes, most of them wrong, and files that may be too short."""
    sizes = [data.draw(st.integers(0, 60), label="bytes of a file") for _ in boxes]
    parts = []
    for n, one in enumerate(boxes):
        held = data.draw(st.integers(1, 14), label="elements of a slice")
        parts.append((State((held,), "F32", Contiguous(held, n, 0)), [one]))
    state = merge_slices(parts, (numel,))
    if state.place.sound(numel, "F32", sizes):
        assert cover_problem(state.extents, numel, "F32") is None
        assert file_too_short(state.extents, "F32", sizes) is None


@pytest.mark.parametrize("dim", [0, 1])
def test_slices_side_by_side_look_sound_without_their_rows(dim: int) -> None:
    whole_shape, parts = (4, 6), []
    for n in range(2):
        part = tuple(size // 2 if d == dim else size for d, size in enumerate(whole_shape))
        cut = box(part, whole_shape, dim, source=0, target=n * part[dim])
        parts.append((State(part, "F32", Contiguous(12, n, 0)), [cut]))
    place = merge_slices(parts, whole_shape).place
    assert place.sound(24, "F32", [48, 48])
    assert not place.sound(24, "F32", [48, 47])
    assert not merge_slices(parts[:1], whole_shape).place.sound(24, "F32", [48])
