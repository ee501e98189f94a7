"""Deltas hold what torch finds different in the states of live engines; applied, they give the second one's bits."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.analysis.delta import differing
from ckpttool.containers import safetensors
from ckpttool.formats.delta_header import DELTA
from tests import sampling
from tests.cli.command import ckpttool as command
from tests.truth import NAMES, NUMPY, as_tensor, source, truth

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _shapes(name: str) -> dict[str, torch.Size]:
    return {n: t.shape for n, t in truth(name).state_dict(torch.float32).items()}


ALIKE = [n for n in NAMES if _shapes(n) == _shapes("zero2-dp2-bf16")]
"""Checkpoints of one model: stages 0 to 3, universal, MiCS, of old releases, several types and optimizers."""
PAIRS = [
    *itertools.pairwise(ALIKE),
    ("autotp-zero2-tp2-dp2-bf16", "autotp-zero3-tp2-dp2-bf16"),
    ("moe-zero0-dp2-ep2-bf16", "moe-zero1-dp2-ep2-bf16"),
    ("megatron-zero1-tp2-dp2-bf16", "universal-megatron-zero2-tp2-dp2-bf16"),
]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().reshape(-1).view(width)


def _assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(_bits(found[name]), _bits(tensor)), name


def _applied_by_torch(delta: Path, before: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Apply a delta as the page about its form says, with safetensors and torch alone."""
    with safe_open(delta / "delta.safetensors", framework="pt") as file:
        table = json.loads(file.metadata()[DELTA])
        stored = set(file.keys())
        result = {}
        for name in table["tensors"]:
            if name in stored:
                result[name] = file.get_tensor(name)
                continue
            result[name] = before[name].clone()
            if f"{name}.indices" in stored:
                flat = result[name].reshape(-1)
                indices = file.get_tensor(f"{name}.indices")
                assert indices.dtype == torch.int32
                flat.index_copy_(0, indices.long(), file.get_tensor(f"{name}.values"))
                result[name] = flat.reshape(result[name].shape)
    return result


def _changed(directory: Path, name: str, states: Mapping[str, torch.Tensor], seed: int, part: float = 0.02) -> Path:
    """A checkpoint in which some elements of every tensor differ."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for key, tensor in states.items():
        made[key] = tensor.clone()
        flat = made[key].reshape(-1)
        chosen = torch.rand(flat.numel(), generator=generator) < part
        flat[chosen] = (flat[chosen].float() + 1).to(flat.dtype)
    (directory / name).mkdir()
    save_file(made, directory / name / "model.safetensors")
    return directory / name


# ------------------------------------------------------------------------------------- ground truth of engines


@pytest.mark.parametrize(("number", "names"), sampling.some(enumerate(PAIRS), 9), ids=str)
def test_delta_holds_what_torch_finds_different(number: int, names: tuple[str, str], tmp_path: Path) -> None:
    dtype: Any = ("bf16", "fp32", "fp16")[number % 3]
    before, behind = (truth(n).state_dict(DTYPES[dtype]) for n in names)
    report = ckpttool.delta(
        source(names[0]), source(names[1]), tmp_path / "delta", dtype=dtype, prove=True, check="full"
    )
    expected = {n: int((_bits(before[n]) != _bits(t)).sum()) for n, t in behind.items()}
    assert report.changed == sum(expected.values())
    assert report.changed_tensors == sum(count > 0 for count in expected.values())
    assert (report.tensors, report.elements) == (len(behind), sum(t.numel() for t in behind.values()))
    _assert_same(_applied_by_torch(tmp_path / "delta", before), behind)
    applied = ckpttool.apply(source(names[0]), tmp_path / "delta", tmp_path / "out", prove=True)
    _assert_same(load_file(tmp_path / "out/model.safetensors"), behind)
    assert applied.tied == truth(names[1]).tied
    ckpttool.consolidate(source(names[1]), tmp_path / "whole", to="safetensors", dtype=dtype)
    digest = ckpttool.digest(tmp_path / "whole").weights
    assert ckpttool.digest(tmp_path / "out").weights == digest == report.digest == applied.digest


def test_masters_are_compared_in_the_type_of_the_delta(tmp_path: Path) -> None:
    """A step too small for bf16 changes all masters, and hardly any weight that is served."""
    states = truth("zero2-dp2-bf16").state_dict(torch.float32)
    ends = []
    for step, factor in enumerate((1.0, 1 + 2**-11)):
        tensors = {n: t * factor if t.is_floating_point() else t for n, t in states.items()}
        save_file(tensors, tmp_path / f"{step}.safetensors")
        ckpttool.convert(
            tmp_path / f"{step}.safetensors", tmp_path / f"z{step}", to="zero", world_size=2 + step, stage=3 - step
        )
        ends.append({n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in tensors.items()})
    fine = ckpttool.delta(tmp_path / "z0", tmp_path / "z1", tmp_path / "fine", dtype="fp32")
    coarse = ckpttool.delta(tmp_path / "z0", tmp_path / "z1", tmp_path / "coarse", dtype="bf16")
    expected = sum(int((_bits(ends[0][n]) != _bits(t)).sum()) for n, t in ends[1].items())
    assert 0 < coarse.changed == expected < fine.changed / 2
    ckpttool.apply(tmp_path / "z0", tmp_path / "coarse", tmp_path / "out")
    _assert_same(load_file(tmp_path / "out/model.safetensors"), ends[1])


def test_every_format_and_storage(s3: Any, tmp_path: Path) -> None:
    """From ZeRO in a bucket to DCP in a bucket, written to a bucket; applied to safetensors on disk, from there."""
    names = "zero3-dp4-bf16", "zero2-dp3-bf16"
    s3.upload(Path(source(names[0])), "three")
    ckpttool.convert(source(names[1]), s3.url("dcp"), to="dcp")
    report = ckpttool.delta(s3.url("three"), s3.url("dcp"), s3.url("delta"), dtype="bf16", prove=True)
    assert report.out == s3.url("delta")
    ckpttool.consolidate(source(names[0]), tmp_path / "a", to="safetensors", dtype="bf16", max_shard_size="3kB")
    ckpttool.apply(tmp_path / "a", s3.url("delta"), s3.url("out"), prove=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/model.safetensors").write_bytes(s3.get("out/model.safetensors"))
    _assert_same(load_file(tmp_path / "out/model.safetensors"), truth(names[1]).state_dict(torch.bfloat16))
    assert s3.uploads() == []


# ------------------------------------------------------------------------------------------------- chains


def _chain(tmp_path: Path) -> tuple[list[Path], list[Path]]:
    """Four checkpoints, and the deltas between neighbours."""
    states = truth("zero2-dp2-bf16").state_dict(torch.bfloat16)
    ends = [_changed(tmp_path, f"w{n}", states, n) for n in range(4)]
    deltas = [tmp_path / f"d{n}" for n in range(1, 4)]
    for before, behind, out in zip(ends, ends[1:], deltas, strict=False):
        ckpttool.delta(before, behind, out)
    return ends, deltas


def test_chain_of_deltas_gives_the_last_checkpoint(tmp_path: Path) -> None:
    ends, deltas = _chain(tmp_path)
    for count in (1, 2, 3):
        ckpttool.apply(ends[0], deltas[:count], tmp_path / f"out{count}", prove=True)
        found, expected = (load_file(p / "model.safetensors") for p in (tmp_path / f"out{count}", ends[count]))
        _assert_same(found, expected)
    ckpttool.apply(tmp_path / "out1", deltas[1:], tmp_path / "resumed")
    _assert_same(load_file(tmp_path / "resumed/model.safetensors"), load_file(ends[3] / "model.safetensors"))


def test_chain_that_is_broken_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    ends, deltas = _chain(tmp_path)
    wrong: list[tuple[list[Any], str]] = [
        ([ends[1], deltas[0]], f"{ends[1]}/model.safetensors: holds other weights than {deltas[0]}/delta.safetensors"),
        ([ends[0], deltas[1]], f"{ends[0]}/model.safetensors: holds other weights than"),
        ([ends[0], deltas[0], deltas[2]], f"{deltas[2]}/delta.safetensors: does not begin where {deltas[0]}"),
        ([ends[0], deltas[0], deltas[0]], "name the deltas in order, and none twice"),
        ([source("moe-zero0-dp2-ep2-bf16"), deltas[0]], "apply the delta to the checkpoint that it was made from"),
        ([ends[0], ends[1] / "model.safetensors"], "holds no delta that ckpttool wrote"),
        ([ends[0], ends[1]], "delta.safetensors: does not exist"),
        ([ends[0], tmp_path / "nothing"], "does not exist"),
    ]
    for arguments, expected in wrong:
        outcome = command("apply", *arguments, tmp_path / "out")
        assert outcome.code == 1
        assert expected in outcome.error
        assert not list(tmp_path.glob("out*"))


def test_delta_is_no_checkpoint(tmp_path: Path) -> None:
    _, deltas = _chain(tmp_path)
    outcome = command("inspect", deltas[0])
    assert outcome.code == 1
    assert "holds the difference between two checkpoints, not weights; apply it" in outcome.error


# ------------------------------------------------------------------------------------- tensors that come and go


def test_new_removed_and_reshaped_tensors(tmp_path: Path) -> None:
    first = {"kept": torch.arange(6.0), "gone": torch.ones(3), "wider": torch.ones(2, 2), "kind": torch.ones(2)}
    second = {
        "kept": torch.tensor([0.0, 1, 2, 3, 9, 5]), "new": torch.zeros(5), "wider": torch.ones(3, 2),
        "kind": torch.tensor([1, 2]), "kept.values": torch.ones(1), "flag": torch.tensor([True, False]),
    }  # fmt: skip
    third = {**second, "gone": torch.full((3,), 2.0), "kept": first["kept"]}
    ends = [tmp_path / f"{n}.safetensors" for n in range(3)]
    for path, tensors in zip(ends, (first, second, third), strict=True):
        save_file(tensors, path)
    report = ckpttool.delta(ends[0], ends[1], tmp_path / "d1", prove=True)
    assert set(report.removed) == {"gone", "wider", "kind"}
    assert set(report.added) == {"new", "wider", "kind", "kept.values", "flag"}
    ckpttool.delta(ends[1], ends[2], tmp_path / "d2", prove=True)
    ckpttool.delta(ends[2], ends[0], tmp_path / "back", prove=True)
    ckpttool.apply(ends[0], [tmp_path / "d1", tmp_path / "d2"], tmp_path / "out", prove=True)
    _assert_same(load_file(tmp_path / "out/model.safetensors"), third)
    everything = [tmp_path / n for n in ("d1", "d2", "back")]
    ckpttool.apply(ends[0], everything, tmp_path / "around", prove=True)
    _assert_same(load_file(tmp_path / "around/model.safetensors"), first)


def test_models_with_nothing_in_common_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "b.safetensors")
    outcome = command("delta", tmp_path / "a.safetensors", tmp_path / "b.safetensors", tmp_path / "out")
    assert outcome.code == 1
    assert "holds no tensor of a name that" in outcome.error
    assert not (tmp_path / "out").exists()


def test_equal_checkpoints_give_an_empty_delta(tmp_path: Path) -> None:
    same = source("zero2-dp2-bf16")
    report = ckpttool.delta(same, same, tmp_path / "delta")
    assert (report.changed, report.changed_tensors, report.nbytes_payload) == (0, 0, 0)
    ckpttool.apply(same, tmp_path / "delta", tmp_path / "out")
    _assert_same(load_file(tmp_path / "out/model.safetensors"), truth("zero2-dp2-bf16").state_dict(torch.bfloat16))


# ------------------------------------------------------------------------------------------------- laws

KINDS = ["F32", "BF16", "F16", "F64", "I64", "I32", "I16", "I8", "U8", "BOOL"]


@st.composite
def _pair(draw: st.DrawFn) -> tuple[NDArray[Any], NDArray[Any]]:
    """Two tensors of one shape and type that differ in some elements: any bits, -0.0 and NaN too."""
    kind = NUMPY[draw(st.sampled_from(KINDS))]
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9))
    bits = np.dtype(f"u{kind.itemsize}")
    special = [0, 1, 1 << (8 * kind.itemsize - 1), (1 << 8 * kind.itemsize) - 1]
    elements = (
        st.booleans() if kind.kind == "b" else st.sampled_from(special) | st.integers(0, (1 << 8 * kind.itemsize) - 1)
    )
    before = draw(arrays.arrays(bits, shape, elements=elements.map(int)))
    behind = before.copy()
    size = before.size
    for place in draw(st.lists(st.integers(0, size - 1), max_size=size)) if size else []:
        behind.reshape(-1)[place] = draw(elements)
    return before.view(kind), behind.view(kind)


def _write(path: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    save_file({n: as_tensor(a) for n, a in tensors.items()}, path)


@given(st.lists(_pair(), min_size=1, max_size=4))
@example([(np.array(0.0, np.float32), np.array(-0.0, np.float32))])
@example(
    [(np.full(9, 0x7FC1, np.uint16).view(ml_dtypes.bfloat16), np.full(9, 0x7FC0, np.uint16).view(ml_dtypes.bfloat16))]
)
def test_apply_undoes_delta(pairs: list[tuple[NDArray[Any], NDArray[Any]]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for side, file in enumerate(("a.safetensors", "b.safetensors")):
            _write(root / file, {f"t{n}": pair[side] for n, pair in enumerate(pairs)})
        report = ckpttool.delta(root / "a.safetensors", root / "b.safetensors", root / "delta")
        expected = [x.reshape(-1).view(f"u{x.itemsize}") != y.reshape(-1).view(f"u{y.itemsize}") for x, y in pairs]
        assert report.changed == sum(int(e.sum()) for e in expected)
        ckpttool.apply(root / "a.safetensors", root / "delta", root / "out")
        behind = load_file(root / "b.safetensors")
        _assert_same(load_file(root / "out/model.safetensors"), behind)
        _assert_same(_applied_by_torch(root / "delta", load_file(root / "a.safetensors")), behind)
        whole = sum(y.nbytes for (_, y), e in zip(pairs, expected, strict=True) if e.any())
        sparse = sum(int(e.sum()) * (4 + y.itemsize) for (_, y), e in zip(pairs, expected, strict=True))
        assert report.nbytes_payload <= min(whole, sparse) or report.whole_tensors


@given(_pair(), st.integers(1, 40))
def test_differing_elements_are_those_of_numpy(pair: tuple[NDArray[Any], NDArray[Any]], times: int) -> None:
    """Also where few words differ, which takes another way."""
    old, new = (np.ascontiguousarray(side).reshape(-1) for side in pair)
    old, new = np.tile(old, times + 1), np.concatenate([np.tile(old, times), new])
    expected = np.flatnonzero(old.view(f"u{old.itemsize}") != new.view(f"u{new.itemsize}"))
    assert np.array_equal(differing(old, new), expected)


@pytest.mark.parametrize("part", [0.0001, 0.01, 0.3])
def test_tensors_of_many_blocks(part: float, tmp_path: Path) -> None:
    """Larger than a chunk, a block of the patches and a flush of the spool; and the file is small."""
    generator = np.random.default_rng(1)
    numel = (1 << 20) + 12345
    old = generator.integers(0, 1 << 16, numel, dtype=np.uint16)
    new = old.copy()
    places = np.flatnonzero(generator.random(numel) < part)
    new[places] ^= 1
    _write(tmp_path / "a.safetensors", {"t": old.view(ml_dtypes.bfloat16)})
    _write(tmp_path / "b.safetensors", {"t": new.view(ml_dtypes.bfloat16)})
    report = ckpttool.delta(tmp_path / "a.safetensors", tmp_path / "b.safetensors", tmp_path / "delta", jobs=2)
    assert report.changed == len(places)
    assert report.nbytes_payload == 6 * len(places)
    assert report.nbytes_written <= 1.2 * report.nbytes_payload + 1024
    with safe_open(tmp_path / "delta/delta.safetensors", framework="np") as file:
        assert np.array_equal(file.get_tensor("t.indices"), places)
    ckpttool.apply(tmp_path / "a.safetensors", tmp_path / "delta", tmp_path / "out", jobs=2)
    _assert_same(load_file(tmp_path / "out/model.safetensors"), load_file(tmp_path / "b.safetensors"))


# ------------------------------------------------------------------------------------------------- damage


def _edited(delta: Path, out: Path, edit: Any) -> Path:
    """A delta with other tensors or another description."""
    with safe_open(delta / "delta.safetensors", framework="pt") as file:
        tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118  (no dictionary)
        metadata = dict(file.metadata())
    description = json.loads(metadata[DELTA])
    edit(tensors, description)
    metadata[DELTA] = json.dumps(description)
    out.mkdir()
    save_file(tensors, out / "delta.safetensors", metadata=metadata)
    return out


def _first(tensors: dict[str, torch.Tensor], suffix: str) -> str:
    return min(n for n in tensors if n.endswith(suffix) and tensors[n].numel() > 1)


def _reversed(tensors: dict[str, torch.Tensor], _: Any) -> None:
    name = _first(tensors, ".indices")
    tensors[name] = tensors[name].flip(0).contiguous()


def _beyond(tensors: dict[str, torch.Tensor], _: Any) -> None:
    tensors[_first(tensors, ".indices")][-1] = 1 << 30


def _negative(tensors: dict[str, torch.Tensor], _: Any) -> None:
    tensors[_first(tensors, ".indices")][0] = -1


def _shorter(tensors: dict[str, torch.Tensor], _: Any) -> None:
    name = _first(tensors, ".values")
    tensors[name] = tensors[name][1:].clone()


def _other_type(tensors: dict[str, torch.Tensor], _: Any) -> None:
    name = _first(tensors, ".values")
    tensors[name] = tensors[name].float()


def _other_value(tensors: dict[str, torch.Tensor], _: Any) -> None:
    tensors[_first(tensors, ".values")][0] += 1


def _stray(tensors: dict[str, torch.Tensor], _: Any) -> None:
    tensors["stray"] = torch.ones(1)


def _half(tensors: dict[str, torch.Tensor], _: Any) -> None:
    del tensors[_first(tensors, ".indices")]


def _newer(_: Any, description: dict[str, Any]) -> None:
    description["version"] = 2


def _broken(_: Any, description: dict[str, Any]) -> None:
    description["tensors"] = {"x": {"dtype": "F32", "shape": [-1]}}


def _huge(tensors: dict[str, torch.Tensor], description: dict[str, Any]) -> None:
    name = _first(tensors, ".indices").removesuffix(".indices")
    description["tensors"][name]["shape"] = [1 << 61, 1 << 61]


def _deep(_: Any, description: dict[str, Any]) -> None:
    next(iter(description["tensors"].values()))["shape"] = [1] * 100


def _without(_: Any, description: dict[str, Any]) -> None:
    del description["ends"]


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (_reversed, "do not ascend, or lie outside"),
        (_beyond, "do not ascend, or lie outside"),
        (_negative, "do not ascend, or lie outside"),
        (_shorter, "that do not fit each other or its type"),
        (_other_type, "that do not fit each other or its type"),
        (_other_value, "leads to other weights than it records"),
        (_stray, "holds stray, which belongs to no tensor of its description"),
        (_half, "which belongs to no tensor of its description"),
        (_newer, "is a delta of version 2; update ckpttool"),
        (_broken, "its description of the delta is damaged"),
        (_huge, "elements, more than any tensor before it has"),
        (_deep, "its description of the delta is damaged"),
        (_without, "its description of the delta is damaged"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_damaged_delta_is_refused_before_anything_is_written(edit: Any, expected: str, tmp_path: Path) -> None:
    states = truth("zero2-dp2-bf16").state_dict(torch.bfloat16)
    save_file(states, tmp_path / "a.safetensors")
    ckpttool.delta(tmp_path / "a.safetensors", _changed(tmp_path, "b", states, 1, 0.05), tmp_path / "delta")
    damaged = _edited(tmp_path / "delta", tmp_path / "damaged", edit)
    outcome = command("apply", tmp_path / "a.safetensors", damaged, tmp_path / "out")
    assert outcome.code == 1
    assert f"{damaged}/delta.safetensors" in outcome.error
    assert expected in outcome.error
    assert not list(tmp_path.glob("out*"))


# ------------------------------------------------------------------------------------------------- the command


def test_dry_run_writes_nothing_and_tells_the_same(tmp_path: Path) -> None:
    arguments = source("zero2-dp2-bf16"), source("zero3-dp4-bf16"), tmp_path / "out"
    planned = json.loads(command("delta", *arguments, "--dry-run", "--json").stdout)
    assert list(tmp_path.iterdir()) == []
    done = json.loads(command("delta", *arguments, "--json").stdout)
    same = ("changed", "changed_tensors", "whole_tensors", "nbytes_payload", "begins", "ends", "elements", "dtype")
    assert {k: planned[k] for k in same} == {k: done[k] for k in same}
    applied = source("zero2-dp2-bf16"), tmp_path / "out", tmp_path / "weights"
    dry = json.loads(command("apply", *applied, "--dry-run", "--json").stdout)
    assert not (tmp_path / "weights").exists()
    assert dry["files"] == json.loads(command("apply", *applied, "--json").stdout)["files"]


def test_text_of_both_commands(tmp_path: Path) -> None:
    shown = command("delta", source("zero2-dp2-bf16"), source("zero3-dp4-bf16"), tmp_path / "out", "--prove")
    assert "elements differ in bf16" in shown.stdout
    assert f"{tmp_path}/out/delta.safetensors: wrote" in shown.stdout
    assert "the same of B and of the delta applied to A" in shown.stdout
    shown = command("apply", source("zero2-dp2-bf16"), tmp_path / "out", tmp_path / "weights")
    assert "with 1 delta applied" in shown.stdout


def test_progress_goes_on_over_both_phases(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    ckpttool.delta(
        source("zero2-dp2-bf16"), source("zero3-dp4-bf16"), tmp_path / "d", progress=lambda *seen: told.append(seen)
    )
    _assert_whole(told, tmp_path / "d/delta.safetensors")
    told.clear()
    ckpttool.apply(source("zero2-dp2-bf16"), tmp_path / "d", tmp_path / "out", progress=lambda *seen: told.append(seen))
    _assert_whole(told, tmp_path / "out/model.safetensors")


def _assert_whole(told: list[tuple[int, int]], file: Path) -> None:
    """Bytes done never decrease, and at the end only the header, which is no work, is left."""
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    done, total = told[-1]
    assert total - done == 8 + int.from_bytes(file.read_bytes()[:8], "little")


def test_output_that_exists_is_refused(tmp_path: Path) -> None:
    pair = source("zero2-dp2-bf16"), source("zero3-dp4-bf16")
    ckpttool.delta(*pair, tmp_path / "out")
    before = (tmp_path / "out/delta.safetensors").read_bytes()
    assert command("delta", *reversed(pair), tmp_path / "out").code == 1
    assert (tmp_path / "out/delta.safetensors").read_bytes() == before
    ckpttool.delta(pair[1], pair[0], tmp_path / "out", overwrite=True)
    assert (tmp_path / "out/delta.safetensors").read_bytes() != before


def test_metadata_names_what_other_readers_look_for(tmp_path: Path) -> None:
    states = truth("zero2-dp2-bf16").state_dict(torch.bfloat16)
    save_file(states, tmp_path / "a.safetensors")
    report = ckpttool.delta(tmp_path / "a.safetensors", _changed(tmp_path, "b", states, 1, 0.05), tmp_path / "delta")
    from ckpttool.storage import LOCAL

    with LOCAL.open(str(tmp_path / "delta/delta.safetensors")) as reader:
        entries, metadata = safetensors.parse(reader)
    assert metadata["sparse"] == "True"
    assert math.isclose(float(metadata["sparsity"]), 1 - report.changed / report.elements, abs_tol=1e-5)
    names = json.loads(metadata["changed_params"])
    assert len(names) == report.changed_tensors
    assert set(entries) <= {n + suffix for n in names for suffix in ("", ".indices", ".values")}


def test_sidecars_come_with_the_result(tmp_path: Path) -> None:
    trained = source("zero2-dp2-bf16-trainer")
    ckpttool.delta(trained, source("zero3-dp2-bf16-trainer"), tmp_path / "delta", dtype="bf16")
    report = ckpttool.apply(trained, tmp_path / "delta", tmp_path / "out")
    assert "config.json" in report.companions
    assert json.loads((tmp_path / "out/config.json").read_text()).get("dtype", "bfloat16") == "bfloat16"
    shutil.rmtree(tmp_path / "out")
