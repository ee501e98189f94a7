"""``verify --deep`` finds NaN and infinity in the bytes that it hashes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckpttool
from ckpttool.analysis.verify import PIECE_BYTES, _is_finite
from ckpttool.dtypes import numpy_dtype
from tests.truth import source

if TYPE_CHECKING:
    from pathlib import Path


ODD = [math.nan, -math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E5M2", "F8_E4M3"])
def test_every_value_that_is_not_finite_is_found(dtype: str) -> None:
    """The largest and smallest finite values of both signs, zeros and small ones are finite."""
    kind = numpy_dtype(dtype)
    largest = ml_dtypes.finfo(kind).max
    values = np.array([0.0, -0.0, 1.0, -1.0, largest, -largest, ml_dtypes.finfo(kind).smallest_subnormal], dtype=kind)
    assert _is_finite(memoryview(values.tobytes()), dtype)
    assert _is_finite(memoryview(b""), dtype)
    for odd in ODD[: 2 if dtype == "F8_E4M3" else 4]:  # which has no infinity
        for at in range(len(values)):
            changed = values.copy()
            changed[at] = odd
            assert not _is_finite(memoryview(changed.tobytes()), dtype), (odd, at)


@pytest.mark.parametrize("odd", [*ODD, 0.5], ids=str)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_deep_check_counts_values_that_are_not_finite(name: str, odd: float, tmp_path: Path) -> None:
    """One value in a file of several pieces, with recorded checksums and without."""
    values = torch.zeros(PIECE_BYTES // 2 + 5)
    values[-3] = odd
    path = tmp_path / "a" / name
    path.parent.mkdir()
    if name.endswith(".bin"):
        torch.save({"w": values}, path)
    else:
        save_file({"w": values}, str(path))
    problems = [finding.problem for finding in ckpttool.verify(path.parent, deep=True).findings]
    counts = "1 NaN and 0" if math.isnan(odd) else "0 NaN and 1"
    assert problems == ([] if math.isfinite(odd) else [f"module of w has {counts} infinite values"])


def test_the_progress_counts_the_bytes_of_the_files_though_some_are_read_twice() -> None:
    told: list[tuple[int, int]] = []
    checkpoint = source("zero2-dp2-bf16")
    nbytes = ckpttool.inspect(checkpoint).nbytes
    ckpttool.verify(checkpoint, deep=True, jobs=1, progress=lambda done, total: told.append((done, total)))
    assert {total for _, total in told} == {nbytes}
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (nbytes, nbytes)
