"""Matrix products have the bits of torch's, whatever the processor and the BLAS of numpy do."""

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest

from ckpttool.execution import products
from ckpttool.execution.products import ordered_product, product

SHAPES = [
    (1, 8, 64), (2, 1, 2), (3, 16, 1), (16, 16, 352), (62, 8, 128), (96, 12, 96), (128, 64, 1024), (333, 7, 77),
    (256, 192, 200), (5, 0, 7), (0, 4, 4),
]  # fmt: skip


def _matrices(rows: int, terms: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    a = random.standard_normal((rows, terms), dtype=np.float32)
    return a, random.standard_normal((terms, columns), dtype=np.float32)


def _nearest(value: Fraction) -> np.float32:
    """The float nearest to a rational number; ties to even."""
    near = np.float32(float(value))
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min(around, key=lambda x: (abs(Fraction(float(x)) - value), int(x.view(np.uint32)) & 1))


@pytest.mark.parametrize("shape", SHAPES)
def test_product_has_the_bits_of_the_definition(shape: tuple[int, int, int]) -> None:
    a, b = _matrices(*shape)
    assert np.array_equal(product(a, b), ordered_product(a, b))
    assert np.array_equal(product(a, b), product(np.asfortranarray(a), np.asfortranarray(b)))


@pytest.mark.parametrize("core", ["Haswell", "Sandybridge", "Prescott"])
def test_product_has_the_same_bits_with_the_kernels_of_other_processors(core: str) -> None:
    """OpenBLAS is told to use them; those for AVX-512 would kill a process on a processor without it."""
    script = (
        "from tests.execution.test_products import SHAPES, _matrices\n"
        "from ckpttool.execution.products import ordered_product, product\n"
        "for shape in SHAPES:\n"
        "    a, b = _matrices(*shape)\n"
        "    assert (product(a, b) == ordered_product(a, b)).all(), shape\n"
    )
    environment = os.environ | {"OPENBLAS_CORETYPE": core}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def test_the_definition_rounds_each_exact_sum_once() -> None:
    random = np.random.default_rng(1)
    scales = np.float32(2.0) ** random.integers(-30, 30, (2, 40)).astype(np.float32)
    a = random.standard_normal((40, 6), dtype=np.float32) * scales[0][:, None]
    b = random.standard_normal((6, 40), dtype=np.float32) * scales[1]
    found = ordered_product(a, b)
    for i in range(0, 40, 7):
        for j in range(40):
            total = np.float32(0)
            for x, y in zip(a[i], b[:, j], strict=True):
                total = _nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(total)))
            assert found[i, j] == total


def test_a_sum_that_a_double_rounds_twice() -> None:
    """1 + 2**-23 + 2**-24 is a tie for fp32; the sum lies 2**-56 below it, which a double drops."""
    a = np.array([[1 + 2.0**-23, 1 + 2.0**-16]], dtype=np.float32)
    b = np.array([[1.0], [(1 - 2.0**-16) * 2.0**-24]], dtype=np.float32)
    assert ordered_product(a, b)[0, 0] == np.float32(1 + 2.0**-23)
    assert ordered_product(-a, b)[0, 0] == -np.float32(1 + 2.0**-23)


def test_infinities_and_nans_stay_what_they_are() -> None:
    a = np.array([[np.inf, 1.0], [np.nan, 1.0], [np.inf, -np.inf], [3e38, 3e38]], dtype=np.float32)
    b = np.ones((2, 2), dtype=np.float32)
    found = ordered_product(a, b)
    assert np.isposinf(found[[0, 3]]).all()
    assert np.isnan(found[[1, 2]]).all()


def test_the_definition_is_used_where_no_other_way_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    products._way.cache_clear()
    monkeypatch.setattr(products, "_whole", lambda a, b: a @ b + 1)
    monkeypatch.setattr(products, "_in_pairs", lambda a, b: a @ b + 1)
    a, b = _matrices(7, 5, 3)
    assert np.array_equal(product(a, b), ordered_product(a, b))
    products._way.cache_clear()
