"""Digests of a state: merged over ranks, compared, and written to JSON."""

from __future__ import annotations

from typing import Any

import pytest

from ckpttool.model.state_digest import StateDigest, TensorDigest, canonical, merge


def _message(**given: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {
        "pieces": [],
        "numbers": {},
        "groups": [],
        "group_of": {},
        "values": {},
        "own": {},
        "unproven": {},
    }
    return {**empty, "partitioned": False, **given}


def _piece(
    value: int, place: str = "0", numel: int = 4, shape: tuple[int, ...] = (4,), dtype: str = "F32"
) -> list[Any]:
    return ["weights", "a", dtype, list(shape), place, numel, f"{value:032x}", False]


def _state(**given: Any) -> StateDigest:
    tensors = {"weights": {"a": TensorDigest("F32", (4,), 7)}, "exp_avg": {"a": TensorDigest("F32", (4,), 8)}}
    values: dict[str, Any] = {
        "tensors": tensors, "numbers": {"step": {"a": 3.0, "b": 4.0}}, "groups": [{"lr": "0.1"}, {"lr": "0.2"}],
        "group_of": {"a": 0, "b": 1}, "values": {"scheduler.last_epoch": "3"},
    }  # fmt: skip
    return StateDigest(**(values | given))


def test_parts_add_up_and_replicas_count_once() -> None:
    half = (1 << 64) - 1
    messages = [
        _message(pieces=[_piece(half, "0", 2)]),
        _message(pieces=[_piece(half, "0", 2)]),
        _message(pieces=[_piece(3, "2", 2)]),
    ]
    found, problems, *_ = merge(messages)
    assert problems == []
    assert found.tensors == {"weights": {"a": TensorDigest("F32", (4,), 2)}}, "modulo 2^64 in each lane"


@pytest.mark.parametrize(
    ("pieces", "told"),
    [
        ([[_piece(1)], [_piece(2)]], "weights of a differs between ranks 0 and 1, which have the same part"),
        ([[_piece(1, "0", 2)], []], "weights of a has parts of 2 elements on all ranks, of 4"),
        ([[_piece(1, "0", 2)], [_piece(1, "1", 3)]], "weights of a has parts of 5 elements on all ranks, of 4"),
        ([[_piece(1)], [_piece(1, dtype="BF16")]], "weights of a has another type or shape on another rank"),
    ],
)
def test_contradictions_of_ranks_are_named(pieces: list[Any], told: str) -> None:
    _, problems, *_ = merge([_message(pieces=own) for own in pieces])
    assert list(map(str, problems)) == [told]


def test_numbers_of_ranks_must_agree_unless_they_are_of_partitions() -> None:
    messages = [_message(numbers={"step": {"a": 3.0}, "d": {"a": n}}) for n in (1.0, 2.0)]
    assert list(map(str, merge(messages)[1])) == ["d of a is 2 on rank 1, but 1 before it"]
    found, problems, unproven, _ = merge([{**message, "partitioned": True} for message in messages])
    assert (problems, [*unproven], found.numbers) == ([], ["d"], {"step": {"a": 3.0}})


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
