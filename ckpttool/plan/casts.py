"""Cast between floating-point types with the same bits as torch on x86, NaN and overflow included.

Source: torch 2.13, aten/src/ATen/cpu/vec (vectorised casts) and c10/util/BFloat16.h (the scalar one, which fp16 to bf16
uses). Narrowing to bf16 rounds to nearest even and turns every NaN into one; narrowing to fp16 keeps the top of a NaN's
payload and makes it quiet; fp64 is cast to fp32 first. Widening is exact, and makes fp16's signalling NaNs quiet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.dtypes import numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

CAST_ELEMENTS = 1 << 19
"""Elements cast at a time: source and result together fit into a core's cache."""

_BF16_NAN = 0xFFFF
_BF16_NAN_FROM_FP16 = 0x7FC0


def cast(values: NDArray[Any], target: str) -> NDArray[Any]:
    """Cast to another type; return ``values`` itself if it has that type already.

    Args:
        values: Elements of fp64, fp32, fp16 or bf16 (as ml_dtypes has it).
        target: "F32", "F16" or "BF16".
    """
    wanted = numpy_dtype(target)
    if values.dtype == wanted:
        return values
    with np.errstate(all="ignore"):  # torch overflows to infinity too; callers count it with count_overflowed
        wide = values if values.dtype == np.float32 else _to_fp32(values)
        if target == "F32":
            return wide
        result: NDArray[Any] = wide.astype(wanted)
        # min() returns NaN if any element is NaN: one quick pass finds that most weights have none.
        if wide.size and np.isnan(wide.min()):
            _fix_nan(wide, result, _BF16_NAN_FROM_FP16 if values.dtype == np.float16 else _BF16_NAN)
    return result


def _to_fp32(values: NDArray[Any]) -> NDArray[np.float32]:
    result: NDArray[np.float32] = values.astype(np.float32)
    if values.dtype == np.float16:
        result.view(np.uint32)[np.isnan(result)] |= np.uint32(0x00400000)
    return result


def _fix_nan(wide: NDArray[np.float32], result: NDArray[Any], bf16_nan: int) -> None:
    nan = np.isnan(wide)
    bits = result.view(np.uint16)
    if result.dtype != np.float16:
        bits[nan] = bf16_nan
        return
    raw = wide.view(np.uint32)[nan]
    bits[nan] = ((raw >> 16) & 0x8000 | 0x7E00 | (raw >> 13) & 0x03FF).astype(np.uint16)


def same_values(left: NDArray[Any], right: NDArray[Any]) -> NDArray[np.bool_]:
    """Compare element by element: equal are the same bits, and NaN with NaN, whose bits depend on the hardware."""
    unsigned = f"u{left.dtype.itemsize}"
    same: NDArray[np.bool_] = left.view(unsigned) == right.view(unsigned)
    if not same.all() and left.dtype.kind not in "biu":
        same |= np.isnan(left) & np.isnan(right)
    return same


def count_overflowed(values: NDArray[Any], result: NDArray[Any]) -> int:
    """Count the elements that the cast made infinite. Among the targets only fp16 is too narrow for some weights."""
    if result.dtype != np.float16:
        return 0
    infinite = np.isinf(result)
    return int((infinite & np.isfinite(values)).sum()) if infinite.any() else 0
