"""A virtual or stored file reads like the file on disk."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from ckpttool.execution.sources import Sources
from ckpttool.execution.virtual_file import LOCAL_PART_BYTES, RangeFile, StoredFile, VirtualFile
from ckpttool.formats import open_checkpoint
from ckpttool.integrations.deepspeed.load_partitions import plan_replicas
from ckpttool.storage import LOCAL
from ckpttool.targets.zero.layout import Shape
from ckpttool.targets.zero.writer import plan_rank, plan_zero
from tests.execution.outputs import run_into
from tests.truth import REPRESENTATIVE, source

if TYPE_CHECKING:
    from pathlib import Path

    from ckpttool.plan import CopyPlan

MEMORY = 1 << 20


class Windowed(RangeFile):
    """Bytes in memory that are told to be far away."""

    def __init__(self, data: bytes, chunk: int) -> None:
        super().__init__("chunked", len(data), remote=True, memory=MEMORY)
        self._chunk_bytes = chunk
        self._data = data
        self.asked: list[tuple[int, int]] = []

    def fill(self, start: int, buffer: memoryview) -> None:
        self.asked.append((start, start + len(buffer)))
        buffer[:] = self._data[start : start + len(buffer)]


def _written(plan: CopyPlan, directory: Path) -> dict[str, bytes]:
    directory.mkdir()
    run_into(plan, str(directory))
    return {file.name: (directory / file.name).read_bytes() for file in plan.files}


@pytest.mark.parametrize(
    "name", ["zero2-dp2-bf16", "zero3-dp4-bf16", "autotp-zero2-tp2-dp2-bf16-fused", "zero2-dp3-bf16"]
)
def test_a_planned_file_reads_as_if_it_had_been_written(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(source(name))
    plan = plan_zero(checkpoint, Shape(3, 2, 10**9, False, "BF16"), tag="t")
    random = np.random.default_rng(0)
    with Sources(plan.sources) as sources:
        for file_name, data in _written(plan, tmp_path / "out").items():
            target = next(f for f in plan.files if f.name == file_name)
            with VirtualFile(plan, target, sources, memory=MEMORY) as planned:
                assert planned.read() == data
                for start, end in np.sort(random.integers(0, len(data) + 1, (40, 2)), axis=1).tolist():
                    planned.seek(start)
                    into = bytearray(b"\xff" * (end - start))
                    assert planned.readinto(into) == end - start
                    assert into == data[start:end]
                    assert planned.tell() == end


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_torch_loads_a_stored_file(name: str) -> None:
    """The form before ZIP too."""
    pytest.importorskip("deepspeed")
    from ckpttool.integrations.torch.objects import read_objects

    checkpoint = open_checkpoint(source(name))
    path = next(checkpoint.path(n) for n, f in enumerate(checkpoint.files) if f.name.endswith("model_states.pt"))
    with LOCAL.open(path) as reader:
        found = read_objects(StoredFile(reader, memory=MEMORY))
    expected = torch.load(path, map_location="cpu", weights_only=False)
    assert found.keys() == expected.keys()
    module = expected.get("module") or {}
    assert all(torch.equal(found["module"][key], tensor) for key, tensor in module.items())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_plan_of_one_rank_equals_its_part_of_the_whole_plan(stage: int, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(source("zero2-dp2-bf16-round-robin"))
    shape = Shape(3, stage, 400, stage == 2, "BF16")
    whole = _written(plan_zero(checkpoint, shape, tag="t"), tmp_path / "whole")
    for rank in range(3):
        plan = plan_rank(checkpoint, shape, rank, tag="t")
        optimizer, model = _written(plan, tmp_path / str(rank)).items()
        assert whole[optimizer[0]] == optimizer[1]
        assert model[0] in whole


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_parts_join_to_the_file(chunk: int) -> None:
    data = np.random.default_rng(1).bytes(5 * 64 + 3)
    file = Windowed(data, chunk)
    for start, end in ((0, len(data)), (0, 1), (3, 200), (len(data) - 5, len(data)), (64, 128), (10, 10)):
        file.seek(start)
        into = bytearray(end - start)
        assert file.readinto(into) == end - start
        assert into == data[start:end]
    assert all(start % chunk == 0 for start, _ in file.asked)


def test_many_small_reads_are_one_request() -> None:
    file = Windowed(bytes(range(200)), 100)
    assert b"".join(file.read(10) for _ in range(20)) == bytes(range(200))
    assert file.asked == [(0, 100), (100, 200)]
    assert file.read(1) == b""
    assert file.seek(-1, io.SEEK_END) == 199
    assert file.read(5) == b"\xc7"


def test_consecutive_whole_tensors() -> None:
    checkpoint = open_checkpoint(source("zero2-dp2-bf16"))
    tensors = {b.name: b.state for b in checkpoint.buffers}
    plan, packed = plan_replicas(checkpoint, tensors)
    assert [p.start % 64 for p in packed] == [0] * len(tensors)
    with Sources(plan.sources) as sources, VirtualFile(plan, plan.files[0], sources, memory=MEMORY) as file:
        data = file.read()
    first = packed[0]
    values = np.frombuffer(data[first.start : first.start + first.nbytes], dtype=np.float32)
    assert np.array_equal(values, torch.linspace(0, 1, 7).numpy())


def test_a_large_local_read_is_put_together_from_the_parts_of_threads(tmp_path: Path) -> None:
    count = (2 * LOCAL_PART_BYTES + 12_345) // 8
    expected = np.random.default_rng(0).integers(0, 2**63, count, dtype=np.int64)
    expected.tofile(tmp_path / "file")
    found = bytearray(8 * (count - 1))
    with LOCAL.open(str(tmp_path / "file")) as reader, StoredFile(reader, memory=1 << 20) as file:
        file.seek(8)
        assert file.readinto(found) == len(found)
    assert np.array_equal(np.frombuffer(found, dtype=np.int64), expected[1:])
