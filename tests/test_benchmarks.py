"""Every benchmark runs, at a small size without meaningful figures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
ONCE = ["--scale", "tiny", "--runs", "1"]
RUNS = {
    "consolidate.py": [*ONCE, "--peer-runs", "1", "--stages", "2"],
    "convert.py": [*ONCE, "--peer-runs", "1", "--stages", "2", "--workers", "1"],
    "restore.py": [*ONCE, "--stages", "2", "--quick"],
    "save.py": ["--ranks=2", "--stages=2", "--parameters=.01", "--width=64", "--runs=1", "--rounds=1"],
    "scale.py": ["--ranks", "3", "--layers", "2", "--hidden", "8"],
    "storage.py": [*ONCE, "--peer-runs", "0", "--latency", "0"],
}  # fmt: skip
ON_RAY = {
    "ray_offline.py": [*ONCE, "--stage", "2", "--workers", "1", "--only", "consolidate, bf16"],
    "ray_train.py": ["--parameters", "0.3", "--workers", "1", "--saves", "2", "--pause", "0", "--latency", "0"],
}
PARTS = {
    "make_checkpoint.py",
    "restore_rank.py",
    "save_rank.py",
    "cast_bf16.py",
    "measure.py",
    "s3_server.py",
    "record.py",
    "tables.py",
}
"""What the others run or import."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where checkpoints are made, once for all."""
    return tmp_path_factory.mktemp("benchmarks")


def _run(name: str, options: list[str], data: Path) -> str:
    environment = {
        **os.environ, "CKPTTOOL_BENCHMARK_DATA": str(data), "CKPTTOOL_BENCHMARK_TRIAL": "1", "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip
    command = [sys.executable, str(BENCHMARKS / name), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.deepspeed
@pytest.mark.parametrize("name", RUNS)
def test_it_runs_and_prints_figures(name: str, data: Path) -> None:
    assert len(re.findall(r"\d\.\d+", _run(name, RUNS[name], data))) >= 3


@pytest.mark.ray
@pytest.mark.parametrize("name", ON_RAY)
def test_it_runs_on_ray_and_prints_figures(name: str, data: Path) -> None:
    assert len(re.findall(r"\d\.\d+", _run(name, ON_RAY[name], data))) >= 3


def test_every_benchmark_is_run() -> None:
    assert {path.name for path in BENCHMARKS.glob("*.py")} == {*RUNS, *ON_RAY, *PARTS}
