"""The digest of a tensor, compared with its definition in Python's own integers."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import digests
from ckpttool.integrations.torch import digest as of_torch

MASK = (1 << 64) - 1
DTYPES = (
    np.float32, np.float16, ml_dtypes.bfloat16, np.float64, np.int64, np.int32, np.int16, np.int8, np.uint8, np.bool_,
    ml_dtypes.float8_e4m3fn, np.complex64,
)  # fmt: skip


def _factor(lane: int, index: int) -> int:
    z = (index + (lane << 60) + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return (z ^ (z >> 31)) | 1


def _defined(values: np.ndarray[Any, Any]) -> int:
    """Compute the digest word by word."""
    values = np.ascontiguousarray(values).reshape(-1)
    if values.dtype.name in {"float16", "bfloat16"}:
        values = values.astype(np.float32)
    words = values.view(np.uint32 if values.dtype.itemsize >= 4 else f"u{values.dtype.itemsize}")
    low, high = (
        sum(_factor(2 + lane, j >> 12) * _factor(lane, j & 4095) * int(word) for j, word in enumerate(words)) & MASK
        for lane in (0, 1)
    )
    return high << 64 | low


def _values(dtype: Any, count: int = 9000) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(1)
    drawn = random.standard_normal(count) * 40
    return (drawn > 0) if dtype is np.bool_ else drawn.astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_a_digest_is_the_defined_sum(dtype: Any) -> None:
    values = _values(dtype)
    assert digests.digest(values) == _defined(values)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (np.zeros(0, np.float32), "00000000000000000000000000000000"),
        (np.ones(1, np.float32), "fae9c37f708000006cdf03d30d800000"),
        (np.arange(10000, dtype=np.float32), "4d184e2d44b80800682c22c658620800"),
        (np.arange(10000, dtype=np.int64), "1226809bc0c48722e97168df54204700"),
    ],
)
def test_vectors_of_the_documentation(values: np.ndarray[Any, Any], text: str) -> None:
    assert f"{digests.digest(values):032x}" == text


@given(st.lists(st.integers(0, 9000), max_size=6), st.sampled_from(DTYPES))
def test_digests_of_the_parts_of_any_partition_add_up(cuts: list[int], dtype: Any) -> None:
    values = _values(dtype)
    edges = [0, *sorted(cuts), len(values)]
    parts = [digests.digest(values[a:b], a) for a, b in itertools.pairwise(edges)]
    assert digests.add(*parts) == digests.digest(values)


@given(st.data())
def test_digests_of_boxes_add_up(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(6, 1500), (9, 10, 100), (9000,), (3, 3000), (20, 450)]))
    values = _values(data.draw(st.sampled_from(DTYPES))).reshape(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[dim]))
    low, high = np.split(values, [cut], axis=dim)
    starts = tuple(cut if n == dim else 0 for n in range(len(shape)))
    parts = digests.digest_box(low, (0,) * len(shape), shape), digests.digest_box(high, starts, shape)
    assert digests.add(*parts) == digests.digest(values.reshape(-1))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_values_of_one_precision_have_the_digest_of_fp32(dtype: Any) -> None:
    values = _values(dtype)
    assert digests.digest(values) == digests.digest(values.astype(np.float32))


def _changed(values: np.ndarray[Any, Any], how: str) -> np.ndarray[Any, Any]:
    square = values[:8100].reshape(90, 90).copy()
    if how == "one bit":
        square.view(np.uint32)[40, 3] ^= 1
    elif how == "one sign":
        square[40, 3] *= -1
    elif how == "two signs":
        square[[40, 7], [3, 8]] *= -1
    elif how == "two elements swapped":
        square[[1, 2], [3, 4]] = square[[2, 1], [4, 3]]
    elif how == "transposed":
        square = square.T.copy()
    elif how == "halves swapped":
        square = np.concatenate([square[45:], square[:45]])
    elif how == "shifted":
        square = np.roll(square.reshape(-1), 1).reshape(90, 90)
    flat: np.ndarray[Any, Any] = square.reshape(-1)
    return flat


@pytest.mark.parametrize(
    "how", ["one bit", "one sign", "two signs", "two elements swapped", "transposed", "halves swapped", "shifted"]
)
def test_a_change_changes_both_lanes(how: str) -> None:
    values = _values(np.float32)
    before, after = digests.digest(_changed(values, "not")), digests.digest(_changed(values, how))
    assert before & MASK != after & MASK
    assert before >> 64 != after >> 64


def test_every_bit_of_every_element_counts() -> None:
    values = np.zeros(70, np.uint32)
    seen = set()
    for element in range(70):
        for bit in range(32):
            values[element] = 1 << bit
            seen.add(digests.digest(values, 4090))  # across the border of a block
            values[element] = 0
    assert len(seen) == 70 * 32


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "bfloat16", "float64", "int64", "int16", "int8", "uint8", "bool"]
)
@pytest.mark.parametrize("starts", [0, 7, (2, 0, 0), (2, 3, 4)])
def test_operations_of_an_accelerator_give_the_same_digest(dtype: str, starts: Any) -> None:
    shape = (11, 13, 17)
    own = (3, 13, 17) if starts in (0, 7, (2, 0, 0)) else (3, 4, 5)
    tensor = (torch.randn(own, generator=torch.Generator().manual_seed(0)) * 50).to(getattr(torch, dtype))
    expected = of_torch.digest(tensor, starts, shape)
    assert of_torch._on_device(tensor, starts, shape) == expected
    assert expected != of_torch.digest(tensor, 8, shape)


@pytest.mark.parametrize(
    "tensor", [torch.arange(12.0).reshape(3, 4).T, torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)]
)
def test_a_digest_does_not_depend_on_strides(tensor: torch.Tensor) -> None:
    of_strides, contiguous = (of_torch.digest(t, 0, tensor.shape) for t in (tensor, tensor.contiguous()))
    assert of_strides == contiguous


def test_a_long_run_of_half_precision_has_the_digest_of_its_values() -> None:
    values = np.random.default_rng(0).standard_normal(digests.RUN_BLOCKS * digests.BLOCK_WORDS + 9).astype(np.float16)
    assert digests.digest(values, 5) == digests.digest(values.astype(np.float32), 5)
