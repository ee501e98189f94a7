"""Digests of a state: compared, and written to JSON."""

from __future__ import annotations

from typing import Any

import pytest

from ckpttool.model.state_digest import StateDigest, TensorDigest, canonical


def _state(**given: Any) -> StateDigest:
    tensors = {"weights": {"a": TensorDigest("F32", (4,), 7)}, "exp_avg": {"a": TensorDigest("F32", (4,), 8)}}
    values: dict[str, Any] = {
        "tensors": tensors, "numbers": {"step": {"a": 3.0, "b": 4.0}}, "groups": [{"lr": "0.1"}, {"lr": "0.2"}],
        "group_of": {"a": 0, "b": 1}, "values": {"scheduler.last_epoch": "3"},
    }  # fmt: skip
    return StateDigest(**(values | given))


def test_json_gives_the_same_digests() -> None:
    assert StateDigest.from_json(_state().to_json()) == _state()


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
