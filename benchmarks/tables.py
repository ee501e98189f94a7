"""Write the tables of README and docs from ``benchmarks/record.json``.

    python benchmarks/tables.py [--check]

A table is between ``<!-- figures: NAME -->`` and ``<!-- end of figures -->``; NAME is "summary", or a benchmark.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RECORD = HERE / "record.json"
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """One line of the summary: ckpttool against one peer."""

    task: str
    benchmark: str
    comparison: str
    ours: str
    peer: str
    """Contestant of the record."""
    name: str
    """Name of the peer in the summary."""
    quantity: str = "wall"


SUMMARY = (
    Row(
        "export fp32 weights",
        "consolidate",
        "zero2 to fp32, cp",
        "ckpttool consolidate (fp32)",
        "cp of the same output",
        "`cp` of the output",
    ),
    Row(
        "export fp32 weights",
        "consolidate",
        "zero2 to fp32, script",
        "ckpttool consolidate (fp32)",
        "zero_to_fp32.py --safe_serialization",
        "`zero_to_fp32.py`",
    ),
    Row(
        "export bf16 weights, ZeRO-3",
        "consolidate",
        "zero3 to bf16, script",
        "ckpttool consolidate (bf16)",
        "zero_to_fp32.py, then cast to bf16",
        "`zero_to_fp32.py` and a cast",
    ),
    Row(
        "convert to universal",
        "convert",
        "zero2 --to universal, peer",
        "ckpttool convert --to universal",
        "ds_to_universal, 2 workers",
        "`ds_to_universal`, 2 workers",
    ),
    Row(
        "resume 4 ranks on 2, ZeRO-3",
        "restore",
        "zero3 on 2",
        "ckpttool.load, 4 on 2",
        "ds_to_universal and load_universal, 4 on 2",
        "`ds_to_universal`, `load_universal`",
        "first",
    ),
    Row(
        "save, on the disk, ZeRO-2",
        "save",
        "zero2, 2 ranks, 100M, blocking",
        "manager.save",
        "engine.save_checkpoint and fsync",
        "`engine.save_checkpoint`, `fsync`",
    ),
    Row(
        "save, ZeRO-2",
        "save",
        "zero2, 2 ranks, 100M, blocking",
        "manager.save",
        "engine.save_checkpoint",
        "`engine.save_checkpoint`, not on the disk",
    ),
    Row(
        "bucket to bucket, 50 ms away",
        "storage",
        "to bucket, 50 ms",
        "ckpttool",
        "aws s3 cp, zero_to_fp32.py, aws s3 cp",
        "`aws s3 cp`, `zero_to_fp32.py`, `aws s3 cp`",
    ),
)


def render(record: dict[str, Any], name: str) -> str:
    """Return one table in Markdown, with a line on its conditions.

    Raises:
        KeyError: The record has no such comparison.
    """
    lines = _summary(record) if name == "summary" else _benchmark(record, name)
    return "\n".join([*lines, "", conditions(record, name), ""])


def _summary(record: dict[str, Any]) -> list[str]:
    heading = "| task | ckpttool | instead | | times as fast | memory: instead / ckpttool |"
    lines = [heading, "|---|---|---|---|---|---|"]
    for row in SUMMARY:
        contestants = _comparison(record, row.benchmark, row.comparison)["contestants"]
        ours, peer = contestants[row.ours], contestants[row.peer]
        took, takes = ours[row.quantity]["median"], peer[row.quantity]["median"]
        memory = f"{peer['peak_mb']['max'] / ours['peak_mb']['max']:.1f}" if "peak_mb" in ours else ""
        lines.append(f"| {row.task} | {took:.2f} s | {row.name} | {takes:.2f} s | {takes / took:.2f} | {memory} |")
    return lines


def _benchmark(record: dict[str, Any], name: str) -> list[str]:
    lines = ["| comparison | contestant | wall s (least to most) | CPU s | peak MB | of the base |"]
    lines += ["|---|---|---|---|---|---|"]
    for comparison in (c for c in record["comparisons"] if c["benchmark"] == name):
        contestants = comparison["contestants"]
        base = contestants[comparison["base"]]
        title = comparison["comparison"]
        for contestant, figures in contestants.items():
            if "bytes" in figures:
                size, of = figures["bytes"]["median"], base["bytes"]["median"]
                lines.append(f"| {title} | {contestant} | {size / 1e6:.0f} MB | | | {size / of:.2f} |")
                title = ""
                continue
            wall, reference = _wall(figures), _wall(base)
            cpu = f"{figures['cpu']['median']:.2f}" if "cpu" in figures else ""
            memory = next((f"{figures[q]['max']:.0f}" for q in ("peak_mb", "extra_mb") if q in figures), "")
            spread = f"{wall['median']:.2f} ({wall['min']:.2f} to {wall['max']:.2f})"
            lines.append(
                f"| {title} | {contestant} | {spread} | {cpu} | {memory} | {wall['median'] / reference['median']:.2f} |"
            )
            title = ""
    return lines


def _wall(figures: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = figures.get("wall") or figures["first"]
    return found


def _comparison(record: dict[str, Any], benchmark: str, name: str) -> dict[str, Any]:
    for comparison in record["comparisons"]:
        if (comparison["benchmark"], comparison["comparison"]) == (benchmark, name):
            found: dict[str, Any] = comparison
            return found
    raise KeyError(f"{RECORD}: no comparison {name!r} of {benchmark}; run benchmarks/record.py --only {benchmark}")


def conditions(record: dict[str, Any], name: str) -> str:
    """Return the line on the machine and the releases of a table; of one benchmark also the commits."""
    commits = sorted({c["commit"] for c in record["comparisons"] if name == c["benchmark"]})
    of_commit = f" on commit {', '.join(commits)}" if commits else ""  # of the summary: docs/benchmarks.md has them
    benchmarks = [row.benchmark for row in SUMMARY] if name == "summary" else [name]
    machines = dict.fromkeys(_machine(record["machines"][benchmark]) for benchmark in benchmarks)
    return (
        f"Medians, measured{of_commit} with {', or with '.join(machines)}. "
        "The ratios carry over to other machines better than the seconds."
    )


def _machine(m: dict[str, Any]) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in m["packages"].items())
    hardware = f"{m['cores']} cores of {m['processor']}, {m['memory_gb']} GB of memory, {m['file_system']}"
    return f"{hardware}, Python {m['python']}, {versions}"


def updated(text: str, record: dict[str, Any]) -> str:
    """Return a document with all of its tables updated."""
    return BLOCK.sub(lambda m: f"{m[1]}{render(record, m[2])}{m[3]}", text)


def documents() -> list[Path]:
    """Return the documents with tables."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in found if BLOCK.search(path.read_text(encoding="utf-8"))]


def main() -> None:
    """Write all tables, or only check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table differs")
    arguments = parser.parse_args()
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    for path in documents():
        text = path.read_text(encoding="utf-8")
        new = updated(text, record)
        if new != text and arguments.check:
            sys.exit(f"{path}: a table differs from {RECORD.name}; run python benchmarks/tables.py")
        path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
