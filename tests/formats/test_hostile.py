"""Impossible structures: every reader reads them or raises its own error, in bounded time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

import ckpttool
from ckpttool.containers.values import TensorRef
from ckpttool.errors import CkptError
from ckpttool.formats import open_checkpoint
from tests import sampling
from tests.damage import cycle, edit, laughs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

SECONDS = 20
JUNK: dict[str, Any] = {
    "None": None,
    "text": "x" * 300,
    "negative": -1,
    "huge": 1 << 70,
    "not a number": float("nan"),
    "empty list": [],
    "empty mapping": {},
    "nested": [[[]], {"a": {}}, ("b",)],
    "mapping of junk": {7: None, None: 7, "params": "x"},
    "true": True,
}
ENDLESS: dict[str, Any] = {"laughs": laughs(), "cycle": cycle()}

PLACES = [
    ("megatron-zero2-tp2-dp2-bf16", "mp_rank_*model_states.pt", ("universal_checkpoint_info",)),
    ("megatron-zero2-tp2-dp2-bf16", "mp_rank_*model_states.pt", ("mp_world_size",)),
    ("megatron-zero2-tp2-dp2-bf16", "mp_rank_*model_states.pt", ("checkpoint_parallel_dimensions",)),
    ("megatron-zero2-tp2-dp2-bf16", "mp_rank_*model_states.pt", ("checkpoint_parallel_dimensions", "tp_degree")),
    ("autoep-zero2-dp2-ep2-bf16", "mp_rank_*model_states.pt", ("ds_autoep_layers",)),
    ("autoep-zero2-dp2-ep2-bf16", "mp_rank_*model_states.pt", ("ds_autoep_layers", 0)),
    ("autoep-zero2-dp2-ep2-bf16", "mp_rank_*model_states.pt", ("ds_autoep_layers", 0, "expert_key_prefix")),
    ("autoep-zero2-dp2-ep2-bf16", "mp_rank_*model_states.pt", ("ds_autoep_layers", 0, "expert_placement")),
    ("autoep-zero2-dp2-ep2-bf16", "mp_rank_*model_states.pt", ("ds_autoep_layers", 0, "expert_placement", "ranks")),
    (
        "autoep-zero2-dp2-ep2-bf16",
        "mp_rank_*model_states.pt",
        ("ds_autoep_layers", 0, "expert_placement", "ranks", 0, "experts"),
    ),
    (
        "autoep-zero2-dp2-ep2-bf16",
        "mp_rank_*model_states.pt",
        ("ds_autoep_layers", 0, "expert_placement", "ranks", 0, "experts", 0),
    ),
    ("autoep-zero2-dp2-ep2-bf16", "layer_0_expert_1_*.pt", ("model.layers.0.mlp.experts.w1.1",)),
    ("autoep-zero3-dp2-ep2-bf16", "*optim_states.pt", ("optimizer_state_dict", "ds_zero_partition_groups")),
    ("autoep-zero3-dp2-ep2-bf16", "*optim_states.pt", ("optimizer_state_dict", "ds_zero_partition_groups", 1)),
    (
        "autoep-zero3-dp2-ep2-bf16",
        "*optim_states.pt",
        ("optimizer_state_dict", "ds_zero_partition_groups", 1, "partition_ranks"),
    ),
    ("moe-zero2-dp4-ep2-bf16", "*optim_states.pt", ("optimizer_state_dict", "partition_count")),
    ("moe-zero2-dp4-ep2-bf16", "*optim_states.pt", ("optimizer_state_dict", "partition_count", 2)),
    ("moe-zero0-dp2-ep2-bf16", "expp_rank_*", ("optimizer",)),
    ("moe-zero0-dp2-ep2-bf16", "expp_rank_*", ("optimizer", "fp32_groups")),
    ("moe-zero0-dp2-ep2-bf16", "expp_rank_*", ("optimizer", "optimizer_state_dict")),
    ("moe-zero0-dp2-ep2-bf16", "expp_rank_*", ("optimizer", "optimizer_state_dict", "param_groups")),
    ("moe-zero0-dp2-ep2-bf16", "expp_rank_*", ("optimizer", "optimizer_state_dict", "param_groups", 2)),
    ("moe-zero0-dp2-ep2-bf16", "expp_rank_*", ("optimizer", "optimizer_state_dict", "param_groups", 2, "params")),
    ("moe-zero0-dp2-ep2-bf16", "expp_rank_*", ("optimizer", "optimizer_state_dict", "state")),
    ("zero0-dp2-fp32", "mp_rank_*", ("optimizer",)),
    ("zero0-dp2-fp32", "mp_rank_*", ("optimizer", "state")),
    ("zero0-dp2-fp32", "mp_rank_*", ("optimizer", "state", 0)),
    ("zero0-dp2-fp32", "mp_rank_*", ("optimizer", "state", 0, "exp_avg")),
    ("zero0-dp2-fp32", "mp_rank_*", ("optimizer", "param_groups", 0, "params")),
    ("zero0-dp2-fp32", "mp_rank_*", ("optimizer", "param_groups", 0, "params", 0)),
    ("zero0-dp2-fp16-unfused", "mp_rank_*", ("optimizer", "fp32_groups")),
    ("zero0-dp2-fp16-unfused", "mp_rank_*", ("optimizer", "fp32_groups", 0)),
    ("zero0-dp2-fp16-unfused", "mp_rank_*", ("optimizer", "fp32_groups", 0, 0)),
    ("zero0-dp2-fp16", "mp_rank_*", ("optimizer", "fp32_groups_flat")),
    ("zero0-dp2-fp16", "mp_rank_*", ("optimizer", "fp32_groups_flat", 0)),
    ("pipeline-zero0-pp2-dp2-bf16", "*optim_states.pt", ("optimizer_state_dict", "param_slice_mappings")),
    ("pipeline-zero0-pp2-dp2-bf16", "*optim_states.pt", ("optimizer_state_dict", "param_slice_mappings", 0)),
    ("pipeline-zero1-pp2-dp2-bf16", "layer_01*", ("up.weight",)),
    ("pipeline-zero1-pp2-dp2-bf16", "mp_rank_*", ("buffer_names",)),
    ("pipeline-zero1-pp2-dp2-bf16", "mp_rank_*", ("module",)),
    ("zero1-dp2-bf16-muon", "*optim_states.pt", ("optimizer_state_dict", "base_optimizer_state", "state", 0)),
    (
        "zero1-dp2-bf16-muon",
        "*optim_states.pt",
        ("optimizer_state_dict", "base_optimizer_state", "state", 0, "momentum_buffer"),
    ),
    ("universal-zero2-dp2-bf16", "zero/optimizer_state.pt", ("param_groups",)),
    ("universal-zero2-dp2-bf16", "zero/optimizer_state.pt", ("param_groups", 0)),
    ("universal-zero3-dp2-bf16", "zero/optimizer_state.pt", ("optimizer_state_dict",)),
    ("universal-zero3-dp2-bf16", "zero/optimizer_state.pt", ("optimizer_state_dict", "state")),
    ("universal-zero3-dp2-bf16", "zero/optimizer_state.pt", ("optimizer_state_dict", "param_groups")),
    ("universal-zero2-dp2-bf16", "zero/up.weight/fp32.pt", ("param",)),
    ("universal-zero2-dp2-bf16", "mp_rank_*", ("param_shapes",)),
    ("universal-zero2-dp2-bf16", "mp_rank_*", ("shared_params",)),
    ("universal-zero2-dp2-bf16", "mp_rank_*", ("buffer_names",)),
    ("universal-zero2-dp2-bf16", "mp_rank_*", ("dp_world_size",)),
    ("universal-megatron-zero1-tp2-dp2-bf16", "mp_rank_*", ("universal_checkpoint_info",)),
    ("universal-autoep-zero2-dp2-ep2-bf16", "mp_rank_*", ("ds_autoep_layers",)),
    ("ds0.3.16-zero2-dp2-fp16", "*optim_states.pt", ("param_shapes",)),
    ("ds0.3.16-zero2-dp2-fp16", "*optim_states.pt", ("optimizer_state_dict", "base_optimizer_state")),
    ("ds0.3.16-zero2-dp2-fp16", "*optim_states.pt", ("optimizer_state_dict", "base_optimizer_state", 0)),
    ("ds0.5.8-zero3-dp2-fp16", "*optim_states.pt", ("param_shapes",)),
]


def _ends(root: Any, place: tuple[Any, ...]) -> tuple[Any, Any]:
    """The container that holds a place, and its key there."""
    *path, last = place
    for key in path:
        root = root[key]
    assert root is not None
    root[last]
    return root, last


def _put(place: tuple[Any, ...], value: Any) -> Callable[[Any], object]:
    def change(states: Any) -> None:
        holder, key = _ends(states, place)
        holder[key] = value

    return change


def _remove(place: tuple[Any, ...]) -> Callable[[Any], object]:
    def change(states: Any) -> None:
        holder, key = _ends(states, place)
        del holder[key]

    return change


def _tag(root: Path) -> Path:
    (latest,) = root.glob("latest*")
    return root / latest.read_text()


def _assert_harmless(root: Path, what: str) -> None:
    """Reading and verifying give a result or an error of ours, soon."""
    began = time.process_time()
    try:
        open_checkpoint(str(root))
        ckpttool.verify(root)
    except CkptError as error:
        assert str(error).isprintable(), what  # noqa: PT017
    except Exception as error:  # what is tested for: no other error
        raise AssertionError(what) from error
    assert time.process_time() - began < SECONDS, what


@pytest.mark.parametrize(
    ("name", "pattern", "place"),
    sampling.some(PLACES, 20),
    ids=lambda v: ".".join(map(str, v)) if isinstance(v, tuple) else "",
)
def test_junk_at_any_place_is_harmless(
    name: str, pattern: str, place: tuple[Any, ...], checkpoint_copy: Callable[[str], Path]
) -> None:
    root = checkpoint_copy(name)
    good = {path: path.read_bytes() for path in _tag(root).glob(pattern)}
    assert good
    changes = {what: _put(place, value) for what, value in {**JUNK, **ENDLESS}.items()}
    every = {**changes, "nothing": _remove(place)}
    for what in sampling.some(every, 2, key=f"{name} {place}"):
        change = every[what]
        for path, data in good.items():
            path.write_bytes(data)
            edit(path, change)
        _assert_harmless(root, what)
    # Nor in one file of many.
    for what in sampling.some(("negative", "huge", "nested"), 1, key=f"{place}"):
        for path, data in good.items():
            path.write_bytes(data)
        edit(min(good), changes[what])
        _assert_harmless(root, what)


def _keys(root: Any) -> Iterator[tuple[Any, ...]]:
    """Every place in nested mappings and short lists."""
    items = root.items() if isinstance(root, dict) else enumerate(root[:2]) if isinstance(root, list | tuple) else ()
    for key, value in items:
        yield (key,)
        if not isinstance(value, TensorRef):
            yield from ((key, *rest) for rest in _keys(value))


@pytest.mark.parametrize(
    "name", ["megatron-zero2-tp2-dp2-bf16", "autotp-zero2-tp2-dp2-bf16-fused", "autotp-zero1-tp2-dp1-bf16-uneven"]
)
def test_junk_anywhere_in_the_slicing_metadata_is_harmless(name: str, checkpoint_copy: Callable[[str], Path]) -> None:
    root = checkpoint_copy(name)
    paths = sorted(_tag(root).glob("mp_rank_*model_states.pt"))
    found: list[tuple[Any, ...]] = []
    edit(paths[0], lambda states: found.extend(_keys(states["universal_checkpoint_info"])))
    good = paths[0].read_bytes()
    assert len(found) > 10
    for i, place in enumerate(sampling.some(found[:: max(1, len(found) // 60)], 20, key=name)):
        (what, value) = list(JUNK.items())[i % len(JUNK)]
        paths[0].write_bytes(good)
        try:
            edit(paths[0], _put(("universal_checkpoint_info", *place), value))
        except TypeError:
            continue  # inside a tuple
        _assert_harmless(root, f"{what} at {place}")
