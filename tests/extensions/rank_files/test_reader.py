"""What FSDP2, HSDP and tensor parallelism save, in every layout, is what the live run held, bit for bit."""

from __future__ import annotations

import itertools
import shutil
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file

import ckpttool
from ckpttool.errors import CkptError, LayoutError
from ckpttool.extensions.rank_files.reader import _assignment_by_shape
from tests import sampling
from tests.cli.command import ckpttool as command
from tests.forked import each_on_ranks
from tests.formats import fsdp_runs
from tests.wording import refused

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.tmpdir import TempPathFactory

pytestmark = pytest.mark.deepspeed

BOTH = {("fsdp", 3), ("hsdp", 4), ("tp", 4)}
"""Meshes that have both types; of the others one rank alone, and bfloat16, are left to ``make thorough``."""
JOBS: list[dict[str, Any]] = [
    {"id": f"{mesh}-{ranks}-{dtype}", "mesh": mesh, "world_size": ranks, "dtype": dtype}
    for mesh, ranks in (("fsdp", 1), ("fsdp", 2), ("fsdp", 3), ("fsdp", 4), ("hsdp", 4), ("tp", 4))
    for dtype in ("float32", "bfloat16")
    if sampling.thorough() or (mesh, ranks) in BOTH or (dtype == "float32" and ranks > 1)
]
ODD: list[dict[str, Any]] = [
    {"id": "fsdp-2-reversed", "mesh": "fsdp", "parameters": "reversed"},
    {"id": "fsdp-2-named", "mesh": "fsdp", "parameters": "named"},
    {"id": "fsdp-2-decay", "mesh": "fsdp", "parameters": "decay"},
    {"id": "fsdp-2-ignored", "mesh": "fsdp", "ignored": True},
    {"id": "unnamed-2-float32", "mesh": "unnamed"},
    {"id": "3d-4-float32", "mesh": "3d", "world_size": 4},
]
JOBS += [{"world_size": 2, "dtype": "float32", **job} for job in ODD]
JOBS.append(
    {"id": "fsdp-2-trained-alone", "mesh": "fsdp", "world_size": 2, "dtype": "float32", "parameters": "trained"}
)
SOURCES = {
    "verl": "verl/global_step_3/actor",
    "verl run": "verl",
    "accelerate": "accelerate/checkpoint-3",
    "torch_checkpointing": "items",
    "trainer": "trainer/checkpoint-3",
    "trainer run": "trainer",
    "torchtitan": "titan/step-3",
    "torchtitan run": "titan",
    "shards": "shards",
}
RANK_FILES = ("verl", "accelerate", "torch_checkpointing")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    each_on_ranks(fsdp_runs.train, JOBS, directory, imports=["torch.distributed.checkpoint", "torch.distributed.fsdp"])
    return directory


@pytest.mark.parametrize(
    ("job", "source"),
    [(job["id"], source) for job in JOBS for source in sampling.some(SOURCES, 3 if job in ODD else 2, key=job["id"])],
)
def test_every_value_is_that_of_the_run(job: str, source: str, runs: Path) -> None:
    truth = load_file(str(runs / job / "truth.safetensors"))
    checkpoint = ckpttool.inspect(runs / job / SOURCES[source])
    names = [*(p.name for p in checkpoint.parameters), *(b.name for b in checkpoint.buffers), *checkpoint.aliases]
    expected = {key.removeprefix("model/") for key in truth if key.startswith("model/")}
    assert {*names} == expected - ({"head.weight"} if source == "shards" else set())
    for name in names:
        assert torch.equal(ckpttool.extract(checkpoint, name, framework="torch"), truth[f"model/{name}"]), name
    moments = {(key, p.name) for p in checkpoint.parameters for key in p.states if key not in {"fp32", "module"}}
    for key, name in moments:
        read = ckpttool.extract(checkpoint, name, state=key, framework="torch")
        assert torch.equal(read, truth[f"{key}/{name}"]), (key, name)
    # Numbers that fit several parameters, or none in the order of the model.
    unnamed = source in {"verl", "verl run"} and any(odd in job for odd in ("alone", "reversed", "decay"))
    assert (checkpoint.left_out != "") == unnamed
    if source != "shards" and not unnamed:
        assert {f"{key}/{name}" for key, name in moments} == {k for k in truth if k.startswith("exp_avg")}
        assert checkpoint.step == fsdp_runs.STEPS
        assert {group.scalars["step"].value for group in checkpoint.groups} == {fsdp_runs.STEPS}
    assert ckpttool.verify(runs / job / SOURCES[source], deep=True).findings == ()


@pytest.mark.parametrize(
    ("job", "source"),
    [
        (job, source)
        for job in ("fsdp-3-bfloat16", "hsdp-4-float32", "tp-4-float32")
        for source in sampling.some([s for s in SOURCES if s != "shards"], 2, key=job)
    ],
)
def test_weights_and_optimizer_are_converted(job: str, source: str, runs: Path, tmp_path: Path) -> None:
    src = runs / job / SOURCES[source]
    ckpttool.consolidate(src, tmp_path / "weights", to="safetensors", prove=True)
    buffers = ("positions", "seen") if not ckpttool.inspect(src).tells_buffers else None
    for to, options in (("dcp", {}), ("zero", {"world_size": 2, "stage": 2, "dtype": "bf16", "buffers": buffers})):
        if to == "zero" and buffers is not None:
            options = {**options, "buffers": ("positions",)}
        ckpttool.convert(src, tmp_path / to, to=to, prove=True, **options)  # type: ignore[arg-type]
        assert ckpttool.digest(tmp_path / to).optimizer == ckpttool.digest(src).optimizer


@pytest.mark.parametrize(
    ("job", "source", "ranks"),
    [
        (*files, ranks)
        for files in sampling.some([("tp-4-bfloat16", "accelerate"), ("fsdp-3-float32", "verl")], 1)
        for ranks in sampling.some([1, 2, 3, 4], 1, key=files[0])
    ],
)
def test_the_loaders_of_frameworks_resume_on_any_number_of_ranks(
    job: str, source: str, ranks: int, runs: Path, tmp_path: Path
) -> None:
    src = runs / job / SOURCES[source]
    sources = [("accelerate", str(runs / job / SOURCES["trainer"])), ("torchtitan", str(runs / job / "titan/step-3"))]
    for layout in ("nested", "flat", "accelerate", "torchtitan"):
        ckpttool.convert(src, tmp_path / layout, to="dcp", layout=layout)
        sources.append((layout, str(tmp_path / layout)))
    loading = {"id": "done", "mesh": "fsdp", "world_size": ranks, "dtype": job.rpartition("-")[2]}
    loading |= {"sources": sources, "truth": str(runs / job / "truth.safetensors")}
    each_on_ranks(fsdp_runs.resume, [loading], tmp_path, imports=["torch.distributed.checkpoint", "accelerate"])
    assert (tmp_path / "done").read_text() == "loaded"


@pytest.mark.parametrize(
    ("job", "source", "mesh"),
    sampling.some(
        [
            (*files, mesh)
            for files in (("fsdp-3-float32", "verl"), ("tp-4-bfloat16", "trainer"), ("hsdp-4-bfloat16", "torchtitan"))
            for mesh in ("fsdp-1", "fsdp-2", "fsdp-3", "fsdp-4", "hsdp-4")
        ],
        3,
    ),
)
def test_files_for_the_ranks_of_another_mesh_resume(
    job: str, source: str, mesh: str, runs: Path, tmp_path: Path
) -> None:
    src = runs / job / SOURCES[source]
    kind, ranks = mesh.split("-")
    options: dict[str, Any] = {"mesh": {"ddp": 2, "fsdp": 2} if kind == "hsdp" else {"fsdp": int(ranks)}}
    if not ckpttool.inspect(src).tells_buffers:
        options["buffers"] = ["positions"]
    ckpttool.convert(src, tmp_path / "dcp", to="dcp", layout="accelerate")
    sources = [("accelerate", str(tmp_path / "dcp"))]
    for layout, loader in (("verl", "verl"), ("accelerate", "files of accelerate")):
        out = tmp_path / layout
        if layout == "verl" and source == "torchtitan":  # a flattened optimizer has no order
            with pytest.raises(CkptError, match="does not record the order of the optimizer's parameters"):
                ckpttool.convert(src, out, to="ranks", layout=layout, device="cpu", **options)  # type: ignore[arg-type]
            continue
        ckpttool.convert(src, out, to="ranks", layout=layout, device="cpu", prove=True, **options)  # type: ignore[arg-type]
        assert ckpttool.verify(out, deep=True).findings == ()
        sources.append((loader, str(out)))
    loading = {"id": "done", "mesh": kind, "world_size": int(ranks), "dtype": job.rpartition("-")[2]}
    loading |= {"sources": sources, "truth": str(runs / job / "truth.safetensors")}
    each_on_ranks(fsdp_runs.resume, [loading], tmp_path, imports=["torch.distributed.checkpoint", "accelerate"])
    assert (tmp_path / "done").read_text() == "loaded"


@pytest.mark.parametrize("job", sampling.some([job["id"] for job in ODD if job["id"] != "3d-4-float32"], 1))
def test_odd_runs_resume_from_every_layout(job: str, runs: Path, tmp_path: Path) -> None:
    (odd,) = (one for one in JOBS if one["id"] == job)
    src = runs / job / SOURCES["accelerate"]
    sources = [("accelerate", str(runs / job / SOURCES["trainer"]))]
    layouts: tuple[Any, ...] = ("nested", "flat", "accelerate", "torchtitan")
    for layout in layouts:
        ckpttool.convert(src, tmp_path / layout, to="dcp", layout=layout, prove=True)
        sources.append((layout, str(tmp_path / layout)))
    for layout, loader in (("verl", "verl"), ("accelerate", "files of accelerate")):
        mesh = [2] if odd["mesh"] == "unnamed" and layout == "verl" else None
        out = tmp_path / f"files of {layout}"
        ckpttool.convert(src, out, to="ranks", layout=layout, mesh=mesh, prove=True)  # type: ignore[arg-type]
        sources.append((loader, str(out)))
    loading = {**odd, "id": "done", "sources": sources, "truth": str(runs / job / "truth.safetensors")}
    each_on_ranks(fsdp_runs.resume, [loading], tmp_path, imports=["torch.distributed.checkpoint", "accelerate"])
    assert (tmp_path / "done").read_text() == "loaded"


def test_an_optimizer_that_is_not_read_is_reported_wherever_it_is_missed(runs: Path, tmp_path: Path) -> None:
    src = runs / "fsdp-2-reversed" / SOURCES["verl"]
    why = "numbers the optimizer's parameters, and their shapes fit the model's parameters in several ways, or in none"
    assert why in command("verify", src).stdout
    for to in (["--to", "dcp"], ["--to", "zero", "--world-size", "2"], ["--to", "ranks", "--layout", "verl"]):
        done = command("convert", src, tmp_path / "out", *to)
        assert done.code == 3
        assert why in done.error
        assert "--allow-partial" in done.error
    assert why in command("consolidate", src, tmp_path / "out", "--to", "safetensors", "--optimizer").error
    done = command("diff", src, runs / "fsdp-2-reversed" / SOURCES["accelerate"])
    assert (done.code, why in done.stdout) == (0, True)
    assert command("convert", src, tmp_path / "out", "--to", "dcp", "--allow-partial").code == 0


@pytest.mark.parametrize(
    ("wanted", "sizes", "chosen"),
    [
        ([(4, 4), (4, 4), (4,), None], [2, 2], [0, 2, 1, None]),  # matrices, and all others
        ([(4,), (4, 4), (4, 4)], [1, 2], [1, 0, 2]),
        ([(4, 4), (4,), (4, 4)], [1, 2], None),  # matrices in both groups
        ([(4, 4), (4,)], [1, 1], None),  # one of two matrices
        ([(4,), (4, 4), (4, 4)], [3], None),  # not in the order of the model
        ([(5,)], [1], None),
    ],
)
def test_groups_are_told_apart_by_shapes(
    wanted: list[tuple[int, ...] | None], sizes: list[int], chosen: list[int | None] | None
) -> None:
    assert _assignment_by_shape(wanted, [(4, 4), (4,), (4, 4)], sizes) == chosen


def test_schedulers_of_two_saves_are_refused(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fsdp-2-float32" / SOURCES["verl"], tmp_path / "mixed")
    path = tmp_path / "mixed/extra_state_world_size_2_rank_1.pt"
    saved = torch.load(path, weights_only=False)
    saved["lr_scheduler"]["last_epoch"] += 1
    torch.save(saved, path)
    with refused(LayoutError):
        ckpttool.inspect(tmp_path / "mixed")


@pytest.mark.parametrize("source", ["verl run", "trainer run", "torchtitan run"])
def test_a_copy_of_a_run_keeps_its_directories(source: str, runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "fsdp-2-float32" / SOURCES[source], run)
    (step,) = (path for path in run.iterdir() if path.is_dir())
    if source == "verl run":
        (step / "data.pt").write_bytes(b"position")
    ckpttool.cp(run, tmp_path / "copy", prove=True)
    files = {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert files == {
        p.relative_to(tmp_path / "copy"): p.read_bytes() for p in (tmp_path / "copy").rglob("*") if p.is_file()
    }
    later = step.with_name(step.name.replace("3", "4"))
    shutil.copytree(step, later)
    if source == "verl run":
        (run / "latest_checkpointed_iteration.txt").write_text("4")
    ckpttool.cp(run, tmp_path / "copy")
    assert {path.name for path in (tmp_path / "copy").iterdir() if path.is_dir()} == {step.name, later.name}


def test_a_wrong_latest_step_of_verl_is_refused(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fsdp-2-float32/verl", tmp_path / "run")
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("9")
    with refused(LayoutError):
        ckpttool.inspect(tmp_path / "run")
    assert ckpttool.inspect(tmp_path / "run", tag="global_step_3").step == fsdp_runs.STEPS
    with refused(LayoutError):
        ckpttool.inspect(tmp_path / "run", tag="3")


def test_a_step_with_two_models_is_whole(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fsdp-2-float32/verl", tmp_path / "run")
    shutil.copytree(tmp_path / "run/global_step_3/actor", tmp_path / "run/global_step_3/critic")
    (entry,) = ckpttool.ls(tmp_path / "run").entries
    assert (entry.whole, entry.format) == (True, "rank files")
    next((tmp_path / "run/global_step_3/critic").glob("model_*_rank_1.pt")).unlink()
    (entry,) = ckpttool.ls(tmp_path / "run").entries
    assert not entry.whole


def test_of_fsdp1_the_weights_on_a_mesh_are_read_and_other_forms_are_refused(tmp_path: Path) -> None:
    job = {"id": "fsdp1", "world_size": 2}
    each_on_ranks(fsdp_runs.train_fsdp1, [job], tmp_path, imports=["torch.distributed.fsdp"])
    truth = load_file(str(tmp_path / "fsdp1/truth.safetensors"))
    checkpoint = ckpttool.inspect(tmp_path / "fsdp1/mesh")
    assert {p.name for p in checkpoint.parameters} == truth.keys()
    for name, value in truth.items():
        assert torch.equal(ckpttool.extract(checkpoint, name, framework="torch"), value), name
    assert checkpoint.groups == ()
    assert any("the optimizer's states are left out" in remark for remark in checkpoint.remarks)
    with refused(LayoutError):
        ckpttool.inspect(tmp_path / "fsdp1/none")
    with refused(CkptError):
        ckpttool.inspect(tmp_path / "fsdp1/local")


# ------------------------------------------------------------------------------------------------- no shard can lie


@pytest.mark.parametrize(
    ("job", "source"),
    [
        (job, source)
        for job in sampling.some(["fsdp-4-float32", "hsdp-4-float32", "tp-4-float32"], 2)
        for source in sampling.some(RANK_FILES, 1, key=job)
    ],
)
def test_a_missing_swapped_or_copied_file_is_refused(job: str, source: str, runs: Path, tmp_path: Path) -> None:
    whole = runs / job / SOURCES[source]
    files = sorted(path.name for path in whole.iterdir() if path.suffix in {".pt", ".bin"})
    kinds = [list(same) for _, same in itertools.groupby(files, lambda name: name[:5])]
    for names in (names for names in kinds if not names[0].startswith("extra")):
        for damage, (one, two) in itertools.product(("gone", "copied", "swapped"), itertools.combinations(names, 2)):
            root = tmp_path / "damaged"
            shutil.copytree(whole, root)
            if damage == "gone":
                (root / one).unlink()
            else:
                shutil.copy(whole / one, root / two)
            if damage == "swapped":
                shutil.copy(whole / two, root / one)
            with pytest.raises(LayoutError) as caught:
                ckpttool.inspect(root)
            assert one in str(caught.value) or two in str(caught.value), (damage, one, two)
            shutil.rmtree(root)


def test_files_of_two_steps_are_refused(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fsdp-2-float32" / SOURCES["accelerate"], tmp_path / "mixed")
    path = tmp_path / "mixed/optimizer_0_rank1.bin"
    saved = torch.load(path, weights_only=False)
    for states in saved["state"].values():
        states["step"] += 1
    torch.save(saved, path)
    with refused(LayoutError):
        ckpttool.inspect(tmp_path / "mixed")


def test_copies_that_differ_are_found(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "hsdp-4-float32" / SOURCES["verl"], tmp_path / "mixed")
    path = tmp_path / "mixed/model_world_size_4_rank_2.pt"
    saved = torch.load(path, weights_only=False)
    saved["up.weight"].to_local()[3] += 1
    torch.save(saved, path)
    assert [f for f in ckpttool.verify(tmp_path / "mixed", deep=True).findings if "up.weight" in f.problem]
    with refused(CkptError):
        ckpttool.consolidate(tmp_path / "mixed", tmp_path / "out", to="safetensors")


def test_files_of_another_world_size_beside_them_do_not_count(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fsdp-4-float32" / SOURCES["verl"], tmp_path / "both")
    for path in (runs / "fsdp-2-float32" / SOURCES["verl"]).glob("*_world_size_2_*"):
        shutil.copy(path, tmp_path / "both")
    assert ckpttool.inspect(tmp_path / "both").topology.data_parallel == 4
    (tmp_path / "both/fsdp_config.json").unlink()
    with refused(LayoutError):
        ckpttool.inspect(tmp_path / "both")


def test_a_run_with_two_models_asks_for_one(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fsdp-2-float32/verl", tmp_path / "run")
    shutil.copytree(tmp_path / "run/global_step_3/actor", tmp_path / "run/global_step_3/critic")
    with refused(LayoutError):
        ckpttool.inspect(tmp_path / "run")
    assert ckpttool.inspect(tmp_path / "run/global_step_3/critic").step == fsdp_runs.STEPS


# ------------------------------------------------------------------------------------------------- safetensors


def test_shards_that_cannot_be_proven_whole_need_a_flag(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fsdp-4-float32/shards", tmp_path / "part")
    assert command("consolidate", tmp_path / "part", tmp_path / "whole", "--to", "safetensors").code == 0
    (tmp_path / "part/shard-00004-model-00001-of-00001.safetensors").unlink()
    run = ("consolidate", tmp_path / "part", tmp_path / "out", "--to", "safetensors")
    assert command(*run).error.endswith("the last ones may be missing; if no file is missing, pass --allow-partial")
    assert command(*run, "--allow-partial").code == 0
    (tmp_path / "part/shard-00002-model-00001-of-00001.safetensors").unlink()
    assert "a file is missing, or two saves are mixed" in command(*run, "--allow-partial", "--overwrite").error
