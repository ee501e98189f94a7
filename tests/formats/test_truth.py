"""Every bundled checkpoint reads as the live engine held it, bit for bit. Needs numpy alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ckpttool.errors import LayoutError
from ckpttool.formats import open_checkpoint
from ckpttool.model import UNKNOWN_GROUP, State, Topology
from tests.truth import NAMES, NUMPY, REFUSED, gather, source, truth

if TYPE_CHECKING:
    from ckpttool.model import Checkpoint
    from tests.truth import Truth

SPELLING = {dtype: name for name, dtype in NUMPY.items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_what_the_engine_held(name: str) -> None:
    checkpoint, expected = open_checkpoint(source(name)), truth(name)
    _assert_states(checkpoint, expected.states)
    _assert_names_and_counters(checkpoint, expected)
    _assert_groups(checkpoint, expected)
    if expected.facts["order"][0] == "scale" and not name.endswith("-accelerate"):
        _assert_client_state_has_the_users_values_only(checkpoint, expected)


def _assert_states(checkpoint: Checkpoint, expected: dict[str, Any]) -> None:
    seen: dict[str, State] = {}
    for owner, key, state in checkpoint.states():
        what = f"{key}/{owner}"
        assert seen.setdefault(what, state) is state, what
        assert what in expected
        assert state.shape == expected[what].shape, what
        assert state.dtype == SPELLING[expected[what].dtype], what
        assert gather(checkpoint, state) == expected[what].tobytes(), what
    assert seen.keys() == expected.keys()


def _assert_names_and_counters(checkpoint: Checkpoint, expected: Truth) -> None:
    assert checkpoint.format == ("universal" if expected.universal else "zero")
    assert checkpoint.stage == expected.stage
    assert checkpoint.topology == (Topology() if expected.universal else expected.topology)
    assert checkpoint.dtype == {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}[expected.facts["dtype"]]
    recorded = ".".join(map(str, expected.release)) if expected.release >= (0, 4, 0) else None
    assert checkpoint.deepspeed_version == recorded
    assert checkpoint.step == expected.facts["global_steps"]
    assert checkpoint.skipped_steps == expected.facts["skipped_steps"]
    assert dict(checkpoint.aliases) == expected.tied
    names = [p.name for p in checkpoint.parameters]
    assert len(names) == len(set(names))
    assert set(names) == expected.parameters
    if expected.order is not None:
        assert names == expected.order
    if expected.unassigned:
        assert {p.group for p in checkpoint.parameters} == {UNKNOWN_GROUP}
    else:
        assert [p.name for p in checkpoint.parameters if p.frozen] == expected.saved_frozen
    assert checkpoint.notes == ()


def _assert_groups(checkpoint: Checkpoint, expected: Truth) -> None:
    if expected.unassigned:
        assert checkpoint.groups == ()
        assert checkpoint.nonpartitionable == ("the optimizer",)
        assert "masters and moments are left out" in checkpoint.remarks[0]
        return
    odd = expected.facts.get("set_aside", ())
    set_aside = {text.partition(",")[0] for text in checkpoint.of_one_layout}
    assert set_aside == {f"group {g}: {key}" for g in range(len(checkpoint.groups)) for key in odd}
    for group, held in zip(checkpoint.groups, expected.facts["groups"], strict=True):
        # Round robin stores a group in another order than the optimizer lists it.
        assert sorted(group.parameters) == sorted(held["params"])
        assert (group.hyperparameters == {}) == expected.elastic
        for key, value in held.items():
            if key != "params" and not expected.elastic:
                read = group.hyperparameters[key]
                assert (list(read) if isinstance(read, tuple) else read) == value, key
    assert [{k: s.value for k, s in g.scalars.items()} for g in checkpoint.groups] == expected.scalars
    for index, group in enumerate(checkpoint.groups):
        assert {p.name for p in checkpoint.parameters if p.group == index} == set(group.parameters)


def _assert_client_state_has_the_users_values_only(checkpoint: Checkpoint, expected: Truth) -> None:
    assert checkpoint.client_state == {
        "epoch": 2,
        "note": "odd shapes",
        "losses": [1.5, 1.25],
        "nested": {"tokens": 36, "seen": (1, 2)},
    }
    assert checkpoint.scheduler == {"last_batch_iteration": 2}
    if expected.release >= (0, 4, 0):
        assert checkpoint.ds_config["zero_optimization"]["stage"] == expected.facts["stage"]
    # Up to 0.19.1 the engine cast buffers of floating-point numbers, too.
    positions = SPELLING[expected.arrays["buffer/positions"].dtype]
    pruned = {key.removeprefix("buffer/"): "F32" for key in expected.arrays if key.endswith("pruning_mask")}
    assert {b.name: b.state.dtype for b in checkpoint.buffers} == {
        "positions": positions, "seen": "I64", "mask": "BOOL", **pruned,
    }  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_known_is_refused(name: str) -> None:
    with pytest.raises(LayoutError, match=REFUSED[name]):
        open_checkpoint(source(name))
