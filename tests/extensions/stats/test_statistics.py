"""Statistics are exact: extremes, means, norms, and values counted by power of two."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

import ckpttool as api
from ckpttool.extensions.stats.statistics import linear_histogram
from tests.truth import source, truth

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", ["zero2-dp2-bf16", "zero0-dp2-fp16"])
def test_magnitudes_are_counted_exactly(name: str) -> None:
    known = truth(name)
    for found in api.stats(source(name), optimizer=True, magnitudes=True):
        assert found.zeros + found.nan + found.inf + sum(n + p for _, n, p in found.magnitudes) == found.numel
        sketch = linear_histogram(found, 12)
        spread = found.min < found.max
        assert math.isclose(
            sum(sketch), found.numel - found.nan - found.inf if spread else 0, rel_tol=1e-9, abs_tol=1e-9
        )
    arrays = {t.name: t for t in api.stats(source(name), magnitudes=True)}
    checked = 0
    for key, values in known.arrays.items():
        stats = next((t for t in arrays.values() if key.endswith(f"/{t.name}") or key == t.name), None)
        if stats is None or values.dtype != np.float32 or values.shape != stats.shape or "exp" in key:
            continue
        if not math.isclose(float(np.linalg.norm(values.astype(np.float64))), stats.norm, rel_tol=1e-9):
            continue  # another state of that name
        exponents = np.floor(np.log2(np.abs(values[values != 0].astype(np.float64)))).astype(int)
        for e, negative, positive in stats.magnitudes:
            of = values[values != 0][exponents == e]
            assert (negative, positive) == (int((of < 0).sum()), int((of > 0).sum()))
        checked += 1
    assert checked >= 5


def test_magnitudes_of_the_rarest_values(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    values = np.array(
        [0, -0.0, 5e-324, -5e-324, 1e-310, 1, -1, 1.999, 2, -3.5, 2.0**500, math.inf, -math.inf, math.nan]
    )
    safetensors.save_file({"x": values}, str(tmp_path / "model.safetensors"))
    (found,) = api.stats(tmp_path, magnitudes=True)
    assert (found.zeros, found.inf, found.nan) == (2, 2, 1)
    assert found.magnitudes == ((-1023, 0, 3), (0, 1, 2), (1, 1, 1), (500, 0, 1))
