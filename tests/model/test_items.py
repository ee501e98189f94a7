"""Items of a state, and how they are compared."""

from __future__ import annotations

from typing import Any

import pytest

from ckpttool.model.items import TensorDigest, canonical, difference, equal_values


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"x": 1, "y": [1, 2.0]}, {"y": (1.0, 2), "x": 1.0}),
        (float("nan"), float("nan")),
        ([1] * 1000, (1,) * 1000),
        (10**400, 10**400),
    ],
)
def test_equal_data_has_one_text(a: Any, b: Any) -> None:
    assert canonical(a) == canonical(b)
    assert len(canonical(a)) <= 200


@pytest.mark.parametrize(
    ("a", "b"),
    [(1, 2), (1, True), ("1", 1), ([1, 2], [2, 1]), (0.1, 0.1 + 1e-17 + 2e-17), ([1] * 1000, [1] * 999 + [2])],
)
def test_other_data_has_another_text(a: Any, b: Any) -> None:
    assert (a == b and type(a) is type(b)) or canonical(a) != canonical(b)


@pytest.mark.parametrize(
    ("saved", "live", "told"),
    [
        (("F32", (4,), 7), ("F32", (4,), 7), ""),
        (("F32", (1,), 7), ("F32", (), 7), ""),
        (("F32", (4,), 7), ("F32", (2, 2), 7), "is F32 [2, 2], but was saved as F32 [4]"),
        (("F32", (4,), 7), ("I32", (4,), 7), "is I32 [4], but was saved as F32 [4]"),
        (("F32", (4,), 7), ("F32", (4,), 8), "has other values than were saved"),
        (
            ("F32", (4,), 7),
            ("BF16", (4,), 7),
            "has another type than was saved, with equal values: it is BF16, and was F32",
        ),
        (("F32", (4,), 7), ("BF16", (4,), 8), "has other values than were saved: it is BF16, and was F32"),
    ],
)
def test_tensors_differ_by_shape_type_and_values(saved: Any, live: Any, told: str) -> None:
    a, b = TensorDigest(*saved), TensorDigest(*live)
    assert difference(a, b) == told
    assert equal_values(a, b) == (a.value == b.value and " saved as " not in told)
