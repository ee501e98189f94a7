"""Casts equal torch's, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.dtypes import DTYPES, castable, numpy_dtype
from ckpttool.plan.casts import cast, same_values

TARGETS = ("F32", "F16", "BF16")
RANDOM = np.random.default_rng(20240229)


def _every_16_bit_pattern() -> np.ndarray[Any, np.dtype[np.uint16]]:
    return np.arange(1 << 16, dtype=np.uint16)


def _fp32_patterns() -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Random bits, and every neighbourhood where rounding to a 16-bit type changes its mind."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    borders = [high + np.uint32(low) for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    with np.errstate(invalid="ignore"):
        fp16 = _every_16_bit_pattern().view(np.float16).astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
    fp16_borders = [fp16 + np.uint32(low) for low in (0x0FFF, 0x1000, 0x1001)]
    random = RANDOM.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32)
    return np.concatenate([random, *borders, *fp16_borders])


def _fp64_patterns() -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Values that fp32 can hold, their neighbours that it cannot, and random bits."""
    with np.errstate(invalid="ignore"):
        exact = _fp32_patterns().view(np.float32).astype(np.float64).view(np.uint64)
    return np.concatenate([exact, exact + np.uint64(1), RANDOM.integers(0, 1 << 63, 100_000, dtype=np.uint64)])


SOURCES: dict[str, np.ndarray[Any, Any]] = {
    "F16": _every_16_bit_pattern(),
    "BF16": _every_16_bit_pattern(),
    "F32": _fp32_patterns(),
    "F64": _fp64_patterns(),
}


def _torch_cast(bits: np.ndarray[Any, Any], source: str, target: str) -> np.ndarray[Any, Any]:
    signed = torch.from_numpy(bits.view(f"i{bits.itemsize}").copy())
    result = signed.view(getattr(torch, DTYPES[source].torch)).to(getattr(torch, DTYPES[target].torch))
    width = result.element_size()
    cast_bits: np.ndarray[Any, Any] = result.view({2: torch.int16, 4: torch.int32}[width]).numpy()
    return cast_bits.view(f"u{width}")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_bits_equal_torchs(source: str, target: str) -> None:
    bits = SOURCES[source]
    ours = cast(bits.view(numpy_dtype(source)), target)
    assert ours.dtype == numpy_dtype(target)
    np.testing.assert_array_equal(ours.view(f"u{ours.itemsize}"), _torch_cast(bits, source, target))


@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=70), st.sampled_from(TARGETS))
def test_bits_equal_torchs_at_any_length(values: list[int], target: str) -> None:
    bits = np.array(values, dtype=np.uint32)
    ours = cast(bits.view(np.float32), target)
    np.testing.assert_array_equal(ours.view(f"u{ours.itemsize}"), _torch_cast(bits, "F32", target))


def test_a_cast_to_the_same_type_copies_nothing() -> None:
    values = np.ones(3, np.float32)
    assert cast(values, "F32") is values


def test_integers_cannot_be_cast() -> None:
    assert castable("F32", "BF16")
    assert castable("I64", "I64")
    assert not castable("I64", "BF16")
    assert not castable("F32", "I64")
    assert not castable("F8_E4M3", "F32")


def test_nan_equals_nan_whatever_its_bits_and_zero_differs_from_minus_zero() -> None:
    left = np.array([0x7FC0, 0xFFFF, 0x0000, 0x3F80], np.uint16).view(numpy_dtype("BF16"))
    right = np.array([0xFFFF, 0x3F80, 0x8000, 0x3F80], np.uint16).view(numpy_dtype("BF16"))
    assert same_values(left, right).tolist() == [True, False, False, True]
