"""Assembled parts of a target file have the bytes of the plan, for any boundaries."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.dtypes import itemsize, numpy_dtype
from ckpttool.execution import copy
from ckpttool.execution.copy import PartAssembler
from ckpttool.execution.sources import Sources
from ckpttool.plan import COPY, CopyPlan, SourceFile, TargetFile
from ckpttool.plan.casts import cast, count_overflowed
from ckpttool.storage import open_storage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CASTS = (("F32", "F32"), ("F32", "BF16"), ("F32", "F16"), ("F64", "F32"), ("U8", "U8"))
ELEMENTS = 64
"""Of the widest type that a source file holds."""
VALUES = np.array([0.0, 1.0, -2.5, 1e-3, 70000.0, -1e5, 3e38, np.inf])
"""Some of them are too large for fp16."""


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[bytes], list[tuple[str, Any]]]:
    """Bytes of source files, and the pieces of one target file in its order."""
    sources = []
    for _ in range(draw(st.integers(1, 3))):
        numbers = draw(st.lists(st.sampled_from(VALUES.tolist()), min_size=2 * ELEMENTS, max_size=2 * ELEMENTS))
        sources.append(np.array(numbers, dtype=np.float32).tobytes())
    pieces: list[tuple[str, Any]] = []
    for _ in range(draw(st.integers(0, 8))):
        kind = draw(st.sampled_from(["copy", "copy", "copy", "literal", "zeros"]))
        if kind == "literal":
            pieces.append(("literal", draw(st.binary(max_size=40))))
        elif kind == "zeros":
            pieces.append(("zeros", draw(st.integers(0, 40))))
        else:
            chosen = draw(st.integers(0, len(CASTS) - 1))
            width = itemsize(CASTS[chosen][0])
            room = len(sources[0]) // width
            first = draw(st.integers(0, room))
            numel = draw(st.integers(0, room - first))
            pieces.append(("copy", (draw(st.integers(0, len(sources) - 1)), first * width, numel, chosen)))
    return sources, pieces


def _expected(sources: list[bytes], pieces: list[tuple[str, Any]]) -> bytes:
    """All bytes of the file, put together by the plainest of means."""
    out = b""
    for kind, what in pieces:
        if kind == "copy":
            file, start, numel, chosen = what
            source, target = CASTS[chosen]
            values = np.frombuffer(sources[file], numpy_dtype(source), numel, start)
            out += cast(values, target).tobytes()
        else:
            out += what if isinstance(what, bytes) else bytes(what)
    return out


def _overflowed(sources: list[bytes], pieces: list[tuple[str, Any]]) -> int:
    total = 0
    for kind, what in pieces:
        if kind == "copy":
            file, start, numel, chosen = what
            source, target = CASTS[chosen]
            if source != target:
                values = np.frombuffer(sources[file], numpy_dtype(source), numel, start)
                total += count_overflowed(values, cast(values, target))
    return total


def _plan(sources: list[bytes], pieces: list[tuple[str, Any]], save: Callable[[bytes], SourceFile]) -> CopyPlan:
    rows, literals, zeros = [], [], []
    at = 0
    for kind, what in pieces:
        if kind == "copy":
            file, start, numel, chosen = what
            rows.append((file, start, numel, at, chosen))
            at += numel * itemsize(CASTS[chosen][1])
        elif isinstance(what, bytes):
            literals.append((at, what))
            at += len(what)
        else:
            zeros.append((at, int(what)))
            at += int(what)
    # In any order: nothing in a plan says that they are sorted.
    copies = np.array(rows[::-1], dtype=COPY) if rows else np.zeros(0, dtype=COPY)
    target = TargetFile("out", at, tuple(literals[::-1]), copies, zeros=tuple(zeros))
    return CopyPlan(tuple(save(data) for data in sources), CASTS, (target,))


def _in_memory(data: bytes) -> SourceFile:
    url = f"memory://windows/{uuid.uuid4().hex}"
    fsspec.filesystem("memory").pipe_file(url, data)
    storage = open_storage(url)
    with storage.open(url) as reader:
        return SourceFile(url, reader.nbytes, reader.version, storage.spec)


@given(plans(), st.integers(1, 400))
def test_parts_of_any_size_join_to_the_file(drawn: tuple[list[bytes], list[tuple[str, Any]]], size: int) -> None:
    sources, pieces = drawn
    plan = _plan(sources, pieces, _in_memory)
    expected = _expected(sources, pieces)
    with Sources(plan.sources) as opened:
        assembler = PartAssembler(plan, plan.files[0], opened)
        found = [assembler.assemble(at, min(at + size, len(expected))) for at in range(0, len(expected), size)]
        assert b"".join(data for data, _ in found) == expected
        whole, overflowed = assembler.assemble(0, len(expected))
    assert whole == expected
    assert overflowed == _overflowed(sources, pieces)


@pytest.mark.parametrize("elements", [1, 7, 50, 51])
def test_local_values_are_cast_a_few_at_a_time(elements: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy, "CAST_ELEMENTS", elements)
    data = np.arange(51, dtype=np.float32).tobytes()

    def save(data: bytes) -> SourceFile:
        path = tmp_path / "source"
        path.write_bytes(data)
        with open_storage(str(path)).open(str(path)) as reader:
            return SourceFile(str(path), reader.nbytes, reader.version)

    number = next(i for i, (source, target) in enumerate(CASTS) if source == "F32" and target != "F32")
    pieces = [("copy", (0, 0, 51, number))]
    plan = _plan([data], pieces, save)
    with Sources(plan.sources) as opened:
        found, _ = PartAssembler(plan, plan.files[0], opened).assemble(0, plan.files[0].nbytes)
    assert bytes(found) == _expected([data], pieces)


@given(plans(), st.sampled_from([64, 128, 192]))
def test_overflows_are_counted_once(drawn: tuple[list[bytes], list[tuple[str, Any]]], size: int) -> None:
    sources, pieces = drawn
    aligned = [p for p in pieces if p[0] == "copy"]  # of elements that begin on a multiple of their size
    aligned.sort(key=lambda p: -itemsize(CASTS[p[1][3]][1]))
    plan = _plan(sources, aligned, _in_memory)
    with Sources(plan.sources) as opened:
        assembler = PartAssembler(plan, plan.files[0], opened)
        nbytes = plan.files[0].nbytes
        total = sum(assembler.assemble(at, min(at + size, nbytes))[1] for at in range(0, nbytes, size))
    assert total == _overflowed(sources, aligned)


def test_a_part_that_equals_a_source_range_is_not_copied() -> None:
    source = _in_memory(bytes(range(64)))
    copies = np.array([(0, 0, 32, 0, 0), (0, 40, 16, 32, 0)], dtype=COPY)
    plan = CopyPlan((source,), (("U8", "U8"),), (TargetFile("out", 48, (), copies),))
    with Sources(plan.sources) as opened:
        assembler = PartAssembler(plan, plan.files[0], opened)
        found = [assembler.assemble(start, end)[0] for start, end in [(4, 32), (32, 48), (16, 48)]]
    # What a storage gives can only be read, memory of our own be written.
    assert [data.readonly for data in found] == [True, True, False]
    assert found == [bytes(range(4, 32)), bytes(range(40, 56)), bytes([*range(16, 32), *range(40, 56)])]


def test_an_empty_piece_hides_nothing() -> None:
    """A plan may hold empty pieces anywhere, even in the middle of others."""
    source = _in_memory(bytes(range(64)))
    copies = np.array([(0, 0, 32, 16, 0), (0, 9, 0, 20, 0), (0, 9, 0, 40, 0)], dtype=COPY)
    literals = ((0, b"0123456789abcdef"), (8, b""))
    plan = CopyPlan((source,), (("U8", "U8"),), (TargetFile("out", 48, literals, copies),))
    expected = b"0123456789abcdef" + bytes(range(32))
    with Sources(plan.sources) as opened:
        assembler = PartAssembler(plan, plan.files[0], opened)
        for size in range(1, 49):
            parts = [assembler.assemble(at, min(at + size, 48))[0] for at in range(0, 48, size)]
            assert b"".join(parts) == expected
