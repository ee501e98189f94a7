"""Checks of the fixtures of ``make_gpu.py``, on any device: each raises if it fails."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import ckpttool
from ckpttool.formats import open_checkpoint
from ckpttool.model import MASTER, MODULE
from tests.truth import gather, raw_bytes

if TYPE_CHECKING:
    from ckpttool.model import Checkpoint

LARGEST_BYTES = 3_000_000
"""Of a fixture, its truth included."""
FOLLOWING = 20
"""Losses that are recorded behind the save."""
FALLS_TO = 0.6
"""Of the first loss."""
TOLERANCE = 0.01
"""Of each loss: how far those of a run that was resumed on other ranks may lie from those recorded, on one device."""
TOLERANCE_ACROSS_DEVICES = 0.02
"""The same for what a GPU has computed, and a CPU goes on with."""
LOGITS_TOLERANCE = 0.02
"""Of the largest logit: how far those that a CPU computes may lie from those recorded."""


@dataclass(frozen=True)
class Fixture:
    """A fixture."""

    path: Path
    device: str
    """What it must have been made on."""

    @property
    def checkpoint(self) -> str:
        """The directory to give to any command."""
        return str(self.path / "checkpoint")

    @property
    def run(self) -> dict[str, Any]:
        """How it was trained."""
        run: dict[str, Any] = json.loads((self.path / "run.json").read_text())
        return run

    @property
    def tolerance(self) -> float:
        """Of losses on this machine's CPU."""
        return TOLERANCE if self.device == "cpu" else TOLERANCE_ACROSS_DEVICES

    def truth(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """What the engine held: tensors by kind and name, and facts."""
        with safe_open(str(self.path / "truth.safetensors"), "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["truth"])  # noqa: SIM118


def provenance(fixture: Fixture) -> None:
    """It says where it came from, and every file is as it was then."""
    told = json.loads((fixture.path / "provenance.json").read_text())
    files = {
        p.relative_to(fixture.path).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in fixture.path.rglob("*")
        if p.is_file() and p.name != "provenance.json"
    }
    assert told["files"] == files
    assert {"truth.safetensors", "logits.safetensors", "run.json"} <= set(files)
    assert {"checkpoint/latest", "checkpoint/.metadata"} & set(files)
    assert told["device"] == fixture.run["device"] == fixture.device
    assert (told["gpu"] is not None) == (fixture.device == "cuda")
    assert told["command"].startswith("python fixtures/make_gpu.py")
    assert {"python", "torch", "deepspeed", "ckpttool"} <= {n for n, v in told["versions"].items() if v != "unknown"}
    if fixture.device == "cuda":
        assert told["driver"]
        assert told["versions"]["cuda"]


def size(fixture: Fixture) -> None:
    """It is small enough to be committed."""
    assert sum(p.stat().st_size for p in fixture.path.rglob("*") if p.is_file()) < LARGEST_BYTES


def learnt(fixture: Fixture) -> None:
    """The loss has fallen, and the losses after the save are there."""
    run = fixture.run
    assert len(run["losses"]) == run["steps"]
    assert run["losses"][-1] < FALLS_TO * run["losses"][0]
    assert len(run["following"]) == FOLLOWING
    assert all(math.isfinite(loss) for loss in run["losses"] + run["following"])


def training(fixture: Fixture) -> None:
    """It has learnt what its recipe says."""
    learnt(fixture)
    run = fixture.run
    _, facts = fixture.truth()
    assert (facts["stage"], facts["dtype"], facts["world_size"]) == (run["stage"], run["dtype"], run["world_size"])
    assert facts["global_steps"] == run["steps"]
    assert ckpttool.inspect(fixture.checkpoint).step == run["steps"]


def sound(fixture: Fixture) -> None:
    """Nothing is found by a deep look."""
    assert not ckpttool.verify(fixture.checkpoint, deep=True).findings


def consolidation(fixture: Fixture, directory: Path) -> None:
    """Masters come out bit for bit, in fp32 and cast to bf16; so do frozen weights and buffers."""
    tensors, facts = fixture.truth()
    dtypes: list[tuple[Literal["fp32", "bf16"], torch.dtype]] = [("fp32", torch.float32), ("bf16", torch.bfloat16)]
    for dtype, kind in dtypes:
        ckpttool.consolidate(fixture.checkpoint, directory / dtype, to="safetensors", dtype=dtype)
        found = load_file(str(directory / dtype / "model.safetensors"))
        expected = {n: tensors[f"{'module' if n in facts['frozen'] else 'fp32'}/{n}"].to(kind) for n in facts["order"]}
        buffers = {key.partition("/")[2]: tensor for key, tensor in tensors.items() if key.startswith("buffer/")}
        assert facts["frozen"]
        assert buffers
        assert found.keys() == {*expected, *buffers}
        for name, tensor in {**expected, **buffers}.items():
            assert found[name].dtype == tensor.dtype, name
            assert raw_bytes(found[name]) == raw_bytes(tensor), name


def holds_the_truth(fixture: Fixture, checkpoint: Checkpoint) -> None:
    """A checkpoint has every master and moment bit for bit, and the step."""
    tensors, facts = fixture.truth()
    states = {
        f"{key}/{p.name}": state
        for p in checkpoint.parameters
        if not p.frozen
        for key, state in p.states.items()
        if key != MODULE
    }
    expected = {key for key in tensors if key.partition("/")[0] in {"fp32", "exp_avg", "exp_avg_sq"}}
    assert states.keys() == expected
    for key, state in states.items():
        assert gather(checkpoint, state) == raw_bytes(tensors[key]), key
    assert checkpoint.step == facts["global_steps"]
    for group, scalars in zip(checkpoint.groups, facts["scalars"], strict=True):
        assert group.scalars["step"].value == scalars["step"]


def conversions(fixture: Fixture, directory: Path) -> None:
    """Written for other ranks and stages, and as a universal checkpoint, it holds the same.

    At stage 0 in fp32 DeepSpeed only numbers the parameters of the optimizer, and its groups fit several orders.
    """
    if (fixture.run["stage"], fixture.run["dtype"]) == (0, "fp32"):
        with pytest.raises(ckpttool.CkptError, match="does not record the trained parameters"):
            ckpttool.convert(fixture.checkpoint, directory / "zero", to="zero", world_size=2, stage=1)
        return
    holds_the_truth(fixture, open_checkpoint([fixture.checkpoint]))
    for ranks, stage in ((1, 3), (2, 1), (3, 3), (4, 2)):
        out = directory / f"zero{stage}-dp{ranks}"
        ckpttool.convert(fixture.checkpoint, out, to="zero", world_size=ranks, stage=stage, prove=True)
        converted = open_checkpoint([str(out)])
        assert (converted.stage, converted.topology.data_parallel) == (stage, ranks)
        holds_the_truth(fixture, converted)
    ckpttool.convert(fixture.checkpoint, directory / "universal", to="universal", prove=True)
    holds_the_truth(fixture, open_checkpoint([str(directory / "universal")]))


def fsdp2(fixture: Fixture, directory: Path) -> None:
    """Weights and states come out bit for bit: consolidated, by way of ZeRO-3, and converted for other ranks."""
    tensors, facts = fixture.truth()
    checkpoint, zero, back = Path(fixture.checkpoint), directory / "zero", directory / "back"
    ckpttool.convert(checkpoint, zero, to="zero", world_size=3, stage=3, dtype="fp32", buffers=[], prove=True)
    ckpttool.convert(zero, back, to="dcp", prove=True)
    for number, source in enumerate((checkpoint, zero, back)):
        opened = open_checkpoint([str(source)])
        states = {
            f"{'module' if key in {MODULE, MASTER} else key}/{p.name}": state
            for p in opened.parameters
            for key, state in p.states.items()
            if key != MODULE or p.frozen
        }
        expected = {key: value for key, value in tensors.items() if not key.startswith(("buffer/", "step/"))}
        assert states.keys() == {*expected, "module/head.weight"}  # torch stores a tied weight twice
        for key, value in expected.items():
            assert gather(opened, states[key]) == raw_bytes(value), key
        out = directory / f"weights-{number}"
        ckpttool.consolidate(source, out, to="safetensors", dtype="fp32")
        found = load_file(str(out / "model.safetensors"))
        assert torch.equal(found["mask"], tensors["buffer/mask"])
    assert facts["frozen"] == ["scale"]


def resumed(fixture: Fixture, answer: dict[str, Any]) -> None:
    """An engine on other ranks held the truth, and its losses follow those recorded; without moments they do not."""
    run = fixture.run
    assert answer["compared"] > 0
    assert answer["differing"] == []
    away = [abs(ours - theirs) / theirs for ours, theirs in zip(answer["following"], run["following"], strict=True)]
    assert len(away) == FOLLOWING
    if run["offload"] == "nvme":  # with files this small DeepSpeed computes other steps than on the host
        return
    assert all(one <= fixture.tolerance for one in away), away  # where one is not a number, too


def control(fixture: Fixture, answer: dict[str, Any]) -> None:
    """Had the optimizer's states been lost, ``resumed`` would have seen it in the losses."""
    following = fixture.run["following"]
    away = [abs(ours - theirs) / theirs for ours, theirs in zip(answer["following"], following, strict=True)]
    assert max(away) > fixture.tolerance, away


def logits(answer: dict[str, Any], dtype: str) -> None:
    """A plain torch model of the consolidated weights says what the engine said."""
    assert answer["largest"] > 0
    assert answer[dtype] <= LOGITS_TOLERANCE * answer["largest"], answer
