"""Names are assigned to numbered tensors only if exactly one assignment fits."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.formats.zero.partitions import match_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    Shape = tuple[int, ...] | None

SHAPE = st.sampled_from([(2,), (3,), (2, 3)])
PLACES = st.lists(st.one_of(SHAPE, st.none()), max_size=4)


def _every_way(names: dict[str, tuple[int, ...]], groups: Sequence[Sequence[Shape]]) -> list[list[list[str]]]:
    """All ways to give each name to a group or to none, by trying them all."""
    found = []
    for owners in itertools.product(range(-1, len(groups)), repeat=len(names)):
        dealt: list[list[str]] = [[] for _ in groups]
        for name, owner in zip(names, owners, strict=True):
            if owner >= 0:
                dealt[owner].append(name)
        if all(
            len(own) == len(group) and all(place in {None, names[n]} for n, place in zip(own, group, strict=True))
            for own, group in zip(dealt, groups, strict=True)
        ):
            found.append(dealt)
    return found


@given(st.lists(SHAPE, max_size=5), st.lists(PLACES, max_size=3))
def test_the_only_way_is_found_and_no_other(shapes: list[tuple[int, ...]], groups: list[list[Shape]]) -> None:
    names = {f"p{i}": shape for i, shape in enumerate(shapes)}
    ways = _every_way(names, groups)
    assert match_names(names, groups) == (ways[0] if len(ways) == 1 else None)


@given(st.lists(st.tuples(SHAPE, st.integers(-1, 2)), max_size=6))
def test_the_optimizer_of_the_saved_run_is_among_the_candidates(dealt: list[tuple[tuple[int, ...], int]]) -> None:
    names = {f"p{i}": shape for i, (shape, _) in enumerate(dealt)}
    truth = [[f"p{i}" for i, (_, owner) in enumerate(dealt) if owner == g] for g in range(3)]
    groups = [[names[n] for n in own] for own in truth]
    assert match_names(names, groups) in ([*map(list, truth)], None)
    if len(_every_way(names, groups)) == 1:
        assert match_names(names, groups) == truth


def test_a_model_of_many_layers_is_matched_soon() -> None:
    layer = {"qkv.weight": (24, 8), "qkv.bias": (24,), "norm.weight": (8,), "up.weight": (32, 8)}
    names = {f"{i}.{name}": shape for i in range(500) for name, shape in layer.items()}
    groups = [[s for s in names.values() if len(s) == n] for n in (2, 1)]
    began = time.process_time()
    found = match_names(names, groups)
    assert found == [[n for n, s in names.items() if len(s) == d] for d in (2, 1)]
    assert time.process_time() - began < 20


@pytest.mark.slow
def test_a_search_that_would_take_for_ever_is_given_up() -> None:
    names = {f"p{i}": (2,) for i in range(200)}
    began = time.process_time()
    assert match_names(names, [[(2,)] * 30 for _ in range(6)]) is None
    assert time.process_time() - began < 20
