"""Whole tensors from tensor-parallel slices: every entry of universal_checkpoint_info, and false ones."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from ckpttool.containers.values import Opaque
from ckpttool.errors import LayoutError
from ckpttool.formats.fields import Fields
from ckpttool.formats.zero.tensor_parallel import TensorParallel, merge
from tests.formats.layouts import Disk, counted
from tests.truth import gathered
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from ckpttool.formats.zero.files import ZeroFiles

SECONDS = 10


def _rules(info: Any, ranks: int = 2) -> TensorParallel:
    file = SimpleNamespace(path="run/model.pt", fields=Fields("run/model.pt", "", {"universal_checkpoint_info": info}))
    files = cast("list[ZeroFiles]", [SimpleNamespace(model=[file], optimizer=[]) for _ in range(ranks)])
    return TensorParallel(files)


def _merged(info: Any, slices: Sequence[NDArray[Any]], directory: Path) -> NDArray[Any]:
    """What the slices of "layer.weight" make."""
    cut = _rules(info, len(slices)).cut("layer.weight", [s.shape for s in slices])
    disk = Disk(directory, 2)
    state, _ = merge(cut, [disk.store(s, "F32", [s.size // 3]) for s in slices])
    disk.sources().close()
    return np.frombuffer(gathered(disk.paths, state), np.float32).reshape(state.shape)


WHOLE = counted((6, 4))
ROWS, COLUMNS = np.split(WHOLE, [4]), np.split(WHOLE, [1], axis=1)


def _parts(*widths: Sequence[int], whole: NDArray[Any] = WHOLE, dim: int = 0) -> list[NDArray[Any]]:
    """Slices of parts that are cut one by one: ``widths`` of each part on each rank."""
    edges = np.cumsum([0, *(n for part in widths for n in part)])
    pieces = [whole.take(range(a, b), axis=dim) for a, b in itertools.pairwise(edges)]
    ranks = len(widths[0])
    return [np.concatenate(pieces[rank::ranks], axis=dim) for rank in range(ranks)]


def _sub(shape: Any, dim: int = 0) -> dict[str, Any]:
    return {"parameter_with_sub_params": [{"patterns": ["layer.*"], "shape": shape, "partition_dim": dim}]}


@pytest.mark.parametrize(
    ("info", "slices", "whole"),
    [
        ({"x": 1}, ROWS, WHOLE),
        ({"parameter_with_row_parallelism_patterns": [r"layer\.weight"]}, COLUMNS, WHOLE),
        ({"parameter_with_row_parallelism_patterns": [r"^layer\.weight$"]}, COLUMNS, WHOLE),
        ({"parameter_with_row_parallelism_patterns": ["other", "^layer_weight$"]}, ROWS, WHOLE),
        ({"tp_replicated_parameter_patterns": ["layer.*"]}, [WHOLE, WHOLE], WHOLE),
        ({"parameter_with_2_sub_params_cat_dim_0": ["layer"]}, _parts([1, 1], [1, 1], whole=WHOLE[:4]), WHOLE[:4]),
        (_sub([3, 4]), _parts([1, 1], [1, 1], [1, 1]), WHOLE),
        (_sub([[2, 4], 4]), _parts([1, 1], [2, 2]), WHOLE),
        (_sub([[4, 2], -1]), _parts([2, 2], [1, 1]), WHOLE),
        (_sub([6, [2, 2]], dim=1), _parts([1, 1], [1, 1], dim=1), WHOLE),
        ({**_sub([[3, 3], 4]), "sub_param_shard_widths": {"layer.*": [[2, 1], [1, 2]]}}, _parts([2, 1], [1, 2]), WHOLE),
        (
            {"vocabulary_parameter_patterns": ["layer"], "original_vocab_size": 5},
            ROWS,
            WHOLE[:5],
        ),
        ({"autotp_unsupported_parameter_patterns": ["other"]}, ROWS, WHOLE),
        ({"universal_checkpoint_version": 0.4}, ROWS, WHOLE),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, dict) else "",
)
def test_slices_make_the_whole(
    info: dict[str, Any], slices: list[NDArray[Any]], whole: NDArray[Any], tmp_path: Path
) -> None:
    assert np.array_equal(_merged(info, slices, tmp_path), whole)


def test_a_sub_param_may_be_the_object_that_deepspeed_pickles(tmp_path: Path) -> None:
    entry = Opaque("deepspeed.checkpoint", "SubparamShape", "new")
    entry.state = {"patterns": ["layer.*"], "shape": ((2, 4), 4), "partition_dim": 0}
    assert np.array_equal(_merged({"parameter_with_sub_params": [entry]}, _parts([1, 1], [2, 2]), tmp_path), WHOLE)


def test_a_flat_slice_is_seen_in_the_shape_that_is_recorded(tmp_path: Path) -> None:
    whole = counted((2, 6, 2))
    slices = [s.reshape(-1) for s in _parts([1, 1], [2, 2], whole=whole, dim=1)]
    assert np.array_equal(_merged(_sub([2, [2, 4], 2], dim=1), slices, tmp_path), whole)


def test_copies_that_may_drift_apart_count_by_their_mean(tmp_path: Path) -> None:
    cut = _rules({"parameter_to_average_patterns": ["layer"]}).cut("layer.weight", [(2, 3), (2, 3)])
    disk = Disk(tmp_path, 1)
    states = [disk.store(counted((2, 3)) * n, "F32") for n in (1, 3)]
    state, pairs = merge(cut, states)
    assert len(state.mean_with) == 1
    assert not pairs


def test_copies_that_may_not_differ_are_compared(tmp_path: Path) -> None:
    cut = _rules({"tp_replicated_parameter_patterns": ["layer"]}, 3).cut("layer.weight", [(2, 3)] * 3)
    disk = Disk(tmp_path, 1)
    _, pairs = merge(cut, [disk.store(counted((2, 3)) * n, "F32") for n in (1, 2, 3)])
    disk.sources().close()
    held = [[np.frombuffer(gathered(disk.paths, s), np.float32).tolist()[-1] for s in pair] for pair in pairs]
    assert held == [[6.0, 12.0], [6.0, 18.0]]


# ------------------------------------------------------------------------------------------------- affine maps


def _piece(shape: list[int], source: Any, dest: Any, **more: Any) -> dict[str, Any]:
    return {"shape": shape, "source": source, "dest": dest, "scale": None, "locations": [], **more}


def _affine(*ranks: list[dict[str, Any]], shard: list[int], whole: list[int], name: str = "^layer\\.weight$") -> Any:
    entry = {"logical_shape": whole, "ranks": {r: {"shard_shape": shard, "pieces": p} for r, p in enumerate(ranks)}}
    return {"affine_map": {"version": 1, "params": {name: entry}}}


HALVES = _affine(
    [_piece([6, 2], (0, [4, 1]), (0, [2, 1]))],
    [_piece([6, 2], (2, [4, 1]), (0, [2, 1]))],
    shard=[6, 2],
    whole=[6, 4],
)


def test_an_affine_map_places_strided_pieces(tmp_path: Path) -> None:
    assert np.array_equal(_merged(HALVES, np.split(WHOLE, 2, axis=1), tmp_path), WHOLE)


def test_an_affine_map_of_three_dimensions_places_every_row(tmp_path: Path) -> None:
    whole = counted((2, 3, 4))
    info = _affine(
        [_piece([2, 3, 2], (0, [12, 4, 1]), (0, [6, 2, 1]))],
        [_piece([2, 3, 2], (2, [12, 4, 1]), (0, [6, 2, 1]))],
        shard=[2, 3, 2],
        whole=[2, 3, 4],
    )
    assert np.array_equal(_merged(info, np.split(whole, 2, axis=2), tmp_path), whole)


def test_replicas_in_an_affine_map_are_compared() -> None:
    info = _affine(
        [_piece([6, 4], (0, [4, 1]), (0, [4, 1]), locations=[0, 1])],
        [_piece([6, 4], (0, [4, 1]), (0, [4, 1]), locations=[0, 1])],
        shard=[6, 4],
        whole=[6, 4],
    )
    cut = _rules(info).cut("layer.weight", [(6, 4), (6, 4)])
    assert [len(b) for b in cut.boxes] == [1, 0]
    assert len(cut.copies) == 1


def _change(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda piece: piece.update({key: value})


@pytest.mark.parametrize(
    "change",
    [
        _change("shape", [6, 3]),
        _change("shape", [1 << 40, 1 << 40, 2]),
        _change("shape", [-6, 2]),
        _change("shape", "six"),
        _change("shape", None),
        _change("shape", [[6], 2]),
        _change("source", (1 << 70, [4, 1])),
        _change("source", (-1, [4, 1])),
        _change("source", (0, [-4, 1])),
        _change("source", (0, [1 << 70, 1])),
        _change("source", (0, [])),
        _change("source", 7),
        _change("dest", (3, [2, 1])),
        _change("dest", (0, [3, 1])),
        _change("dest", (0, [2, 1.5])),
        _change("dest", (float("nan"), [2, 1])),
        _change("scale", 0.5),
        _change("scale", []),
        _change("locations", 5),
        _change("locations", ["a"]),
    ],
)
def test_a_piece_of_an_affine_map_that_does_not_fit_is_refused(change: Callable[[dict[str, Any]], None]) -> None:
    info = _affine([_piece([6, 2], (0, [4, 1]), (0, [2, 1]))], [], shard=[6, 2], whole=[6, 4])
    change(info["affine_map"]["params"]["^layer\\.weight$"]["ranks"][0]["pieces"][0])
    began = time.process_time()
    with refused(LayoutError):
        _rules(info).cut("layer.weight", [(6, 2), (6, 2)])
    assert time.process_time() - began < SECONDS


def test_an_affine_map_of_very_many_pieces_is_read_soon() -> None:
    piece = _piece([1], (0, [1]), (0, [1]))
    info = _affine([piece] * 300_000, [], shard=[6, 2], whole=[6, 4])
    began = time.process_time()
    with pytest.raises(LayoutError):
        _rules(info).cut("layer.weight", [(6, 2), (6, 2)])
    assert time.process_time() - began < SECONDS


# ------------------------------------------------------------------------------------------------- lies


@pytest.mark.parametrize(
    ("info", "shapes", "message"),
    [
        ({"tp_replicated_parameter_patterns": ["layer"]}, [(2,), (3,)], "every rank holds all of layer.weight"),
        ({"parameter_to_average_patterns": ["layer"]}, [(2,), (3,)], "every rank holds all of layer.weight"),
        ({"parameter_with_2_sub_params_cat_dim_0": ["layer"]}, [(3, 2), (4, 2)], "has two halves"),
        ({"parameter_with_2_sub_params_cat_dim_0": ["layer"]}, [(), ()], "has two halves"),
        ({"parameter_with_row_parallelism_patterns": ["layer"]}, [(3,), (3,)], "cut along dimension 1"),
        ({"parameter_with_row_parallelism_patterns": ["layer"]}, [(3, 1), (2, 1)], "cut along dimension 1"),
        ({"x": 1}, [(2, 3), (2, 4)], "cut along dimension 0"),
        ({"x": 1}, [(2, 3), (2,)], "cut along dimension 0"),
        ({"x": 1}, [(), ()], "cut along dimension 0"),
        ({"tp_replicated_parameter_patterns": ["layer", "layer.*"]}, [(2,), (2,)], "twice in tp_replicated"),
        ({"tp_replicated_parameter_patterns": "layer"}, [(2,), (2,)], "that is not a list"),
        ({"tp_replicated_parameter_patterns": 7}, [(2,), (2,)], "that is not a list"),
        ({"tp_replicated_parameter_patterns": [7]}, [(2,), (2,)], "a pattern that is not text"),
        ({"tp_replicated_parameter_patterns": ["("]}, [(2,), (2,)], "an invalid pattern"),
        ({"tp_replicated_parameter_patterns": ["(a+)+$"]}, [(2,), (2,)], "that could take unlimited time"),
        ({"tp_replicated_parameter_patterns": ["(a|a)*" * 400]}, [(2,), (2,)], "that could take unlimited time"),
        ({"tp_replicated_parameter_patterns": ["a{99999999999}"]}, [(2,), (2,)], "an invalid pattern"),
        ({"vocabulary_parameter_patterns": ["layer"]}, [(2, 2), (2, 2)], "None rows of vocabulary"),
        (
            {"vocabulary_parameter_patterns": ["layer"], "original_vocab_size": 5},
            [(2, 2), (2, 2)],
            "5 rows of vocabulary",
        ),
        (
            {"vocabulary_parameter_patterns": ["layer"], "original_vocab_size": -1},
            [(2, 2), (2, 2)],
            "-1 rows of vocabulary",
        ),
        (
            {"vocabulary_parameter_patterns": ["layer"], "original_vocab_size": "x" * 9999},
            [(2, 2), (2, 2)],
            "rows of vocabulary",
        ),
        (
            {"autotp_unsupported_parameter_patterns": {"layer": "odd"}},
            [(2,), (2,)],
            r"layer.weight unsupported \('odd'\)",
        ),
        ({"autotp_unsupported_parameter_patterns": ["layer"]}, [(2,), (2,)], "layer.weight unsupported"),
        (_sub([5, 4]), [(3, 4), (3, 4)], "5 equal sub-parameters"),
        (_sub([0, 4]), [(3, 4), (3, 4)], "0 equal sub-parameters"),
        (_sub([-3, 4]), [(3, 4), (3, 4)], "-3 equal sub-parameters"),
        (_sub([1 << 70, 4]), [(3, 4), (3, 4)], "equal sub-parameters"),
        (_sub([[3, 3], 4]), [(3, 4), (3, 4)], "does not say how wide"),
        (_sub([[2, 2], 4]), [(3, 4), (3, 4)], "sees layer.weight as"),
        (_sub([[2, -2], 4]), [(3, 4), (3, 4)], "layer.weight"),
        (_sub([[1 << 40, 4], 4]), [(3, 4), (3, 4)], "layer.weight"),
        (_sub([["a", 4], 4]), [(3, 4), (3, 4)], "layer.weight"),
        (_sub([None, 4]), [(3, 4), (3, 4)], "layer.weight"),
        (_sub([3.5, 4]), [(3, 4), (3, 4)], "layer.weight"),
        (_sub("abc"), [(3, 4), (3, 4)], "sub-parameters along dimension 0 of 'abc'"),
        (_sub([3, 4], dim=2), [(3, 4), (3, 4)], "sub-parameters along dimension 2"),
        (_sub([3, 4], dim=-1), [(3, 4), (3, 4)], "parameter_with_sub_params that cannot be read"),
        ({"parameter_with_sub_params": [7]}, [(3, 4), (3, 4)], "parameter_with_sub_params that cannot be read"),
        ({"parameter_with_sub_params": 7}, [(3, 4), (3, 4)], "describes layer.weight in an unreadable form"),
        ({**_sub([[3, 3], 4]), "sub_param_shard_widths": 7}, [(3, 4), (3, 4)], "sub_param_shard_widths|layer.weight"),
        (
            {**_sub([[3, 3], 4]), "sub_param_shard_widths": {"layer.*": 7}},
            [(3, 4), (3, 4)],
            "layer.weight",
        ),
        (
            {**_sub([[3, 3], 4]), "sub_param_shard_widths": {"layer.*": [["a", "b"], None]}},
            [(3, 4), (3, 4)],
            "layer.weight",
        ),
        (
            {**_sub([[3, 3], 4]), "sub_param_shard_widths": {"layer.*": [[4, -1], [-1, 4]]}},
            [(3, 4), (3, 4)],
            "layer.weight",
        ),
        (
            {**_sub([[3, 3], 4]), "sub_param_shard_widths": {"layer.*": [[2, 2], [1, 2]]}},
            [(3, 4), (3, 4)],
            "widths",
        ),
        ({**_sub([[2, 4], 4]), "universal_checkpoint_version": 0.4}, [(3, 4), (3, 4)], "does not say how wide"),
        (_affine([], [], shard=[6, 2], whole=[6, 4], name="("), [(6, 2), (6, 2)], "an invalid pattern"),
        (_affine([], shard=[6, 2], whole=[6, 4]), [(6, 2), (6, 2)], "does not fit 2 ranks"),
        (_affine([], [], shard=[6, 3], whole=[6, 4]), [(6, 2), (6, 2)], "but the shape is"),
        (_affine([], [], shard=[6, 2], whole=[-6, 4]), [(6, 2), (6, 2)], "does not fit 2 ranks"),
        ({"affine_map": {"version": 1, "params": 7}}, [(2,), (2,)], "affine_map"),
        ({"affine_map": {"version": 1, "params": {"layer": 7}}}, [(2,), (2,)], "layer.weight"),
        (
            {"affine_map": {"version": 1, "params": {"layer": {"logical_shape": [2], "ranks": {0: 1, 1: 2}}}}},
            [(2,), (2,)],
            "describes layer.weight in an unreadable form",
        ),
    ],
)
def test_metadata_that_contradicts_the_slices_is_refused(
    info: Any, shapes: list[tuple[int, ...]], message: str
) -> None:
    began = time.process_time()
    with pytest.raises(LayoutError, match=message) as caught:
        _rules(info).cut("layer.weight", shapes)
    assert caught.value.path == "run/model.pt"
    assert time.process_time() - began < SECONDS


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (None, "no file records how parameters are sliced"),
        ({}, "no file records how parameters are sliced"),
        ("text", "no file records how parameters are sliced"),
        ({"universal_checkpoint_version": 0.5}, "has version 0.5"),
        ({"universal_checkpoint_version": "0.2"}, "has version '0.2'"),
        ({"universal_checkpoint_version": float("nan")}, "has version nan"),
        ({"affine_map": {"version": 2}}, "an affine map of version 2"),
        ({"affine_map": {}}, "an affine map of version None"),
    ],
)
def test_what_cannot_be_known_is_refused(info: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        _rules(info)


@pytest.mark.parametrize(
    "pattern", ["(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)X", "(a|aa)*b", "(?:a|a)+$", "(.*,){25}X", "((a*)*)*"]
)
def test_no_pattern_takes_for_ever(pattern: str) -> None:
    began = time.process_time()
    rules = _rules({"tp_replicated_parameter_patterns": [pattern]})
    name = "a" * 60 + ",!"
    try:
        rules.cut(name, [(2,), (2,)])
    except LayoutError as error:
        assert "take unlimited time" in error.problem  # noqa: PT017
    assert time.process_time() - began < SECONDS
