"""Slices of tensors: the values are right, and only their bytes are read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import ckpttool
from tests.truth import source, truth

if TYPE_CHECKING:
    from ckpttool.model import Checkpoint

PARTS: list[Any] = [
    None, 0, -1, slice(3, 3), slice(5, 2), slice(2, 11), (slice(None), 3), (4, slice(1, 7)), (4, 5),
    (slice(30, None), slice(-3, None)), (slice(0, 37), slice(0, 18)), (),
]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return ckpttool.inspect(source("zero3-dp3-bf16"))


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_part_is_what_indexing_gives(part: Any, checkpoint: Checkpoint) -> None:
    expected = truth("zero3-dp3-bf16").tensors["fp32/up.weight"].numpy()
    read = ckpttool.extract(checkpoint, "up.weight", index=part)
    wanted = expected if part is None else expected[part]
    assert read.shape == wanted.shape
    assert np.array_equal(read, wanted)


def test_scalars_and_tied_names(checkpoint: Checkpoint) -> None:
    tensors = truth("zero3-dp3-bf16").tensors
    assert ckpttool.extract(checkpoint, "scale") == tensors["fp32/scale"].numpy()
    assert np.array_equal(ckpttool.extract(checkpoint, "head.weight"), tensors["fp32/embed.weight"].numpy())
    assert np.array_equal(ckpttool.extract(checkpoint, "seen"), tensors["buffer/seen"].numpy())


def test_torch_gets_its_own_types() -> None:
    tensors = truth("zero2-dp2-bf16").tensors
    for state, key in (("module", "module/up.weight"), ("weights", "fp32/up.weight"), ("exp_avg", "exp_avg/up.weight")):
        read = ckpttool.extract(source("zero2-dp2-bf16"), "up.weight", state=state, framework="torch")
        assert isinstance(read, torch.Tensor)
        assert read.dtype == tensors[key].dtype
        assert torch.equal(read, tensors[key])


@pytest.mark.parametrize("part", ["0:3", 1.5, True, slice(0, 9, 2), (0, 0, 0), 37, -38])
def test_an_invalid_part_is_refused(part: Any, checkpoint: Checkpoint) -> None:
    with pytest.raises((ValueError, TypeError)):
        ckpttool.extract(checkpoint, "up.weight", index=part)


def test_only_the_bytes_of_the_part_are_read(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    plain = os.preadv

    def counted(fd: int, buffers: list[memoryview], at: int) -> int:
        read.append(plain(fd, buffers, at))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counted)
    ckpttool.extract(checkpoint, "up.weight", index=(slice(4, 6), slice(2, 5)), check="off")
    assert sum(read) == 2 * 3 * 4


def test_slices_of_tensor_parallel_tensors() -> None:
    name = "megatron-zero2-tp2-dp2-bf16"
    for parameter in ("layers.0.proj.weight", "layers.0.qkv.weight", "layers.1.gate_up.weight", "layers.0.mix"):
        expected = truth(name).tensors[f"fp32/{parameter}"].numpy()
        assert np.array_equal(ckpttool.extract(source(name), parameter), expected)
        part = (slice(1, 7),) if expected.ndim == 1 else (slice(1, 7), slice(2, 5))
        assert np.array_equal(ckpttool.extract(source(name), parameter, index=part), expected[part])
