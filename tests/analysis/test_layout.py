"""The layout that pictures show has every extent of the checkpoint, and accounts for every byte of every file."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ckpttool
from ckpttool.analysis.layout import CATEGORIES, expand, layer_of, layout
from tests import sampling
from tests.truth import NAMES, source

if TYPE_CHECKING:
    from ckpttool.model import Checkpoint

LARGE = "moe-zero2-dp4-ep2-bf16"


def _extents_of(checkpoint: Checkpoint) -> Counter[tuple[Any, ...]]:
    fields = ("file", "offset", "start", "numel", "padding", "runs", "pitch")
    found: Counter[tuple[Any, ...]] = Counter()
    for name, key, state in checkpoint.states():
        found.update((name, key, *(int(row[f]) for f in fields)) for row in state.extents)
    return found


def _drawn(told: dict[str, Any], *, replicas: bool = False) -> Counter[tuple[Any, ...]]:
    fields = ("file", "offset", "start", "numel", "padding", "runs", "pitch")
    names, states = told["tensors"]["name"], told["states"]
    every = (row for row in expand(told["rows"]) if replicas or not row["replica"])
    return Counter((names[row["tensor"]], states[row["state"]], *(row[f] for f in fields)) for row in every)


@pytest.mark.parametrize("name", sampling.swept(NAMES))
def test_the_layout_has_every_extent_once(name: str) -> None:
    checkpoint = ckpttool.inspect(source(name))
    told = layout(checkpoint)
    assert _drawn(told) == _extents_of(checkpoint)
    assert told["extents"] == sum(_drawn(told, replicas=True).values())
    assert not told["folded"]
    assert sorted(i for lane in told["lanes"] for i in lane["files"]) == list(range(len(checkpoint.files)))


@pytest.mark.parametrize("name", sampling.swept(NAMES))
def test_the_usage_of_a_file_adds_up_to_its_size(name: str) -> None:
    checkpoint = ckpttool.inspect(source(name))
    usage = np.array([layout(checkpoint)["usage"][category] for category in CATEGORIES])
    assert usage.sum(axis=0).tolist() == [f.nbytes for f in checkpoint.files]
    assert (usage >= 0).all()


@pytest.mark.parametrize("name", [name for name in NAMES if re.match(r"autotp|megatron|pipeline", name)])
def test_the_module_copies_of_model_parallel_ranks_are_there_once(name: str) -> None:
    torch = pytest.importorskip("torch")
    checkpoint = ckpttool.inspect(source(name))
    drawn = Counter[int]()
    for row in expand(layout(checkpoint)["rows"]):
        drawn[row["file"]] += (row["numel"] * row["runs"] + row["padding"]) * row["width"]
    checked = 0
    for i, file in enumerate(checkpoint.files):
        if file.kind not in {"model", "layer"}:
            continue
        loaded = torch.load(checkpoint.path(i), weights_only=False)
        module = loaded["module"] if file.kind == "model" else loaded
        tensors = {t.data_ptr(): t.nbytes for t in (module or {}).values() if isinstance(t, torch.Tensor) and t.nbytes}
        assert drawn[i] == sum(tensors.values()), file.name
        checked += len(tensors)
    assert checked or checkpoint.stage == 3


@pytest.mark.parametrize("limit", [30, 8, 1])
def test_a_folded_layout_keeps_all_bytes_of_all_files(limit: int) -> None:
    checkpoint = ckpttool.inspect(source(LARGE))
    whole, folded = layout(checkpoint), layout(checkpoint, max_tensors=limit)
    assert folded["folded"]
    assert len(folded["tensors"]["name"]) < len(whole["tensors"]["name"])
    assert sum(folded["tensors"]["numel"]) == sum(whole["tensors"]["numel"])
    assert sum(folded["tensors"]["count"]) == len(whole["tensors"]["name"])
    assert folded["extents"] == whole["extents"] == sum(row["extents"] for row in expand(folded["rows"]))
    assert _nbytes(folded) == _nbytes(whole)
    assert folded["usage"] == whole["usage"]


def test_joined_files_keep_all_bytes_of_all_states() -> None:
    checkpoint = ckpttool.inspect(source("universal-zero2-dp2-bf16"))
    whole, joined = layout(checkpoint), layout(checkpoint, max_files=5, max_tensors=4)
    assert joined["joined"]
    assert joined["extents"] == whole["extents"] == sum(row["extents"] for row in expand(joined["rows"]))
    assert sum(f["nbytes"] for f in joined["files"]) == checkpoint.nbytes
    assert sum(f.get("count", 1) for f in joined["files"]) == len(checkpoint.files)
    assert [sum(joined["usage"][name]) for name in CATEGORIES] == [sum(whole["usage"][name]) for name in CATEGORIES]
    by_state = [Counter[str](), Counter[str]()]
    for found, told in zip(by_state, (whole, joined), strict=True):
        for (state, _), nbytes in _nbytes(told).items():
            found[state] += nbytes
    assert by_state[0] == by_state[1]


def _nbytes(told: dict[str, Any]) -> Counter[tuple[str, int]]:
    """Bytes by state and file, padding included."""
    found: Counter[tuple[str, int]] = Counter()
    for row in expand(told["rows"]):
        found[told["states"][row["state"]], row["file"]] += (row["numel"] * row["runs"] + row["padding"]) * row["width"]
    return found


def test_experts_are_folded_first_and_layers_stay_apart() -> None:
    names = layout(ckpttool.inspect(source(LARGE)), max_tensors=30)["tensors"]["name"]
    assert "first.deepspeed_moe.experts.deepspeed_experts.*.up.weight" in names
    assert "second.deepspeed_moe.gate.wg.weight" in names


def test_ranks_that_repeat_are_one_row() -> None:
    told = layout(ckpttool.inspect(source("zero3-dp4-bf16")))
    at = [i for i, tensor in enumerate(told["rows"]["tensor"]) if told["tensors"]["name"][tensor] == "embed.weight"]
    assert [told["rows"]["count"][i] for i in at] == [3, 1] * 3  # the last rank has padding


def test_the_grid_of_ranks_is_named() -> None:
    told = layout(ckpttool.inspect(source("pipeline-zero1-pp2-tp2-bf16")))
    labels = [lane["label"] for lane in told["lanes"]]
    assert labels[:4] == ["pp 0 tp 0", "pp 0 tp 0 dp 0", "pp 0 tp 1", "pp 0 tp 1 dp 0"]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.10.mlp.up.weight", "model.layers.10"),
        ("1.norm.weight", "1"),
        ("embed.weight", "embed"),
        ("model.layers.3.mlp.experts.7.w1.weight", "model.layers.3"),
        ("first.deepspeed_moe.experts.deepspeed_experts.3.up.weight", "first"),
        ("", ""),
    ],
)
def test_layers_are_named_by_their_number(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def test_a_layout_without_parameters_is_possible() -> None:
    checkpoint = ckpttool.inspect(source("zero1-dp2-bf16-empty"))
    assert layout(checkpoint)["extents"] >= 0
