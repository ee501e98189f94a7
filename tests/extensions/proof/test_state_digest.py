"""Digests of a state: written to JSON, and told apart by their values."""

from __future__ import annotations

from typing import Any

from ckpttool.extensions.proof.state_digest import StateDigest, other_values
from ckpttool.model.items import TensorDigest


def _state(**given: Any) -> StateDigest:
    tensors = {"weights": {"a": TensorDigest("F32", (4,), 7)}, "exp_avg": {"a": TensorDigest("F32", (4,), 8)}}
    values: dict[str, Any] = {
        "tensors": tensors, "numbers": {"step": {"a": 3.0, "b": 4.0}}, "groups": [{"lr": "0.1"}, {"lr": "0.2"}],
        "group_of": {"a": 0, "b": 1}, "values": {"scheduler.last_epoch": "3"},
    }  # fmt: skip
    return StateDigest(**(values | given))


def test_json_gives_the_same_digests() -> None:
    assert StateDigest.from_json(_state().to_json()) == _state()


def test_tensors_of_one_form_may_have_other_values() -> None:
    a = TensorDigest("F32", (4,), 7)
    others = [
        ("F32", (4,), 8),
        ("BF16", (4,), 8),
        ("F32", (4,), 7),
        ("BF16", (4,), 7),
        ("F32", (2, 2), 7),
        ("I32", (4,), 7),
    ]
    assert [other_values(a, TensorDigest(*one)) for one in others] == [True, True, False, False, False, False]
