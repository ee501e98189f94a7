"""Every benchmark runs, at a small size without meaningful figures."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import sampling

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
ONCE = ["--scale", "tiny", "--runs", "1"]
RUNS = {
    "average.py": [*ONCE, "--sources", "2"],
    "consolidate.py": [*ONCE, "--peer-runs", "1", "--stages", "2"],
    "convert.py": [*ONCE, "--peer-runs", "1", "--stages", "2", "--workers", "1"],
    "copies.py": [*ONCE, "--latency", "0"],
    "fsdp2.py": [*ONCE, "--peer-runs", "1"],
    "growth.py": ["--tiny", "--runs", "1"],
    "limit.py": ONCE,
    "merge_lora.py": ONCE,
    "torch_runs.py": ["--parameters=.01", "--runs=1", "--kinds=fsdp"],
    "prove.py": ["--stages=2", "--parameters=.01", "--runs=1"],
    "restore.py": [*ONCE, "--stages", "2", "--quick"],
    "save.py": ["--ranks=2", "--stages=2", "--parameters=.01", "--width=64", "--runs=1", "--rounds=1"],
    "scale.py": ["--ranks", "3", "--layers", "2", "--hidden", "8"],
    "torch_scale.py": ["--ranks=3", "--tensors=9", "--runs=1"],
    "storage.py": [*ONCE, "--peer-runs", "0", "--latency", "0"],
    "thin.py": [*ONCE, "--stages", "2"],
    "trainer.py": ["--parameters=.01", "--width=32", "--runs=1"],
}  # fmt: skip
ON_GPU = {"gpu.py": ["--device=cpu", "--parameters=1e5", "--runs=1", "--out=/dev/null"]}
"""Measured on machines with a GPU, and recorded in a file of its own."""
SLOW = {*RUNS, *ON_GPU} - {"scale.py"}
ON_RAY = {
    "ray_offline.py": [*ONCE, "--stage", "2", "--workers", "1", "--only", "consolidate, bf16"],
    "ray_train.py": ["--parameters", "0.3", "--workers", "1", "--saves", "2", "--pause", "0", "--latency", "0"],
}
PARTS = {
    "make_checkpoint.py",
    "make_fsdp2.py",
    "prove_rank.py",
    "torch_runs_rank.py",
    "restore_rank.py",
    "save_rank.py",
    "trainer_rank.py",
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
@pytest.mark.parametrize("name", [n for n in (*RUNS, *ON_GPU) if n not in SLOW or sampling.thorough()])
def test_it_runs_and_prints_figures(name: str, data: Path) -> None:
    assert len(re.findall(r"\d\.\d+", _run(name, {**RUNS, **ON_GPU}[name], data))) >= 3


@pytest.mark.ray
@pytest.mark.thorough
@pytest.mark.parametrize("name", ON_RAY)
def test_it_runs_on_ray_and_prints_figures(name: str, data: Path) -> None:
    assert len(re.findall(r"\d\.\d+", _run(name, ON_RAY[name], data))) >= 3


def test_every_benchmark_is_run() -> None:
    assert {path.name for path in BENCHMARKS.glob("*.py")} == {*RUNS, *ON_GPU, *ON_RAY, *PARTS}


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("tables")


def _record(tables: Any, seconds: float) -> dict[str, Any]:
    """A record in which each peer of the summary takes ``seconds``, and ckpttool half a second."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in tables.SUMMARY:
        ours = {"median": 0.5, "min": 0.4, "max": 0.6}
        peer = {"median": seconds, "min": seconds, "max": seconds}
        contestants = found.setdefault((row.benchmark, row.comparison), {})
        contestants |= {row.ours: {row.quantity: ours}, row.peer: {row.quantity: peer}}
    comparisons = [
        {"benchmark": benchmark, "comparison": comparison, "commit": "abc", "contestants": contestants}
        for (benchmark, comparison), contestants in found.items()
    ]
    machine = {"cores": 2, "processor": "x", "memory_gb": 24, "file_system": "ext4", "python": "3.11", "packages": {}}
    return {"machines": {benchmark: machine for benchmark, _ in found}, "comparisons": comparisons}


def test_a_table_changes_with_the_record(tables: Any) -> None:
    text = "before\n<!-- figures: summary -->\nold\n<!-- end of figures -->\nafter\n"
    new = tables.updated(text, _record(tables, 2.0))
    assert new.startswith("before\n<!-- figures: summary -->\n| task |")
    assert new.endswith("<!-- end of figures -->\nafter\n")
    assert "| 2.00 s | 4.00 |" in new
    assert "commit" not in new
    name = tables.SUMMARY[0].benchmark
    assert "on commit abc" in tables.conditions(_record(tables, 2.0), name)
    assert tables.updated(new, _record(tables, 2.0)) == new
    assert new.count("2 cores of x") == 1
    other = _record(tables, 2.0)
    other["machines"][name] = {**other["machines"][name], "processor": "y"}
    assert "2 cores of y" in tables.conditions(other, name)
    assert re.search(r"with 2 cores of [xy],.*, or with 2 cores of [xy],", tables.conditions(other, "summary"))
    assert "| 3.00 s | 6.00 |" in tables.updated(new, _record(tables, 3.0))


def test_the_tables_are_those_of_the_record(tables: Any) -> None:
    record = json.loads(tables.RECORD.read_text(encoding="utf-8"))
    for path in tables.documents():
        text = path.read_text(encoding="utf-8")
        assert tables.updated(text, record) == text, f"{path}: run python benchmarks/tables.py"


def test_a_missing_comparison_is_named(tables: Any) -> None:
    record = _record(tables, 2.0)
    record["comparisons"].pop(0)
    with pytest.raises(KeyError, match="zero2 to fp32, cp"):
        tables.render(record, "summary")


@pytest.mark.parametrize(
    ("wall", "told"),
    [
        ((1.0, 1.1, 1.2), []),
        ((1.3, 1.4, 1.6), []),  # the base took 0.9 to 1.1 s
        ((2.1, 2.2, 2.3), ["save | zero2 | ours: wall 1.10x of the base, now 2.20x"]),
    ],
)
def test_a_comparison_of_records_names_what_became_slower_beyond_the_spread(
    tables: Any, wall: tuple[float, float, float], told: list[str]
) -> None:
    assert tables
    record = importlib.import_module("record")

    def made(least: float, median: float, most: float) -> dict[str, Any]:
        own, base = {"min": least, "median": median, "max": most}, {"min": 0.9, "median": 1.0, "max": 1.1}
        contestants = {"ours": {"wall": own}, "base": {"wall": base}, "new": {"cpu": own}}
        return {
            "comparisons": [{"benchmark": "save", "comparison": "zero2", "base": "base", "contestants": contestants}]
        }

    assert record.worse(made(1.0, 1.1, 1.2), made(*wall)) == told
    assert record.worse({"comparisons": []}, made(*wall)) == []


def test_each_table_of_the_documents_has_a_benchmark(tables: Any) -> None:
    names = set(importlib.import_module("record").BENCHMARKS) | {"summary"}
    assert tables.documents()
    for path in tables.documents():
        assert {name for _, name, _ in tables.BLOCK.findall(path.read_text(encoding="utf-8"))} <= names, path


def test_every_benchmark_is_in_the_record_and_has_a_table(tables: Any) -> None:
    scripts = {name.removesuffix(".py") for name in {*RUNS, *ON_RAY}}
    assert set(importlib.import_module("record").BENCHMARKS) == scripts
    recorded = {c["benchmark"] for c in json.loads(tables.RECORD.read_text(encoding="utf-8"))["comparisons"]}
    assert recorded == scripts
    shown = {m[2] for path in tables.documents() for m in tables.BLOCK.finditer(path.read_text(encoding="utf-8"))}
    assert shown - {"summary"} == scripts
