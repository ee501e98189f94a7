"""Files of single ranks: the values of the source, on the mesh and for the torch release that were asked for."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import ckpttool
from ckpttool.errors import PlanError
from tests import sampling
from tests.truth import HERE, source

if TYPE_CHECKING:
    from pathlib import Path

RUNS = sorted(path.name for path in (HERE / "fsdp").iterdir())


@pytest.mark.parametrize("name", RUNS)
def test_every_value_of_another_torch_release_is_read(name: str) -> None:
    run = HERE / "fsdp" / name
    checkpoint = ckpttool.inspect(run / "verl")
    truth = load_file(run / "truth.safetensors")
    trained = {f"{key}/{p.name}": key for p in checkpoint.parameters for key in p.states if key.startswith("exp_avg")}
    assert {key for key in truth if key.startswith("exp_avg")} == {*trained}
    tensors: list[Any] = [*checkpoint.parameters, *checkpoint.buffers]
    assert {key for key in truth if key.startswith("model/")} == {
        f"model/{name}" for name in (*(t.name for t in tensors), *checkpoint.aliases)
    }
    for tensor in tensors:
        assert np.array_equal(ckpttool.extract(checkpoint, tensor.name), truth[f"model/{tensor.name}"]), tensor.name
    for key, state in trained.items():
        assert np.array_equal(ckpttool.extract(checkpoint, key.partition("/")[2], state=state), truth[key]), key
    assert checkpoint.mesh is not None
    assert checkpoint.mesh.torch == ("2.13" if name.startswith("torch2.14") else "2.6")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "torch"),
    sampling.pairs(
        itertools.product(
            [*RUNS, "zero2-dp2-bf16", "zero3-dp4-bf16", "universal-zero3-dp2-bf16"],
            ("verl", "accelerate"),
            ("2.6", "2.13"),
        ),
    ),
)
def test_the_values_stay_on_another_mesh(name: str, layout: str, torch: str, tmp_path: Path) -> None:
    src = HERE / "fsdp" / name / "verl" if name in RUNS else source(name)
    meshes: list[dict[str, int]] = [{"fsdp": 1}, {"fsdp": 5}, {"ddp": 2, "fsdp": 3}]
    for mesh in sampling.some(meshes, 2, key=f"{name} {layout} {torch}"):
        out = tmp_path / "x".join(mesh) / str(sum(mesh.values()))
        options: dict[str, Any] = {"to": "ranks", "layout": layout, "mesh": mesh, "torch": torch}
        report = ckpttool.convert(src, out, prove=True, **options)
        made = ckpttool.inspect(out)
        assert made.mesh is not None
        assert (dict(zip(made.mesh.names, made.mesh.shape, strict=True)), made.mesh.torch) == (mesh, torch)
        assert made.mesh.device == ("cpu" if name in RUNS else "cuda")
        assert any("these files load on a mesh of" in note for note in report.notes)
        assert ckpttool.verify(out, deep=True).findings == ()
        assert ckpttool.digest(out) == ckpttool.digest(src)


@pytest.mark.parametrize(("to", "options"), [("dcp", {}), ("ranks", {"layout": "verl"})])
def test_client_state_that_is_not_written_is_noted(to: str, options: dict[str, str], tmp_path: Path) -> None:
    report = ckpttool.convert(source("zero3-dp4-bf16"), tmp_path / "out", to=to, **options)  # type: ignore[arg-type]
    lost = "the counts of samples and skipped steps, the client state (epoch, note, losses, nested)"
    scheduler = "the scheduler, " if to == "dcp" else ""  # verl's files have it
    assert f"not written: {scheduler}{lost}" in report.notes


def test_the_source_gives_the_mesh_that_is_not_asked_for(tmp_path: Path) -> None:
    src = HERE / "fsdp" / "torch2.6.0-fsdp-3" / "verl"
    ckpttool.convert(src, tmp_path / "out", to="ranks", layout="accelerate", world_size=2)
    assert ckpttool.inspect(tmp_path / "out").mesh == ckpttool.model.DeviceMesh(("fsdp",), (2,), "cpu", "2.6")
    ckpttool.convert(source("zero1-dp2-bf16"), tmp_path / "zero", to="ranks", layout="accelerate")
    assert ckpttool.inspect(tmp_path / "zero").mesh == ckpttool.model.DeviceMesh((), (2,), "cuda", "2.13")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "ranks"}, "layout: is missing"),
        ({"to": "ranks", "layout": "nested"}, "layout: is 'nested', not verl or accelerate"),
        (
            {"to": "dcp", "layout": "verl"},
            "layout: is 'verl', not nested, flat, app, accelerate, torchtitan or lightning",
        ),
        ({"to": "universal", "layout": "flat"}, "layout: is for dcp and ranks, not for universal"),
        ({"to": "dcp", "mesh": {"fsdp": 2}}, "mesh: is for ranks, not for dcp"),
        ({"to": "ranks", "layout": "verl", "mesh": {"fsdp": 0}}, "mesh: is 0"),
        ({"to": "ranks", "layout": "verl", "torch": "2.5"}, "torch: is '2.5'"),
        ({"to": "ranks", "layout": "verl", "device": "gpu"}, "device: is 'gpu'"),
        (
            {"to": "ranks", "layout": "verl", "mesh": {"fsdp": 2}, "world_size": 3},
            "mesh: has 2 ranks, but world_size is 3",
        ),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=message):
        ckpttool.convert(source("zero1-dp2-bf16"), tmp_path / "out", **options)
