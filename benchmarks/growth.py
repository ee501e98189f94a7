"""Measure how the time and memory of commands grow with the bytes of a checkpoint, and with its ranks.

    python benchmarks/growth.py [--runs N] [--only NAME ...] [--tiny]

ZeRO-2 checkpoints of 15M, 58M and 234M parameters on 4 ranks are made by real DeepSpeed; the one of 58M is converted to
16 and 64 ranks. The slope is of logarithms: 1 means that the time grows as the bytes or the ranks do.
"""

from __future__ import annotations

import argparse
import math
import shutil
import subprocess
from typing import TYPE_CHECKING

from consolidate import CKPTTOOL, checkpoint
from measure import DATA, Command, Figures, Usage, keep, run_once

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

COMMANDS = {
    "inspect": ["inspect"],
    "consolidate, fp32": ["consolidate", "--to", "safetensors"],
    "consolidate, bf16": ["consolidate", "--to", "safetensors", "--dtype", "bf16"],
    "convert to 2 ranks": ["convert", "--to", "zero", "--world-size", "2"],
    "convert to universal": ["convert", "--to", "universal"],
    "verify --deep": ["verify", "--deep"],
    "stats": ["stats"],
    "digest": ["digest"],
}
FACTORS = (1, 4, 16)


def on_ranks(root: Path, ranks: int) -> Path:
    """The checkpoint on another number of ranks."""
    out = root.with_name(f"{root.name}-on-{ranks}")
    if not out.exists():
        options = ["--to", "zero", "--world-size", str(ranks)]
        subprocess.run([CKPTTOOL, "convert", str(root), str(out), *options], check=True, capture_output=True)
    return out


def bench(name: str, what: str, roots: Mapping[str, Path], runs: int) -> None:
    """Run one command on each checkpoint, and print how its time and memory grow."""
    words, out = COMMANDS[name], DATA / "out"
    writes = words[0] in {"consolidate", "convert"}
    taken: dict[str, list[Usage]] = {factor: [] for factor in roots}
    for number in range(runs):
        for factor, root in list(roots.items())[:: -1 if number % 2 else 1]:
            command = [CKPTTOOL, words[0], str(root), *([str(out)] if writes else []), *words[1:]]
            taken[factor].append(
                run_once(Command(name, [command], lambda: shutil.rmtree(out, ignore_errors=True), root))
            )
    shutil.rmtree(out, ignore_errors=True)
    figures = {factor: Figures(usages) for factor, usages in taken.items()}
    *_, four, sixteen = figures.values()
    slope = math.log(sixteen.wall / four.wall, 4)
    walls = "".join(f"{one.wall:8.2f}" for one in figures.values())
    peaks = "".join(f"{one.peak_mb:7.0f}" for one in figures.values())
    print(f"{name:24}{what:8}{walls}   slope {slope:5.2f}   MB{peaks}", flush=True)
    quantities = ("wall", "cpu", "peak_mb")
    runs_of = {f: {q: [getattr(u, q) for u in one.runs] for q in quantities} for f, one in figures.items()}
    keep(f"{name}, {what}", "1x", runs_of)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--tiny", action="store_true", help="use the same tiny checkpoint for all sizes")
    options = parser.parse_args()
    DATA.mkdir(exist_ok=True)
    scales = [f"growth-{factor}x" for factor in FACTORS]
    sizes = {f"{f}x": checkpoint(2, "tiny" if options.tiny else s) for f, s in zip(FACTORS, scales, strict=True)}
    base = sizes["4x"]
    ranks = {"1x": base, **{f"{factor}x": on_ranks(base, 4 * factor) for factor in FACTORS[1:]}}
    for name in options.only:
        bench(name, "bytes", sizes, options.runs)
        bench(name, "ranks", ranks, options.runs)


if __name__ == "__main__":
    main()
