"""Experts have their numbers in the whole model, on any rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpttool
from ckpttool.formats.zero.experts import global_names, local_names, with_experts
from tests.truth import source

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LAYERS = st.lists(st.sampled_from(["a", "b.c", "layers.0.mlp"]), min_size=1, max_size=3, unique=True)


def _name(layer: str, expert: int, rest: str) -> str:
    return f"{layer}.deepspeed_moe.experts.deepspeed_experts.{expert}.{rest}"


@given(LAYERS, st.integers(1, 4), st.integers(1, 4))
def test_each_rank_has_its_share_and_together_they_have_all(layers: list[str], ranks: int, local: int) -> None:
    everything = {_name(layer, e, rest) for layer in layers for e in range(ranks * local) for rest in ("w", "b.c")}
    found: set[str] = set()
    for rank in range(ranks):
        own = {_name(layer, e, rest) for layer in layers for e in range(local) for rest in ("w", "b.c")}
        renamed = global_names([*own, "embed.weight"], rank)
        assert renamed.keys() == own
        for layer in layers:
            first = _name(layer, 0, "w")
            assert renamed[first] == _name(layer, rank * local, "w")
        assert local_names([*everything, "embed.weight"], rank, ranks) == renamed
        assert not found & set(renamed.values())
        found |= set(renamed.values())
    assert found == everything


def test_layers_may_have_different_numbers_of_experts() -> None:
    own = [_name("a", 0, "w"), _name("b", 0, "w"), _name("b", 1, "w")]
    assert list(global_names(own, 1).values()) == [_name("a", 1, "w"), _name("b", 2, "w"), _name("b", 3, "w")]


def test_experts_are_inserted_after_their_layer() -> None:
    names = ["embed.w", "a.gate.w", "a.norm.w", "b.gate.w", "head.w"]
    experts = ["b.experts.1.w", "a.experts.0.w", "a.experts.1.w", "alone.w"]
    assert with_experts(names, experts) == [
        "embed.w", "a.gate.w", "a.norm.w", "a.experts.0.w", "a.experts.1.w", "b.gate.w", "b.experts.1.w", "head.w",
        "alone.w",
    ]  # fmt: skip
    assert with_experts([], ["a.experts.0.w"]) == ["a.experts.0.w"]


@given(st.lists(st.sampled_from("abcd.0"), max_size=8).map("".join), st.integers(0, 3))
def test_other_parameters_keep_their_names(name: str, rank: int) -> None:
    assert global_names([name], rank) == local_names([name], rank, 2) == {}


def test_further_names_in_checkpoints_with_experts_are_noted(checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy("moe-zero2-dp2-bf16")
    (path,) = root.rglob("mp_rank_00_model_states.pt")
    file = torch.load(path, weights_only=False)
    file["module"]["again.weight"] = file["module"]["dense.weight"].clone()  # as DeepSpeed saves [dense] * 2
    torch.save(file, path)
    remarks = ckpttool.inspect(root).remarks
    assert any("1 tensors are neither" in r and "again.weight" in r for r in remarks)
    assert not any("are neither" in r for r in ckpttool.inspect(source("moe-zero2-dp2-bf16")).remarks)
