"""Distributed checkpoints written by ``torch.distributed.checkpoint``, and damaged ones."""

from __future__ import annotations

import dataclasses
import io
import itertools
import os
import pickle
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)

import ckpttool
from ckpttool.budget import MEMORY
from ckpttool.checksums import of_bytes
from ckpttool.commit.manifest import Manifest
from ckpttool.containers import torch_file, unpickler
from ckpttool.errors import CkptError, LayoutError, PlanError
from ckpttool.formats import open_checkpoint
from ckpttool.formats.strided import boxes_of, merge_slices
from ckpttool.model import UNKNOWN_GROUP, ScalarState
from ckpttool.storage import MANIFEST
from tests.formats.layouts import Disk, counted
from tests.truth import gather, gathered, raw_bytes
from tests.wording import refused

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
SECONDS = 20


def _save(state: dict[str, Any], directory: Path) -> Path:
    dcp.save(state, checkpoint_id=str(directory), no_dist=True)
    return directory


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3, bias=False))


@pytest.fixture
def saved(model: torch.nn.Module, tmp_path: Path) -> Path:
    """A model and its optimizer after a step, by their full names."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 7)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    return _save({"model": weights, "optimizer": states, "epoch": 3}, tmp_path / "saved")


def test_every_tensor_of_model_and_optimizer_is_there(model: torch.nn.Module, saved: Path) -> None:
    checkpoint = open_checkpoint(str(saved))
    assert checkpoint.format == "dcp"
    assert checkpoint.stage is None
    states = {f"{key}/{name}": state for name, key, state in checkpoint.states()}
    expected = {f"fp32/{n}": p for n, p in model.named_parameters()}
    for name, buffer in model.named_buffers():
        expected[f"{'module' if buffer.is_floating_point() else 'buffer'}/{name}"] = buffer
    moments = {k: v for k, v in states.items() if not k.startswith(("fp32/", "module/", "buffer/"))}
    assert {k.partition("/")[0] for k in moments} == {"exp_avg", "exp_avg_sq"}
    assert {k.partition("/")[2] for k in moments} == {n for n, _ in model.named_parameters()}
    assert states.keys() - moments.keys() == expected.keys()
    for key, tensor in expected.items():
        assert states[key].shape == tuple(tensor.shape)
        assert gather(checkpoint, states[key]) == raw_bytes(tensor.detach())
    loaded = {"model": {n: torch.zeros_like(t) for n, t in model.state_dict().items()}}
    dcp.load(loaded, checkpoint_id=str(saved), no_dist=True)
    for name, tensor in loaded["model"].items():
        key = next(f"{kind}/{name}" for kind in ("fp32", "module", "buffer") if f"{kind}/{name}" in states)
        assert gather(checkpoint, states[key]) == raw_bytes(tensor)


def _optimizer(model: torch.nn.Module, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A model's weights, and states as torch saves them of an optimizer with two groups."""
    named = dict(model.named_parameters())
    matrices = [p for p in named.values() if p.dim() > 1]
    rest = [p for p in named.values() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "lr": 0.5}, {"params": rest, "weight_decay": 0.0}])
    model(torch.randn(4, 7)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    for name, step in changes.items():
        states["state"][name.replace("_", ".")]["step"] = torch.tensor(float(step))
    return weights, states


def test_the_optimizers_groups_are_known_by_name(model: torch.nn.Module, tmp_path: Path) -> None:
    weights, states = _optimizer(model)
    checkpoint = open_checkpoint(str(_save({"model": weights, "optim": states, "epoch": 3}, tmp_path / "x")))
    assert [list(g.parameters) for g in checkpoint.groups] == [g["params"] for g in states["param_groups"]]
    for group, kept in zip(checkpoint.groups, states["param_groups"], strict=True):
        assert group.hyperparameters == {k: v for k, v in kept.items() if k != "params"}
        assert group.scalars == {"step": ScalarState(1.0, "F32")}
    assert checkpoint.step == 1
    assert checkpoint.client_state == {"epoch": 3}
    assert [p.name for p in checkpoint.parameters if p.frozen] == ["1.running_mean", "1.running_var"]


def test_a_weight_that_may_be_tied_is_noted(tmp_path: Path) -> None:
    """torch writes a tied weight under both names, and its states under the first."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model[1].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()
    states = get_state_dict(model, optimizer)[1]
    model[2].bias.requires_grad_(False)
    del states["state"]["2.bias"]
    model[2].bias.copy_(model[0].bias.detach())
    checkpoint = open_checkpoint(str(_save({"model": model.state_dict(), "optim": states}, tmp_path / "x")))
    assert [p.name for p in checkpoint.parameters if p.frozen] == ["1.weight", "2.weight", "2.bias"]
    tied = "2.weight has no states and the bytes of 0.weight: it counts as frozen, or the model ties them"
    assert [note for note in checkpoint.remarks if "bytes" in note] == [tied]


def test_groups_of_numbers_are_left_alone(model: torch.nn.Module, tmp_path: Path) -> None:
    weights, states = _optimizer(model)
    states["param_groups"][0]["params"] = [0, 1]
    checkpoint = open_checkpoint(str(_save({"model": weights, "optim": states}, tmp_path / "x")))
    assert checkpoint.groups == ()
    assert {p.group for p in checkpoint.parameters} == {UNKNOWN_GROUP}
    states["param_groups"][0]["params"] = states["param_groups"][1]["params"]
    twice = open_checkpoint(str(_save({"model": weights, "optim": states}, tmp_path / "y")))
    assert twice.groups == ()


def test_different_steps_in_a_group_are_reported_and_not_merged(model: torch.nn.Module, tmp_path: Path) -> None:
    weights, states = _optimizer(model, **{"0_weight": 7})
    saved = _save({"model": weights, "optim": states}, tmp_path / "x")
    checkpoint = open_checkpoint(str(saved))
    assert checkpoint.of_one_layout == ("group 0: step, which differs among its parameters",)
    steps = {p.name: checkpoint.numbers(p)["step"].value for p in checkpoint.parameters if not p.frozen}
    assert steps == {**dict.fromkeys(steps, 1.0), "0.weight": 7.0}
    assert len(checkpoint.groups) == 2
    with refused(PlanError):
        ckpttool.convert(saved, tmp_path / "out", to="zero", world_size=1, stage=1, dtype="bf16")


def test_groups_at_different_steps_leave_the_step_unknown(model: torch.nn.Module, tmp_path: Path) -> None:
    weights, states = _optimizer(model)
    for name in states["param_groups"][0]["params"]:
        states["state"][name]["step"] = torch.tensor(7.0)
    checkpoint = open_checkpoint(str(_save({"model": weights, "optim": states}, tmp_path / "x")))
    assert [group.scalars["step"].value for group in checkpoint.groups] == [7.0, 1.0]
    assert checkpoint.step is None


def test_it_is_sound_and_becomes_safetensors(model: torch.nn.Module, saved: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    assert ckpttool.verify(saved, deep=True).findings == ()
    ckpttool.consolidate(saved, tmp_path / "out", to="safetensors")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == model.state_dict().keys()
    assert all(torch.equal(written[n], t) for n, t in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8])
def test_tensors_of_any_type_and_shape_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(3).to(dtype),
        "empty": torch.zeros(0, 4, dtype=dtype),
        "transposed": torch.arange(12).view(3, 4).to(dtype).t(),
        "deep": torch.arange(16).view(2, 2, 2, 2).to(dtype),
    }
    checkpoint = open_checkpoint(str(_save(tensors, tmp_path / "x")))
    held = {name: state for name, _, state in checkpoint.states()}
    assert held.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert held[name].shape == tuple(tensor.shape)
        assert gather(checkpoint, held[name]) == raw_bytes(tensor)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), st.data())
def test_chunks_cut_along_every_dimension_make_the_tensor(shape: tuple[int, ...], data: st.DataObject) -> None:
    tensor = counted(shape)
    cuts = [
        [0, *sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=2) if n > 1 else st.just(set()))), n]
        for n in shape
    ]
    with tempfile.TemporaryDirectory() as directory:
        disk = Disk(Path(directory), 2)
        parts = []
        for chunk in itertools.product(*(itertools.pairwise(c) for c in cuts)):
            held = tensor[tuple(slice(a, b) for a, b in chunk)]
            borders = data.draw(st.lists(st.integers(0, held.size), max_size=2))
            offsets = tuple(a for a, _ in chunk)
            parts.append((disk.store(held, "F32", borders), boxes_of(offsets, held.shape, shape)))
        state = merge_slices(parts, shape)
        disk.sources().close()
        assert gathered(disk.paths, state) == tensor.tobytes()


# ------------------------------------------------------------------------------------------------- damage


def _metadata(saved: Path, change: Callable[[Any], object]) -> None:
    """Change the description of all files."""
    path = saved / ".metadata"
    value = pickle.loads(path.read_bytes())
    change(value)
    path.write_bytes(pickle.dumps(value))


def _storage(**changes: Any) -> Callable[[Any], object]:
    """Change where every tensor and object lies."""

    def change(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            metadata.storage_data[index] = dataclasses.replace(info, **changes)

    return change


def _tensors(change: Callable[[Any], object]) -> Callable[[Any], object]:
    def each(metadata: Any) -> None:
        for entry in metadata.state_dict_metadata.values():
            if hasattr(entry, "chunks"):
                change(entry)

    return each


def _set(**changes: Any) -> Callable[[Any], object]:
    def change(value: Any) -> None:
        for key, new in changes.items():
            object.__setattr__(value, key, new)

    return change


def _chunks(**changes: Any) -> Callable[[Any], object]:
    return _tensors(lambda entry: [_set(**changes)(c) for c in entry.chunks])


DAMAGE = {
    "climbs out": _storage(relative_path="../../../etc/passwd"),
    "absolute": _storage(relative_path="/etc/passwd"),
    "is the directory": _storage(relative_path="."),
    "is above": _storage(relative_path=".."),
    "nameless": _storage(relative_path=""),
    "not there": _storage(relative_path="__9_9.distcp"),
    "no path": _storage(relative_path=7),
    "zero byte": _storage(relative_path="a\0b"),
    "describes itself": _storage(relative_path=".metadata"),
    "negative offset": _storage(offset=-1),
    "huge offset": _storage(offset=1 << 62),
    "huge length": _storage(length=1 << 62),
    "negative length": _storage(length=-5),
    "no length": _storage(length=None),
    "length too short": _storage(length=10),
    "transformed": _storage(transform_descriptors=["zstd"]),
    "nowhere": _set(storage_data={}),
    "storage of no form": _set(storage_data=[1, 2]),
    "storage of junk": _set(storage_data={1: 2}),
    "nothing": _set(state_dict_metadata=None),
    "numbered": _set(state_dict_metadata={7: None}),
    "tensors of junk": _set(state_dict_metadata={"a": 7}),
    "no size": _tensors(_set(size=None)),
    "huge size": _tensors(_set(size=torch.Size([1 << 40, 1 << 40]))),
    "negative size": _tensors(_set(size=[-1])),
    "larger size": _tensors(_set(size=torch.Size([8, 7]))),
    "no chunks": _tensors(_set(chunks=None)),
    "too few chunks": _tensors(lambda e: _set(chunks=[], size=torch.Size([3]))(e)),
    "chunks of junk": _tensors(_set(chunks=[7, None])),
    "a chunk twice": _tensors(lambda e: _set(chunks=e.chunks * 2)(e)),
    "very many chunks": _tensors(lambda e: _set(chunks=e.chunks * 50_000)(e)),
    "chunk elsewhere": _chunks(offsets=torch.Size([1, 1])),
    "negative chunk": _chunks(offsets=[-1, 0]),
    "huge chunk": _chunks(sizes=torch.Size([1 << 30, 1 << 30])),
    "flat chunk": _chunks(sizes=torch.Size([35])),
    "no planner": lambda value: object.__delattr__(value, "planner_data"),
    "planner of junk": _set(planner_data=7),
    "planner paths of junk": _set(planner_data={f"model.{i}.weight": i for i in range(3)}),
}
HARMLESS = {"planner of junk", "planner paths of junk"}


@pytest.mark.parametrize("damage", DAMAGE)
def test_false_metadata_is_refused(damage: str, saved: Path) -> None:
    _metadata(saved, DAMAGE[damage])
    began = time.process_time()
    if damage in HARMLESS:
        open_checkpoint(str(saved))
    else:
        with pytest.raises(CkptError):
            open_checkpoint(str(saved))
    assert time.process_time() - began < SECONDS


def test_a_chunk_of_very_many_rows_comes_to_an_end(tmp_path: Path) -> None:
    saved = _save({"a": torch.zeros(4, 4)}, tmp_path / "x")
    shape = [1 << 12] * 4
    _metadata(saved, _tensors(_set(size=torch.Size(shape))))
    _metadata(saved, _chunks(offsets=torch.Size([0] * 4), sizes=torch.Size([1 << 12, 1 << 12, 1 << 12, 1])))
    began = time.process_time()
    with pytest.raises(CkptError):
        open_checkpoint(str(saved))
    assert time.process_time() - began < SECONDS


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_truncated_file_is_named(name: str, part: float, saved: Path) -> None:
    os.truncate(saved / name, int((saved / name).stat().st_size * part))
    with pytest.raises(CkptError) as caught:
        open_checkpoint(str(saved))
    assert caught.value.path == str(saved / name)


def test_deep_verify_finds_a_flipped_bit_of_every_tensor_and_object(model: torch.nn.Module, tmp_path: Path) -> None:
    weights, states = _optimizer(model)
    text = {"short": "a note", "long": "a note" * 20_000}
    saved = _save({"model": weights, "optim": states, "text": text}, tmp_path / "saved")
    sound = ckpttool.verify(saved, deep=True)
    stored = dcp.FileSystemReader(saved).read_metadata().storage_data
    assert sound.findings == ()
    assert sound.records_checked > len(stored)
    for index, chunk in stored.items():
        path = saved / chunk.relative_path
        data = path.read_bytes()
        with zipfile.ZipFile(io.BytesIO(data[chunk.offset : chunk.offset + chunk.length])) as archive:
            prefix = archive.namelist()[0].split("/")[0]
            record = "data/0" if f"{prefix}/data/0" in archive.namelist() else "data.pkl"
            payload = archive.read(f"{prefix}/{record}")
        flipped = bytearray(data)
        flipped[data.index(payload, chunk.offset) + len(payload) // 2] ^= 1
        path.write_bytes(flipped)
        findings = ckpttool.verify(saved, deep=True).findings
        assert [f.path for f in findings] == [str(path)], index
        assert index.fqn in findings[0].problem
        path.write_bytes(data)


def test_a_missing_file_is_named(saved: Path) -> None:
    (saved / "__0_0.distcp").unlink()
    with refused(CkptError):
        open_checkpoint(str(saved))


def _swap(first: Path, second: Path) -> None:
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)


def _copy(first: Path, second: Path) -> None:
    second.write_bytes(first.read_bytes())


@pytest.mark.parametrize("deed", [_swap, _copy])
@pytest.mark.parametrize("shapes", [[(4, 3), (4, 3)], [(4, 3), (3, 4)], [(4, 3), (5, 3)]], ids=str)
def test_no_file_takes_the_place_of_another(
    shapes: list[tuple[int, int]], deed: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    """Files of two writers: shapes tell some apart, and a manifest tells the rest."""
    state = {"model": {f"layer{n}.weight": torch.randn(shape) for n, shape in enumerate(shapes)}}
    writer = dcp.FileSystemWriter(tmp_path / "saved", single_file_per_rank=True, thread_count=2)
    dcp.save(state, storage_writer=writer, no_dist=True)
    files = sorted((tmp_path / "saved").glob("*.distcp"))
    assert len(files) == 2
    right = ckpttool.digest(tmp_path / "saved")
    manifest = Manifest("saved", 0, 0.0, "0", 1, 0, files={
        p.name: of_bytes(p.read_bytes()) for p in (tmp_path / "saved").iterdir()
    })  # fmt: skip
    deed(*files)
    if shapes[0] != shapes[1]:
        with pytest.raises(CkptError):
            ckpttool.digest(tmp_path / "saved")
    else:  # as docs/damage.md says: nothing in the files tells
        assert ckpttool.digest(tmp_path / "saved") != right
    (tmp_path / "saved" / MANIFEST).write_bytes(manifest.to_json())
    assert ckpttool.verify(tmp_path / "saved", deep=True).findings
    with pytest.raises(CkptError):
        ckpttool.digest(tmp_path / "saved")
    with pytest.raises(CkptError):
        ckpttool.consolidate(tmp_path / "saved", tmp_path / "out", to="safetensors")


def test_metadata_that_is_something_else_is_refused(saved: Path) -> None:
    for data in (b"", b"text", pickle.dumps(7), pickle.dumps({"state_dict_metadata": {}})):
        (saved / ".metadata").write_bytes(data)
        with pytest.raises(CkptError):
            open_checkpoint(str(saved))


def test_a_named_function_is_not_called(saved: Path, tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/obeyed",)

    _metadata(saved, _set(planner_data=Attack()))
    open_checkpoint(str(saved))
    assert not (tmp_path / "obeyed").exists()


def test_it_is_not_taken_for_one_of_deepspeeds(tmp_path: Path) -> None:
    with refused(LayoutError):
        open_checkpoint(str(tmp_path))


@pytest.fixture
def titan(model: torch.nn.Module, tmp_path: Path) -> tuple[Path, torch.optim.Optimizer]:
    """As torchtitan saves: weights at the top, the optimizer flattened into one mapping, its own counts beside.

    Source: torchtitan 0.2, components/checkpoint.py (``_flattened_model_states_sd``) and components/optimizer.py
    (``OptimizersContainer.state_dict``).
    """
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.2},
              {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9))
    model(torch.randn(4, 7)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {
        **get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        "lr_scheduler": {"last_epoch": 1},
        "train_state": {"step": torch.tensor(1, dtype=torch.int32), "ntokens_seen": torch.tensor(128)},
        "dataloader": {"dp_rank_0": b"\x80\x04N."},
    }
    return _save(state, tmp_path / "titan"), optimizer


def test_a_flattened_optimizer_is_distinguished_from_weights(
    model: torch.nn.Module, titan: tuple[Path, torch.optim.Optimizer], tmp_path: Path
) -> None:
    root, optimizer = titan
    checkpoint = open_checkpoint(str(root))
    assert {p.name for p in checkpoint.parameters} | {b.name for b in checkpoint.buffers} == {*model.state_dict()}
    live = {name: optimizer.state[p] for name, p in model.named_parameters()}
    for parameter in checkpoint.parameters:
        if parameter.name in live:
            for key in ("exp_avg", "exp_avg_sq"):
                assert gather(checkpoint, parameter.states[key]) == raw_bytes(live[parameter.name][key])
    by_decay = {g.hyperparameters["weight_decay"]: g for g in checkpoint.groups}
    names = {id(p): n for n, p in model.named_parameters()}
    for group in optimizer.param_groups:
        read = by_decay[group["weight_decay"]]
        assert {*read.parameters} == {names[id(p)] for p in group["params"]}
        assert read.hyperparameters["lr"] == group["lr"]
        assert tuple(read.hyperparameters["betas"]) == group["betas"]
        assert read.scalars["step"] == ScalarState(1.0, "F32")
    assert checkpoint.step == 1
    ckpttool.consolidate(root, tmp_path / "weights", to="safetensors")
    weights = ckpttool.load_state_dict(tmp_path / "weights")
    assert {*weights} == {*model.state_dict()}
    ckpttool.convert(root, tmp_path / "zero", to="zero", world_size=2, stage=2, dtype="fp32", prove=True)
    assert not ckpttool.verify(tmp_path / "zero", deep=True).findings
    assert {n for g in ckpttool.inspect(tmp_path / "zero").groups for n in g.parameters} == {*live}


def test_states_of_parameters_that_are_not_there_are_refused(tmp_path: Path) -> None:
    state = {"weight": torch.ones(3), "optimizer": {"state.other.exp_avg": torch.ones(3)}}
    with refused(LayoutError):
        open_checkpoint(str(_save(state, tmp_path / "odd")))


class Quantised(torch.Tensor):  # type: ignore[misc]  # torch is not followed
    """A tensor with a scale, as quantised weights and 8-bit optimizers have them."""

    @staticmethod
    def __new__(cls: type[Any], data: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: torch.Tensor) -> None:
        self.data_ = data

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Quantised, (self.data_,)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return Quantised(args[0].data_)
        return function(*[a.data_.float() if isinstance(a, Quantised) else a for a in args], **(kwargs or {}))


@pytest.mark.parametrize("what", ["a state", "a weight", "all"])
def test_an_unknown_class_is_named_and_the_rest_is_read(what: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    odd = Quantised(torch.ones(4, 4, dtype=torch.uint8))
    if what == "a state":
        states["state"]["weight"]["exp_avg"] = odd
    else:
        weights = {"weight": odd, **({} if what == "all" else {"bias": weights["bias"]})}
    saved = _save({"model": weights, "optimizer": states}, tmp_path / "saved")
    if what == "all":
        with refused(LayoutError):
            open_checkpoint(str(saved))
        return
    assert ckpttool.verify(saved, deep=True).findings == ()
    report = ckpttool.consolidate(saved, tmp_path / "out", to="safetensors")
    assert sorted(p.name for p in open_checkpoint(str(tmp_path / "out")).parameters) == sorted(
        name for name, value in weights.items() if value is not odd
    )
    assert any("as a Quantised, which is not a plain tensor" in note for note in report.notes)
    with refused(LayoutError):
        ckpttool.convert(saved, tmp_path / "converted", to="dcp")


@pytest.mark.parametrize("training", [True, False])
def test_an_export_of_schedule_frees_training_point_is_noted(training: bool, tmp_path: Path) -> None:
    options = {"params": ["weight"], "lr": 0.1, "train_mode": training}
    states = {"state": {"weight": {"z": torch.ones(3), "exp_avg_sq": torch.ones(3)}}, "param_groups": [options]}
    saved = _save({"model": {"weight": torch.ones(3)}, "optimizer": states}, tmp_path / "saved")
    notes = ckpttool.consolidate(saved, tmp_path / "out", to="safetensors").notes
    assert any("schedule-free" in note for note in notes) == training


def test_the_memory_for_the_metadata_grows_with_the_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"layers.{n}.weight": torch.zeros(64, 64) for n in range(8)}
    saved = _save({"model": state}, tmp_path / "saved")
    monkeypatch.setattr(unpickler, "MEMORY", MEMORY._replace(base=0.0))
    assert len(open_checkpoint(str(saved)).parameters) == 8
    for shard in saved.glob("*.distcp"):
        shard.write_bytes(b"")
    with pytest.raises(CkptError, match="may take more than"):
        open_checkpoint(str(saved))


def test_chunks_of_one_shape_share_one_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"layers.{n}.weight": torch.full((n % 2 + 1, 64), float(n)) for n in range(8)}
    saved = _save({"model": state}, tmp_path / "saved")
    read: list[bytes] = []

    def unpickle(data: bytes, *, path: str) -> unpickler.Unpickled:
        read.append(data)
        return unpickler.unpickle(data, path=path)

    monkeypatch.setattr(torch_file, "unpickle", unpickle)
    checkpoint = open_checkpoint(str(saved))
    assert len(read) == 2
    for parameter in checkpoint.parameters:
        assert gather(checkpoint, parameter.states["module"]) == raw_bytes(state[parameter.name])
    names = [record.name for file in checkpoint.files for record in file.records]
    assert len(names) == len({*names})
    assert ckpttool.verify(str(saved), deep=True).sound
