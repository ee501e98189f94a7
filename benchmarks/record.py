"""Run every benchmark on one commit, and write the figures to ``benchmarks/record.json``.

    python benchmarks/record.py [--commit REV] [--only consolidate convert ...] [--data DIR]
    python benchmarks/record.py --compare OLD.json    # measures nothing: what became slower or larger since

The code of the commit is measured with the benchmark scripts of this checkout. Each comparison alternates its
contestants and reverses their order every second round; the record has the median, the minimum and the maximum of every
quantity, the commit, and the kind of machine of each benchmark. ``tables.py`` writes the tables of README and docs from
the record.

``--compare`` compares the record with an older one: ratios to the base of each comparison, as seconds differ between
machines. A contestant is worse if all its runs, against all runs of the base, are above the old ones.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpttool.storage.local_writer import file_system_of

if TYPE_CHECKING:
    from collections.abc import Mapping

HERE = Path(__file__).resolve().parent
RECORD = HERE / "record.json"
BENCHMARKS = {
    "consolidate": ["--runs", "3", "--peer-runs", "2"],
    "convert": ["--runs", "3", "--peer-runs", "2", "--workers", "2", "--stages", "2"],
    "fsdp2": ["--runs", "3", "--peer-runs", "3"],
    "limit": ["--runs", "3"],
    "growth": ["--runs", "2"],
    "average": ["--runs", "3"],
    "merge_lora": ["--runs", "3"],
    "save": ["--ranks", "2", "--stages", "2", "3", "--parameters", "1", "10", "100", "--runs", "3", "--rounds", "2"],
    "prove": ["--runs", "7"],
    "torch_runs": ["--runs", "5"],
    "restore": ["--rounds", "2", "--runs", "2", "--stages", "3"],
    "thin": ["--runs", "3", "--scale", "small", "--stages", "2"],
    "trainer": ["--ranks", "2", "--parameters", "100", "--runs", "3"],
    "ray_offline": ["--workers", "1", "2", "--runs", "2"],
    "ray_train": ["--parameters", "10", "--workers", "2", "--saves", "4"],
    "scale": ["--runs", "2"],
    "torch_scale": ["--runs", "2"],
    "storage": ["--runs", "2", "--peer-runs", "1", "--latency", "0.05"],
    "copies": ["--runs", "3"],
}
"""Options of each benchmark."""
PACKAGES = ("numpy", "torch", "deepspeed", "ray", "transformers", "s3fs")


def summary(values: list[float]) -> dict[str, float]:
    """Median, minimum, maximum and number of the values."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
        "runs": len(values),
    }


def machine(data: Path) -> dict[str, Any]:
    """The kind of machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")]
    data.mkdir(parents=True, exist_ok=True)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory),
        "processor": models[0] if models else platform.machine(),
        "file_system": file_system_of(str(data)),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def run(name: str, code: Path, data: Path, record: Path) -> None:
    """Run one benchmark on the code of a directory; its comparisons are appended to ``record``."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(code),
        "CKPTTOOL_BENCHMARK_DATA": str(data),
        "CKPTTOOL_BENCHMARK_RECORD": str(record),
    }
    command = [sys.executable, str(HERE / f"{name}.py"), *BENCHMARKS[name]]
    print(f"== {name} {' '.join(BENCHMARKS[name])}", flush=True)
    subprocess.run(command, env=environment, check=True)


def worse(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a line for each quantity that has grown beyond the spread of both records."""
    before = {(c["benchmark"], c["comparison"]): c for c in old["comparisons"]}
    lines = []
    for comparison in new["comparisons"]:
        key = comparison["benchmark"], comparison["comparison"]
        for name, quantities in comparison["contestants"].items():
            for quantity in quantities:
                was, now = (_ratio(c, name, quantity) for c in (before.get(key), comparison))
                if was is None or now is None or name == comparison["base"]:
                    continue
                if now[0] > was[2]:
                    lines.append(f"{' | '.join(key)} | {name}: {quantity} {was[1]:.2f}x of the base, now {now[1]:.2f}x")
    return lines


def _ratio(comparison: Mapping[str, Any] | None, name: str, quantity: str) -> tuple[float, float, float] | None:
    """Return the least, the median and the largest ratio of a contestant to the base; None without figures."""
    contestants = {} if comparison is None else comparison["contestants"]
    own, base = (contestants.get(one, {}).get(quantity) for one in (name, comparison and comparison["base"]))
    if own is None or base is None or not base["min"]:
        return None
    return own["min"] / base["max"], own["median"] / base["median"], own["max"] / base["min"]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="HEAD", help="the code to measure (default: HEAD)")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--data", type=Path, default=HERE / ".data", help="where checkpoints are made")
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="print what became slower, measure nothing")
    arguments = parser.parse_args()
    if arguments.compare is not None:
        found = worse(json.loads(arguments.compare.read_text()), json.loads(RECORD.read_text()))
        print("\n".join(found) or "nothing became slower beyond the spread")
        sys.exit(bool(found))
    git = ["git", "-C", str(HERE)]
    commit = subprocess.run(
        [*git, "rev-parse", "--short=12", arguments.commit], capture_output=True, text=True, check=True
    ).stdout.strip()
    old = json.loads(RECORD.read_text()) if RECORD.exists() else {"machines": {}, "comparisons": []}
    kept = [c for c in old["comparisons"] if c["benchmark"] not in arguments.only]
    with tempfile.TemporaryDirectory() as scratch:
        code, lines = Path(scratch) / "code", Path(scratch) / "record.jsonl"
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(code), commit], check=True)
        try:
            for name in arguments.only:
                run(name, code, arguments.data, lines)
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(code)], check=True)
        measured = [json.loads(line) for line in lines.read_text().splitlines()]
    today = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
    for comparison in measured:
        runs = comparison.pop("runs")
        comparison["contestants"] = {
            name: {quantity: summary(values) for quantity, values in quantities.items()}
            for name, quantities in runs.items()
        }
        comparison |= {"commit": commit, "date": today}
    machines = old["machines"] | dict.fromkeys(arguments.only, machine(arguments.data))
    record = {"machines": machines, "comparisons": kept + measured}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {RECORD}")


if __name__ == "__main__":
    main()
