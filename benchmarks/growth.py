"""Measure how the time and memory of commands, loads and saves grow with the bytes of a checkpoint, and with its ranks.

    python benchmarks/growth.py [--runs N] [--only NAME ...] [--tiny]

ZeRO-2 checkpoints of 15M, 58M and 234M parameters on 4 ranks are made by real DeepSpeed; the one of 58M is converted to
16 and 64 ranks. The slope is of logarithms: 1 means that the time grows as the bytes or the ranks do. Loads and saves
run on two ranks: the first load of a process, the second save; memory is what one rank needs beside the engine.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import subprocess
from typing import TYPE_CHECKING

from consolidate import CKPTTOOL, checkpoint
from measure import DATA, Command, Usage, keep, run_once
from restore import restore

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
PROCESSES = {"load on 2 ranks": "ckpttool", "save of 2 ranks": "save"}
"""Ways of ``restore_rank.py``."""
FACTORS = (1, 4, 16)


def on_ranks(root: Path, ranks: int) -> Path:
    """The checkpoint on another number of ranks."""
    out = root.with_name(f"{root.name}-on-{ranks}")
    if not out.exists():
        options = ["--to", "zero", "--world-size", str(ranks)]
        subprocess.run([CKPTTOOL, "convert", str(root), str(out), *options], check=True, capture_output=True)
    return out


def measured(name: str, root: Path, scale: str) -> Usage:
    """Run one command on a checkpoint, or load it or save its engine."""
    out = DATA / "out"
    if name in PROCESSES:
        shutil.rmtree(out, ignore_errors=True)
        figures = restore(root, 2, scale, 2, PROCESSES[name], 1)
        wall = figures["again"][0] if PROCESSES[name] == "save" else figures["first"]
        return Usage(wall, math.nan, figures["extra_again"] / 1e6)
    words = COMMANDS[name]
    writes = words[0] in {"consolidate", "convert"}
    command = [CKPTTOOL, words[0], str(root), *([str(out)] if writes else []), *words[1:]]
    return run_once(Command(name, [command], lambda: shutil.rmtree(out, ignore_errors=True), root))


def bench(name: str, what: str, roots: Mapping[str, tuple[Path, str]], runs: int) -> None:
    """Measure each checkpoint, and print how time and memory grow."""
    taken: dict[str, list[Usage]] = {factor: [] for factor in roots}
    for number in range(runs):
        for factor, (root, scale) in list(roots.items())[:: -1 if number % 2 else 1]:
            taken[factor].append(measured(name, root, scale))
    shutil.rmtree(DATA / "out", ignore_errors=True)
    quantities = ("wall", "peak_mb") if name in PROCESSES else ("wall", "cpu", "peak_mb")
    runs_of = {factor: {q: [getattr(u, q) for u in usages] for q in quantities} for factor, usages in taken.items()}
    walls = [statistics.median(values["wall"]) for values in runs_of.values()]
    peaks = "".join(f"{max(values['peak_mb']):7.0f}" for values in runs_of.values())
    slope = math.log(walls[2] / walls[1], 4)
    print(f"{name:24}{what:8}{''.join(f'{w:8.2f}' for w in walls)}   slope {slope:5.2f}   MB{peaks}", flush=True)
    keep(f"{name}, {what}", "1x", runs_of)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=[*COMMANDS, *PROCESSES], default=[*COMMANDS, *PROCESSES])
    parser.add_argument("--tiny", action="store_true", help="use the same tiny checkpoint for all sizes")
    options = parser.parse_args()
    DATA.mkdir(exist_ok=True)
    scales = {f"{factor}x": "tiny" if options.tiny else f"growth-{factor}x" for factor in FACTORS}
    sizes = {factor: (checkpoint(2, scale), scale) for factor, scale in scales.items()}
    base, scale = sizes["4x"]
    ranks = {"1x": (base, scale), **{f"{f}x": (on_ranks(base, 4 * f), scale) for f in FACTORS[1:]}}
    for name in options.only:
        bench(name, "bytes", sizes, options.runs)
        if PROCESSES.get(name) != "save":  # its ranks are processes, and here are two cores
            bench(name, "ranks", ranks, options.runs)


if __name__ == "__main__":
    main()
