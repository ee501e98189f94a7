"""Tensors that were sliced and stored in pieces are merged again unchanged."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.execution.state_reader import StateReader, whole
from ckpttool.formats.strided import Box, box, merge_slices
from ckpttool.model import State
from ckpttool.model.extents import single_runs, stored_blocks
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
