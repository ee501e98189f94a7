"""Random number states are restored as they were, and derived ones share no stream."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import ckpttool
from ckpttool.errors import ArgumentError, PlanError
from tests.wording import refused


def _drawn() -> tuple[Any, ...]:
    """Numbers of all generators."""
    numbers = random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())  # noqa: S311
    return (*numbers, *torch.rand(3).tolist(), *torch.randn(3).tolist())


def _seeded(seed: int) -> dict[str, Any]:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    _drawn()  # half of a pair of normal numbers stays in each generator
    return ckpttool.rng_state()


@pytest.fixture(autouse=True)
def _restored() -> Any:
    before = ckpttool.rng_state()
    yield
    ckpttool.set_rng_state(before)


def test_the_same_numbers_follow() -> None:
    state = _seeded(7)
    first = _drawn()
    assert _drawn() != first
    ckpttool.set_rng_state(state)
    assert _drawn() == first


def test_the_state_does_not_change_with_the_generators() -> None:
    state = _seeded(7)
    copies = state["torch"].clone(), state["numpy"]["state"]["key"].clone()
    for _ in range(700):
        _drawn()
    assert torch.equal(state["torch"], copies[0])
    assert torch.equal(state["numpy"]["state"]["key"], copies[1])


def test_derived_streams_are_reproducible_and_apart() -> None:
    states = [_seeded(seed) for seed in (1, 2)]
    drawn: dict[Any, str] = {}
    for world_size in (1, 3, 4, 17):
        for rank in range(world_size):
            for name, given in (("both", states), ("swapped", states[::-1]), ("one", states[:1])):
                ckpttool.set_rng_state(ckpttool.derive_rng_state(given, rank, world_size))
                first = _drawn()
                ckpttool.set_rng_state(ckpttool.derive_rng_state(given, rank, world_size))
                assert _drawn() == first
                for place, number in enumerate(first):
                    assert (place, number) not in drawn, (drawn.get((place, number)), name)
                    drawn[place, number] = f"{name} {rank} of {world_size}"


def test_generators_of_torch_differ_in_the_bits_that_it_takes() -> None:
    """torch's generator of the CPU takes 32 bits of a seed."""
    states = [_seeded(3)]
    tracked = [{**states[0], "deepspeed": {"model-parallel-rng": states[0]["torch"], "other": states[0]["torch"]}}]
    derived = [ckpttool.derive_rng_state(tracked, rank, 64) for rank in range(64)]
    kept = [d["torch"] for d in derived] + [value for d in derived for value in d["deepspeed"].values()]
    seeds = {bytes(state[:4].numpy()) for state in kept}
    assert len(seeds) == 3 * 64


def test_shared_streams() -> None:
    states = [_seeded(1), _seeded(2)]
    made = [ckpttool.derive_rng_state(states, rank, 3, shared=["python", "torch"]) for rank in range(3)]
    for a in made[1:]:
        assert a["python"] == made[0]["python"]
        assert torch.equal(a["torch"], made[0]["torch"])
        assert not torch.equal(a["numpy"]["state"]["key"], made[0]["numpy"]["state"]["key"])


def test_errors() -> None:
    state = ckpttool.rng_state()
    for states, rank in (([], 0), ([state], 2), ([{"a": 1}], 0), ([{**state, "rng_format": 9}], 0)):
        with refused(ArgumentError):
            ckpttool.derive_rng_state(states, rank, max(rank, 1))
    with refused(ArgumentError):
        ckpttool.derive_rng_state([state], 0, 1, shared=["cpu"])
    with refused(ArgumentError):
        ckpttool.set_rng_state({"torch": state["torch"]})
    with refused(ArgumentError):
        ckpttool.set_rng_state({key: value for key, value in state.items() if key != "numpy"})
    other = {**state, "numpy": {**state["numpy"], "bit_generator": "PCG64"}}
    with refused(PlanError):
        ckpttool.derive_rng_state([other], 0, 1)
