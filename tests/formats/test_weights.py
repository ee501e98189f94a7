"""Weights-only sources: safetensors and torch files, one or many, with and without an index."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpttool
from ckpttool.errors import CkptError, LayoutError
from ckpttool.formats import open_checkpoint
from ckpttool.model import UNKNOWN_GROUP
from tests.truth import gather, raw_bytes, source, truth
from tests.wording import refused

if TYPE_CHECKING:
    from pathlib import Path

    from ckpttool.model import Checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

TENSORS = {
    "embed.weight": torch.arange(12.0).view(4, 3),
    "norm.weight": torch.full((3,), 2.0, dtype=torch.bfloat16),
    "scale": torch.tensor(5.0),
    "empty": torch.zeros(0, 3),
    "position_ids": torch.arange(5),
}


def _assert_holds(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
    states = {name: state for name, _, state in checkpoint.states()}
    assert states.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert states[name].shape == tuple(tensor.shape)
        assert gather(checkpoint, states[name]) == raw_bytes(tensor)
    assert {p.name for p in checkpoint.parameters} == {n for n, t in tensors.items() if t.is_floating_point()}
    assert {p.group for p in checkpoint.parameters} == {UNKNOWN_GROUP}


def _write(directory: Path, kind: str, parts: dict[str, dict[str, torch.Tensor]], *, index: bool) -> Path:
    directory.mkdir(exist_ok=True)
    stem, suffix = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    names = {part: f"{stem}-{part}.{suffix}" if len(parts) > 1 else f"{stem}.{suffix}" for part in parts}
    for part, tensors in parts.items():
        if kind == "safetensors":
            save_file(tensors, directory / names[part], metadata={"format": "pt"})
        else:
            torch.save(tensors, directory / names[part])
    if index:
        weight_map = {tensor: names[part] for part, tensors in parts.items() for tensor in tensors}
        (directory / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def _two(**more: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
    first = dict(list(TENSORS.items())[:2])
    second = {**dict(list(TENSORS.items())[2:]), **more}
    return {"00001-of-00002": first, "00002-of-00002": second}


KINDS = pytest.mark.parametrize("kind", ["safetensors", "torch"])


@KINDS
@pytest.mark.parametrize("index", [True, False])
def test_shards_are_one_checkpoint(kind: str, index: bool, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(_write(tmp_path / "w", kind, _two(), index=index)))
    assert checkpoint.format == kind
    assert len(checkpoint.files) == 2
    _assert_holds(checkpoint, TENSORS)


@KINDS
def test_one_file_is_read_by_its_directory_or_its_own_name(kind: str, tmp_path: Path) -> None:
    directory = _write(tmp_path / "w", kind, {"all": TENSORS}, index=False)
    (file,) = directory.iterdir()
    for place in (directory, file):
        checkpoint = open_checkpoint(str(place))
        assert [f.name for f in checkpoint.files] == [file.name]
        _assert_holds(checkpoint, TENSORS)


def test_a_file_of_any_name_is_read(tmp_path: Path) -> None:
    for name in ("x.safetensors", "weights.pt", "weights.pth", "pytorch_model.bin", "adapter.bin"):
        path = tmp_path / name
        save_file(TENSORS, path) if name.endswith("safetensors") else torch.save(TENSORS, path)
        _assert_holds(open_checkpoint(str(path)), TENSORS)


@KINDS
def test_the_index_selects_the_files(kind: str, tmp_path: Path) -> None:
    directory = _write(tmp_path / "w", kind, _two(), index=True)
    suffix = "safetensors" if kind == "safetensors" else "bin"
    (directory / f"model-00003-of-00003.{suffix}").write_bytes(b"junk")
    _assert_holds(open_checkpoint(str(directory)), TENSORS)


@KINDS
def test_a_missing_shard_is_named(kind: str, tmp_path: Path) -> None:
    directory = _write(tmp_path / "w", kind, _two(), index=True)
    gone = next(directory.glob("*00002-of-00002*"))
    gone.unlink()
    with refused(LayoutError):
        open_checkpoint(str(directory))


@KINDS
def test_a_shard_missing_without_an_index_is_noticed(kind: str, tmp_path: Path) -> None:
    directory = _write(tmp_path / "w", kind, _two(), index=False)
    next(directory.glob("*00001-of-00002*")).unlink()
    with refused(LayoutError):
        open_checkpoint(str(directory))


@KINDS
def test_a_tensor_in_two_files_is_refused(kind: str, tmp_path: Path) -> None:
    directory = _write(tmp_path / "w", kind, _two(**{"embed.weight": TENSORS["embed.weight"]}), index=False)
    with refused(LayoutError):
        open_checkpoint(str(directory))


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "7", "{", '{"weight_map": 7}',
        '{"weight_map": {"a": 7}}', '{"weight_map": {"a": "../x.safetensors"}}',
        '{"weight_map": {"a": null}}', '{"weight_map": {"a": "/etc/passwd"}}', '{"weight_map": {}}', "\udcff",
        '{"weight_map": ' + '{"a":' * 100_000,
    ],
)  # fmt: skip
def test_an_index_that_is_none_is_refused(content: str, tmp_path: Path) -> None:
    directory = _write(tmp_path / "w", "safetensors", _two(), index=True)
    (directory / "model.safetensors.index.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(CkptError):
        open_checkpoint(str(directory))


def test_tied_tensors_of_a_torch_file_are_stored_once(tmp_path: Path) -> None:
    tied = torch.arange(6.0).view(2, 3)
    view = torch.arange(8.0)
    torch.save({"embed": tied, "head": tied, "turned": tied.t(), "part": view[2:5]}, tmp_path / "pytorch_model.bin")
    checkpoint = open_checkpoint(str(tmp_path))
    assert dict(checkpoint.aliases) == {"head": "embed"}
    _assert_holds(checkpoint, {"embed": tied, "turned": tied.t(), "part": view[2:5]})


def test_a_state_dict_inside_another_mapping_is_found(tmp_path: Path) -> None:
    torch.save({"state_dict": TENSORS, "epoch": 3}, tmp_path / "x.pt")
    _assert_holds(open_checkpoint(str(tmp_path / "x.pt")), TENSORS)


def test_numbers_are_names_too(tmp_path: Path) -> None:
    torch.save({0: torch.ones(2), "a": torch.zeros(3)}, tmp_path / "pytorch_model.bin")
    _assert_holds(open_checkpoint(tmp_path), {"0": torch.ones(2), "a": torch.zeros(3)})
    torch.save({0: torch.ones(2), "0": torch.zeros(3)}, tmp_path / "pytorch_model.bin")
    with refused(LayoutError):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("inside", [{"c": torch.ones(1)}, [torch.ones(1)], torch.ones(1).numpy()])
def test_arrays_inside_other_entries_are_named(inside: Any, tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(3), "b": inside, "c": "text", "d": [1, None]}, tmp_path / "pytorch_model.bin")
    checkpoint = open_checkpoint(tmp_path)
    _assert_holds(checkpoint, {"a": torch.zeros(3)})
    (remark,) = checkpoint.remarks
    assert "the arrays inside 'b' are left out" in remark


@pytest.mark.parametrize("value", [{}, [], 7, None, {"a": 7}, torch.zeros(3), {"state_dict": {}}])
def test_a_torch_file_of_something_else_is_refused(value: Any, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "pytorch_model.bin")
    with refused(LayoutError):
        open_checkpoint(str(tmp_path))


@KINDS
@pytest.mark.parametrize("name", ["zero2-dp2-bf16", "zero3-dp4-bf16"])
def test_a_consolidated_output_is_read_again(name: str, kind: Any, tmp_path: Path) -> None:
    ckpttool.consolidate(source(name), tmp_path / "out", to=kind, max_shard_size="4kB")
    checkpoint = open_checkpoint(str(tmp_path / "out"))
    assert dict(checkpoint.aliases) == truth(name).tied
    expected = truth(name).state_dict(torch.float32)
    states = {n: s for n, _, s in checkpoint.states()}
    assert states.keys() == expected.keys()
    assert all(gather(checkpoint, states[n]) == raw_bytes(t) for n, t in expected.items())
    assert ckpttool.verify(tmp_path / "out", deep=True).findings == ()


def _shards(rank: int, directory: Path) -> None:
    """Save one tensor, cut along its rows, and one whole tensor, as each of three ranks of FSDP2 does."""
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=3)
    cut = distribute_tensor(torch.arange(21.0).view(7, 3), DeviceMesh("cpu", [0, 1, 2]), [Shard(0)])
    writer = dcp.HuggingFaceStorageWriter(str(directory / "saved"), save_distributed=True)
    dcp.save({"embed.weight": cut, "norm.weight": torch.ones(3)}, storage_writer=writer)
    torch.distributed.destroy_process_group()


def test_ranks_shards_of_distributed_safetensors_are_not_a_whole_model(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(_shards, (tmp_path,), nprocs=3, start_method="fork")
    saved = tmp_path / "saved"
    shards = sorted(saved.iterdir())
    assert [s.name for s in shards] == [f"shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2, 3)]
    for shard in shards:
        with refused(LayoutError):
            open_checkpoint(str(shard))
    for gone in shards[:2]:
        gone.unlink()
        with pytest.raises(LayoutError):
            ckpttool.consolidate(saved, tmp_path / "out", to="safetensors", allow_partial=True)
    shards[2].rename(saved / "model.safetensors")  # its offsets tell as well
    with refused(LayoutError):
        ckpttool.consolidate(saved, tmp_path / "out", to="safetensors")
    assert not (tmp_path / "out").exists()


def test_whole_safetensors_of_torchs_writer_are_read(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in TENSORS.items() if tensor.numel()}
    dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path)), no_dist=True)
    _assert_holds(open_checkpoint(str(tmp_path)), tensors)


def _files_of_ranks(rank: int, directory: Path) -> None:
    """Save files of one rank: with a DTensor, a ShardedTensor, a flat parameter of FSDP, and a buffer in each."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    spec = ChunkShardingSpec(0, placements=["rank:0/cpu", "rank:1/cpu"])
    weights = {
        "DTensor": {"w": distribute_tensor(torch.ones(4, 3), DeviceMesh("cpu", [0, 1]), [Shard(0)])},
        "ShardedTensor": {"w": sharded_tensor.zeros(spec, 4, 3)},
        "flat parameter": {"block._flat_param": torch.ones(6)},
        "sparse": {"w": torch.eye(3).to_sparse()},
    }
    for name, part in weights.items():
        torch.save({**part, "buffer": torch.ones(3)}, directory / f"{name}-{rank}.bin")
    torch.distributed.destroy_process_group()


def test_the_file_of_one_rank_is_not_a_whole_model(tmp_path: Path) -> None:
    """Its tensors of other classes were left out, and the buffers exported."""
    torch.multiprocessing.start_processes(_files_of_ranks, (tmp_path,), nprocs=2, start_method="fork")
    for name in ("DTensor", "ShardedTensor", "flat parameter", "sparse"):
        for rank in (0, 1):
            with refused(LayoutError):
                ckpttool.consolidate(tmp_path / f"{name}-{rank}.bin", tmp_path / "out", to="safetensors")
    assert not (tmp_path / "out").exists()


def test_the_work_to_verify_a_file_grows_as_its_tensors_do(tmp_path: Path) -> None:
    def calls(count: int) -> int:
        torch.save({f"p{n}": torch.zeros(1) for n in range(count)}, tmp_path / "pytorch_model.bin")
        counted = 0

        def note(*_: object) -> None:
            nonlocal counted
            counted += 1

        sys.setprofile(note)
        try:
            assert not ckpttool.verify(tmp_path, deep=True, jobs=1).findings
        finally:
            sys.setprofile(None)
        return counted

    calls(10)
    assert calls(1600) < 5 * calls(400)


def test_weights_beside_directories_with_checkpoints_are_opened(tmp_path: Path) -> None:
    ckpttool.consolidate(source("zero2-dp2-bf16"), tmp_path / "export", to="safetensors")
    for run in ("one", "two"):
        shutil.copytree(source("zero2-dp2-bf16"), tmp_path / "export" / "runs" / run)
    assert ckpttool.inspect(tmp_path / "export").format == "safetensors"


@pytest.mark.parametrize("key", ["model", "model_state_dict", "net", "state_dict"])
def test_a_state_dict_beside_other_objects_is_found(key: str, tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save({key: net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}, tmp_path / "last.pt")
    found = open_checkpoint(str(tmp_path / "last.pt"))
    _assert_holds(found, net.state_dict())
    told = "only its state dict is read: 'optimizer', 'epoch' beside it is left out"
    assert any(told in remark for remark in found.remarks) == (key != "state_dict")


def test_of_several_state_dicts_none_is_taken(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 2)
    torch.save({"model": net.state_dict(), "ema": net.state_dict()}, tmp_path / "last.pt")
    with refused(LayoutError):
        open_checkpoint(str(tmp_path / "last.pt"))


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_weights_that_zero_stage_3_had_partitioned_are_refused(kind: str, tmp_path: Path) -> None:
    tensors = {"up.weight": torch.zeros(0), "down.weight": torch.zeros(0), "norm.weight": torch.ones(3)}
    src = _write(tmp_path / "src", kind, {"1": tensors}, index=False)
    with refused(LayoutError):
        ckpttool.consolidate(src, tmp_path / "out", to="safetensors")
    (finding,) = ckpttool.verify(src).findings
    assert "holds 2 of 3 weights without elements" in str(finding)


@pytest.mark.parametrize("name", ["optimizer.bin", "optimizer_1.bin", "optimizer.pt"])
def test_an_optimizer_beside_weights_that_is_not_read_is_named(name: str, tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    torch.save({"state": {}, "param_groups": []}, tmp_path / name)
    (remark,) = open_checkpoint(str(tmp_path)).remarks
    assert remark.startswith(f"{name}: left out: the states of the optimizer")
