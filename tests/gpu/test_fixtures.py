"""Every fixture that was trained on a GPU is checked on the CPU; so are stand-ins that the same command makes here.

The stand-ins show that the command works without a GPU and that every check is run, whether fixtures of a GPU are
bundled or not.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import forked, sampling
from tests.gpu import checks, resumes
from tests.truth import HERE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.deepspeed

BUNDLED = sorted(p.parent.name for p in (HERE / "gpu").glob("zero*/run.json"))
FSDP2 = sorted(p.parent.name for p in (HERE / "gpu").glob("fsdp2-*/run.json"))
STAND_INS = sampling.some(["zero2-bf16", "zero3-fp16"], 1)
FIXTURES = [*(("cpu", name) for name in STAND_INS), *(("cuda", name) for name in BUNDLED)]
RESUMED = [*(("cpu", name) for name in STAND_INS), *(("cuda", name) for name in sampling.some(BUNDLED, 1))]
CONVERTED = [*(("cpu", name) for name in STAND_INS), *(("cuda", name) for name in sampling.some(BUNDLED, 1))]
"""Fixtures from which engines go on."""
RECIPE = ("name", "stage", "dtype", "world_size", "optimizer", "offload", "steps", "width", "layers")


@dataclass(frozen=True)
class Made:
    """What the command left."""

    out: Path
    code: int
    printed: str


def command(*arguments: str) -> tuple[int, str]:
    """Run ``make_gpu.py``; its exit code and what it printed."""
    script = [sys.executable, str(HERE / "make_gpu.py"), *arguments]
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Two parts, made on the CPU by the command that makes all of them on a GPU."""
    directory = tmp_path_factory.mktemp("made")
    code, printed = command(
        "--device", "cpu", "--only", *STAND_INS, "--ranks", "2", "--steps", "90", "--seconds", "300",
        "--budget", "3000", "--out", str(directory / "out"), "--archive", str(directory / "made.tar.gz"),
    )  # fmt: skip
    return Made(directory / "out", code, printed)


@pytest.fixture
def fixture_of(made: Made) -> Callable[[tuple[str, str]], checks.Fixture]:
    def find(which: tuple[str, str]) -> checks.Fixture:
        device, name = which
        return checks.Fixture((made.out if device == "cpu" else HERE / "gpu") / name, device)

    return find


@pytest.fixture(scope="module")
def answers(made: Made, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ranks on this CPU made of every fixture: by job."""
    directory = tmp_path_factory.mktemp("resumed")
    jobs = []
    for device, name in RESUMED:
        fixture = checks.Fixture((made.out if device == "cpu" else HERE / "gpu") / name, device)
        run = fixture.run
        recipe = {key: run[key] for key in RECIPE}
        recipe["offload"] = run["offload"] and "cpu"  # a restore into files is refused
        root, common = fixture.checkpoint, {"device": "cpu", "backend": "gloo", "recipe": recipe}
        common |= {"fixture": str(fixture.path)}
        for ranks in {1, 2, 4} - {run["world_size"]}:
            # The stand-ins have been resumed on one rank by the command itself.
            how = "restore" if ranks == 1 else "load"
            targets = [{"name": how, "how": how, "root": root}]
            if ranks < 4 and run["offload"] != "nvme":
                targets += [{"name": "control", "how": "weights", "root": root}]
            job = {"do": "resume", "world_size": ranks, "targets": targets}
            jobs.append({**common, **job, "directory": str(directory / f"{device}-{name}-{ranks}")})
        weights = {}
        for dtype in dict.fromkeys(("fp32", run["dtype"])):
            import ckpttool

            weights[dtype] = str(directory / f"{device}-{name}-weights" / dtype)
            ckpttool.consolidate(root, weights[dtype], to="safetensors", dtype=dtype)
        plain = {"do": "plain", "world_size": 1, "weights": weights}
        jobs.append({**common, **plain, "directory": str(directory / f"{device}-{name}-plain")})
    batches = forked.call(resumes.run, jobs)
    found = {p.parent.name: json.loads(p.read_text()) for p in directory.glob("*/answer.json")}
    assert len(found) == len(jobs)
    return {**found, "batches": batches}


# ------------------------------------------------------------------------------------------------- every fixture


@pytest.mark.parametrize("which", FIXTURES, ids="-".join)
@pytest.mark.parametrize("check", [checks.provenance, checks.size, checks.training, checks.sound])
def test_it_is_what_it_says(
    which: tuple[str, str],
    check: Callable[[checks.Fixture], None],
    fixture_of: Callable[[tuple[str, str]], checks.Fixture],
) -> None:
    check(fixture_of(which))


@pytest.mark.parametrize("which", CONVERTED, ids="-".join)
@pytest.mark.parametrize("check", [checks.consolidation, checks.conversions])
def test_outputs_equal_the_state_of_the_engine(
    which: tuple[str, str],
    check: Callable[[checks.Fixture, Path], None],
    fixture_of: Callable[[tuple[str, str]], checks.Fixture],
    tmp_path: Path,
) -> None:
    check(fixture_of(which), tmp_path)


@pytest.mark.parametrize("which", RESUMED, ids="-".join)
def test_a_cpu_goes_on_from_it_on_other_ranks(
    which: tuple[str, str], fixture_of: Callable[[tuple[str, str]], checks.Fixture], answers: dict[str, Any]
) -> None:
    fixture = fixture_of(which)
    assert answers["batches"][str(fixture.path)] == fixture.run["batches"]  # or losses could not be compared
    others = {1, 2, 4} - {fixture.run["world_size"]}
    for ranks in others:
        resumed = answers[f"{'-'.join(which)}-{ranks}"]["resumed"]
        checks.resumed(fixture, resumed["restore" if ranks == 1 else "load"])
        if "control" in resumed:
            checks.control(fixture, resumed["control"])


@pytest.mark.parametrize("which", RESUMED, ids="-".join)
def test_a_plain_model_on_a_cpu_says_what_the_engine_said(
    which: tuple[str, str], fixture_of: Callable[[tuple[str, str]], checks.Fixture], answers: dict[str, Any]
) -> None:
    answer = answers[f"{'-'.join(which)}-plain"]
    for dtype in dict.fromkeys(("fp32", fixture_of(which).run["dtype"])):
        checks.logits(answer, dtype)


@pytest.mark.parametrize("name", FSDP2)
@pytest.mark.parametrize("check", [checks.provenance, checks.size, checks.learnt, checks.sound])
def test_a_fixture_of_fsdp2_is_what_it_says(name: str, check: Callable[[checks.Fixture], None]) -> None:
    check(checks.Fixture(HERE / "gpu" / name, "cuda"))


@pytest.mark.parametrize("name", FSDP2)
def test_outputs_of_fsdp2_equal_the_state_of_the_run(name: str, tmp_path: Path) -> None:
    checks.fsdp2(checks.Fixture(HERE / "gpu" / name, "cuda"), tmp_path)


# ------------------------------------------------------------------------------------------------- the command


def test_the_command_does_all_of_it(made: Made) -> None:
    assert made.code == 0, made.printed
    report = json.loads((made.out / "report.json").read_text())
    assert report["ok"]
    assert report["machine"]["gpu"] is None
    for name in STAND_INS:
        part = report["parts"][name]
        assert [s["name"] for s in part["steps"] if not s["ok"]] == []
        assert len(part["steps"]) == 8
        assert part["ranks"] == 2
        # On one rank, restored, converted and as a control; each against the truth and the losses.
        assert len(part["resumed"]) == 3
        if part["recipe"]["stage"] < 3:  # where DeepSpeed has a linear layer of its own, which rounds otherwise
            assert part["logits"][part["recipe"]["dtype"]] == 0.0
    assert not list((made.out.parent).glob("*.partial"))


def test_the_report_tells_people(made: Made) -> None:
    text = (made.out / "report.md").read_text()
    assert "no GPU: all of it ran on the CPU" in text
    assert "all went well" in text
    assert "zero2-bf16" in text
    assert "$ ckpttool verify --deep background" in text
    assert str(made.out.parent) not in text
    assert str(HERE.parent) + "/" not in text


def test_the_archive_holds_all_of_it(made: Made, tmp_path: Path) -> None:
    shutil.unpack_archive(made.out.parent / "made.tar.gz", tmp_path)
    held = {p.relative_to(tmp_path / "out").as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert held == {p.relative_to(made.out).as_posix() for p in made.out.rglob("*") if p.is_file()}
    checks.provenance(checks.Fixture(tmp_path / "out" / STAND_INS[0], "cpu"))


@pytest.mark.thorough
def test_a_slow_parameter_is_noted_and_the_others_are_resolved(tmp_path: Path) -> None:
    code, printed = command(
        "--device", "cpu", "--only", "zero1-bf16", "--ranks", "1", "--seconds", "2", "--steps", "100000",
        "--out", str(tmp_path),
    )  # fmt: skip
    assert code == 1, printed
    assert "zero1-bf16: FAILED" in printed
    part = json.loads((tmp_path / "report.json").read_text())["parts"]["zero1-bf16"]
    told = part.get("problem") or part["failed_attempts"][0]["problem"]
    assert "was not done in" in told
    assert "NOT all went well" in (tmp_path / "report.md").read_text()
    assert not (tmp_path / "zero1-bf16").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_where_there_is_no_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    code, printed = command("--out", str(tmp_path / "out"))
    assert code == 1
    assert printed.startswith("make_gpu.py: torch ")
    assert printed.endswith("sees no GPU; pass --device cpu to do without\n")
    assert printed.count("\n") == 1
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------- the checks


@pytest.fixture
def copy(made: Made, tmp_path: Path) -> checks.Fixture:
    """A stand-in that may be damaged."""
    shutil.copytree(made.out / STAND_INS[0], tmp_path / "copy")
    return checks.Fixture(tmp_path / "copy", "cpu")


def _flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_changed_byte_of_the_checkpoint_is_seen(copy: checks.Fixture, tmp_path: Path) -> None:
    _flip(next(copy.path.glob("checkpoint/*/*optim_states.pt")))
    with pytest.raises(AssertionError):
        checks.provenance(copy)
    with pytest.raises((AssertionError, Exception)):
        checks.conversions(copy, tmp_path)


@pytest.mark.parametrize("kind", ["fp32", "exp_avg", "exp_avg_sq", "buffer"])
def test_another_truth_is_seen(kind: str, copy: checks.Fixture, tmp_path: Path) -> None:
    path = copy.path / "truth.safetensors"
    tensors, facts = copy.truth()
    name = next(key for key in tensors if key.startswith(f"{kind}/"))
    values = tensors[name].view(-1)
    values[0] = values[1] if kind == "buffer" else values[0] * (1 + 2**-20) + 1e-20
    if kind == "buffer":
        values[0] = not load_file(str(path))[name].view(-1)[0]
    save_file(tensors, str(path), metadata={"truth": json.dumps(facts)})
    with pytest.raises(AssertionError):
        (checks.consolidation if kind in {"fp32", "buffer"} else checks.conversions)(copy, tmp_path)


def test_another_checksum_is_seen(copy: checks.Fixture) -> None:
    path = copy.path / "provenance.json"
    told = json.loads(path.read_text())
    told["files"]["logits.safetensors"] = "0" * 64
    path.write_text(json.dumps(told))
    with pytest.raises(AssertionError):
        checks.provenance(copy)


def test_a_fixture_made_on_a_cpu_is_not_accepted_as_one_of_a_gpu(copy: checks.Fixture) -> None:
    with pytest.raises(AssertionError):
        checks.provenance(checks.Fixture(copy.path, "cuda"))


def test_another_loss_is_seen(copy: checks.Fixture, answers: dict[str, Any]) -> None:
    answer = answers[f"cpu-{STAND_INS[0]}-1"]["resumed"]["restore"]
    checks.resumed(copy, answer)
    path, run = copy.path / "run.json", copy.run
    run["following"][7] *= 1 + 2 * copy.tolerance
    path.write_text(json.dumps(run))
    with pytest.raises(AssertionError):
        checks.resumed(copy, answer)
    run["following"][7], run["losses"][-1] = float("nan"), run["losses"][0]
    path.write_text(json.dumps(run))
    with pytest.raises(AssertionError):
        checks.resumed(copy, answer)
    with pytest.raises(AssertionError):
        checks.training(copy)


def test_other_logits_are_seen(answers: dict[str, Any]) -> None:
    answer = answers[f"cpu-{STAND_INS[0]}-plain"]
    with pytest.raises(AssertionError):
        checks.logits({**answer, "bf16": answer["largest"] / 10}, "bf16")
