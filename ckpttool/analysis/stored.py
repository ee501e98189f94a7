"""The tensors in the files of a checkpoint, with each byte once: states, buffers, then replicas."""

from __future__ import annotations

import copy
from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ckpttool.dtypes import itemsize
from ckpttool.model import MODULE
from ckpttool.model.extents import single_runs, stored_blocks
from ckpttool.ranges import ByteRange, coalesced

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ckpttool.model import Checkpoint, Replica, State

BUFFER = "buffer"
"""Name of the state of a buffer."""


class Stored(NamedTuple):
    """A state in files."""

    tensor: int
    """Index of its parameter; buffers are numbered after the parameters."""
    key: str
    """Name of the state."""
    state: State
    """The state."""
    rows: NDArray[np.void]
    """Rows of ``model.extents.EXTENT``. The rows of a replica leave out the bytes that another state of the parameter
    has."""
    replica: bool
    """Whether its values are also read elsewhere."""


def stored_states(checkpoint: Checkpoint) -> Iterator[Stored]:
    """Yield the states of parameters and buffers, then the further bytes of replicas.

    With tensor parallelism a parameter's module state has the bytes of all ranks' slices, and each slice is also a
    replica of the rank's masters: the same bytes, which are yielded with the module state.
    """
    seen: set[int] = set()
    place = {p.name: i for i, p in enumerate(checkpoint.parameters)}
    for i, parameter in enumerate(checkpoint.parameters):
        for key, state in parameter.tensors.items():
            for number, stored in enumerate(state.stored):
                seen.add(id(stored))
                yield Stored(i, key, stored, _rows(stored), number > 0 and state.formula is None)
    for i, buffer in enumerate(checkpoint.buffers, len(checkpoint.parameters)):
        place[buffer.name] = i
        seen.add(id(buffer.state))
        yield Stored(i, BUFFER, buffer.state, _rows(buffer.state), False)
    held: dict[int, _Held] = {}
    for replica in checkpoint.replicas:
        tensor = place.get(checkpoint.aliases.get(replica.name, replica.name))
        if tensor is None:
            continue
        for stored in replica.copy.stored:
            if id(stored) in seen:
                continue
            seen.add(id(stored))
            if tensor not in held:
                held[tensor] = _Held(checkpoint, tensor)
            rows = held[tensor].add(stored)
            if len(rows):
                yield Stored(tensor, _state_of(checkpoint, tensor, replica), stored, rows, True)


def _rows(state: State) -> NDArray[np.void]:
    """Return the extents of a state, uncached: they may take gigabytes in a large checkpoint."""
    return copy.copy(state.place).rows


def _state_of(checkpoint: Checkpoint, tensor: int, replica: Replica) -> str:
    """Return the name of the state that a replica duplicates."""
    if tensor >= len(checkpoint.parameters):
        return BUFFER
    states = checkpoint.parameters[tensor].tensors
    if replica.copy.dtype != replica.state.dtype:
        return MODULE
    first = replica.state.extents[:1]
    for key, state in states.items():
        rows = state.extents
        if state is replica.state or ((rows["file"] == first["file"]) & (rows["offset"] == first["offset"])).any():
            return key
    return next(iter(states))


class _Held:
    """The bytes of one parameter or buffer that are known, by file.

    Args:
        checkpoint: The checkpoint.
        tensor: Index of the parameter or buffer.
    """

    def __init__(self, checkpoint: Checkpoint, tensor: int) -> None:
        count = len(checkpoint.parameters)
        states = (
            [stored for state in checkpoint.parameters[tensor].tensors.values() for stored in state.stored]
            if tensor < count
            else [checkpoint.buffers[tensor - count].state]
        )
        self._ranges: dict[int, list[ByteRange]] = {}
        for state in states:
            self._note(_rows(state), itemsize(state.dtype))

    def add(self, state: State) -> NDArray[np.void]:
        """Return the extents of a state without known bytes, and mark the others as known."""
        rows, width = _rows(state), itemsize(state.dtype)
        parts = [self._unknown(rows[i : i + 1], width) for i in range(len(rows))]
        self._note(rows, width)
        return np.concatenate(parts) if parts else rows

    def _note(self, rows: NDArray[np.void], width: int) -> None:
        blocks = stored_blocks(rows, width)
        found: dict[int, list[ByteRange]] = {}
        for file, offset, nbytes in zip(
            blocks["file"].tolist(),
            blocks["offset"].tolist(),
            ((blocks["numel"] + blocks["padding"]) * np.uint64(width)).tolist(),
            strict=True,
        ):
            found.setdefault(file, []).append(ByteRange(offset, offset + nbytes))
        for file, ranges in found.items():
            self._ranges[file] = coalesced([*self._ranges.get(file, ()), *ranges], gap=0)

    def _unknown(self, row: NDArray[np.void], width: int) -> NDArray[np.void]:
        """Return the part of one extent whose bytes are not known."""
        ranges = self._ranges.get(int(row["file"][0]), [])
        blocks = stored_blocks(row, width)
        lengths = blocks["numel"].astype(np.int64) * width
        gaps = [
            _gaps(ranges, ByteRange(begin, begin + n))
            for begin, n in zip(blocks["offset"].tolist(), lengths.tolist(), strict=True)
        ]
        left = sum(end - begin for found in gaps for begin, end in found)
        if left == lengths.sum():
            return row
        if not left:
            return row[:0]
        parts = []
        for run in single_runs(row, width):
            begin = int(run["offset"])
            for start, end in _gaps(ranges, ByteRange(begin, begin + int(run["numel"]) * width)):
                part = np.array([run])
                part["offset"], part["numel"] = start, (end - start) // width
                part["start"] += np.uint64((start - begin) // width)
                parts.append(part)
        return np.concatenate(parts)


def _gaps(ranges: list[ByteRange], wanted: ByteRange) -> list[ByteRange]:
    """Subtract sorted, disjoint ranges from a range."""
    found = []
    at = wanted.start
    for known in ranges[max(0, bisect_right(ranges, ByteRange(at, 1 << 62)) - 1) :]:
        if known.start >= wanted.end:
            break
        if known.start > at:
            found.append(ByteRange(at, known.start))
        at = max(at, known.end)
    if at < wanted.end:
        found.append(ByteRange(at, wanted.end))
    return found
