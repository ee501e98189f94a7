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


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"tensors": {"weights": {"a": TensorDigest("F32", (4,), 7)}}}, ["exp_avg of a is missing"]),
        (
            {"tensors": {**_state().tensors, "weights": {"a": TensorDigest("BF16", (4,), 9)}}},
            ["weights of a has other values than were saved: it is BF16, and was F32"],
        ),
        (
            {"tensors": {**_state().tensors, "weights": {"a": TensorDigest("I32", (4,), 7)}}},
            ["weights of a is I32 [4], but was saved as F32 [4]"],
        ),
        (
            {"tensors": {**_state().tensors, "weights": {"a": TensorDigest("F32", (2, 2), 7)}}},
            ["weights of a is F32 [2, 2], but was saved as F32 [4]"],
        ),
        ({"numbers": {"step": {"a": 3.0, "b": 0.0}}}, ["step of b is 0, but was saved as 4"]),
        ({"numbers": {"step": {"a": 3.0}}}, ["step of b is missing, but was saved as 4"]),
        (
            {"group_of": {"a": 1, "b": 0}},
            [
                "lr of the group of a is 0.2, but was saved as 0.1",
                "lr of the group of b is 0.1, but was saved as 0.2",
            ],
        ),
        ({"groups": [{"lr": "0.2"}, {"lr": "0.1"}], "group_of": {"a": 1, "b": 0}}, []),
        ({"values": {"scheduler.last_epoch": "2"}}, ["scheduler.last_epoch is 2, but was saved as 3"]),
        ({"values": {}}, ["scheduler.last_epoch is missing, but was saved as 3"]),
    ],
)
def test_each_mismatch_is_named(changed: dict[str, Any], told: list[str]) -> None:
    assert list(map(str, _state().mismatches(_state(**changed)))) == told


def test_equal_values_of_another_precision_and_a_dimension_of_one_element_are_no_mismatch() -> None:
    saved = {"weights": {"a": TensorDigest("F32", (4,), 7), "scale": TensorDigest("F32", (), 5)}}
    live = {"weights": {"a": TensorDigest("BF16", (4,), 7), "scale": TensorDigest("F32", (1,), 5)}}
    assert StateDigest(tensors=saved).mismatches(StateDigest(tensors=live)) == []


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
