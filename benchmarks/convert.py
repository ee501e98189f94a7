"""Measure convert against ``cp -r`` and ``ds_to_universal``, side by side in one run.

    python benchmarks/convert.py [--runs N] [--stages 2 3] [--peer-runs N] [--workers 1 2 4] [--scale large|tiny]

It uses the checkpoints of ``consolidate.py``. Quote the ratios: the seconds are this machine's.
"""

from __future__ import annotations

import argparse
import shutil
from typing import TYPE_CHECKING

from consolidate import CKPTTOOL, PYTHON, checkpoint, copy
from measure import DATA, SCALES, Command, alternate, print_table, run_once

if TYPE_CHECKING:
    from pathlib import Path

COMMAND = "ckpttool convert "
ZERO = f"{COMMAND}--to zero --world-size 2"
UNIVERSAL = f"{COMMAND}--to universal"
STATES = "ckpttool consolidate --to safetensors --optimizer"
"""Writes whole optimizer states, as the universal format does."""


def convert(root: Path, out: Path, name: str) -> Command:
    """Our conversion or export; ``name`` is its command line but for the places."""
    _, command, *options = name.split()
    return Command(name, [[CKPTTOOL, command, str(root), str(out), *options]], lambda: _clear(out), root)


def peer(root: Path, out: Path, workers: int) -> Command:
    """DeepSpeed's own converter."""
    tag = (root / "latest").read_text()
    command = [PYTHON, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(root / tag)]
    command += ["--output_folder", str(out / "universal"), "--inject_missing_state"]
    command += ["--num_extract_workers", str(workers), "--num_merge_workers", str(workers)]
    return Command(f"ds_to_universal, {workers} workers", [command], lambda: _clear(out), root)


def _clear(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)


def bench_stage(stage: int, scale: str, runs: int, peer_runs: int, workers: list[int]) -> None:
    """All comparisons on one stage's checkpoint."""
    root, out, sample = checkpoint(stage, scale), DATA / "out", DATA / "sample"
    print(f"\n=== ZeRO-{stage}, 4 ranks, {SCALES[scale]} parameters ===")
    for name in (ZERO, UNIVERSAL):
        _clear(sample)
        run_once(convert(root, sample, name))
        same = copy(sample, out, "cp -r of the same output")
        usages = alternate([same, convert(root, out, name)], runs)
        print_table(
            f"{name}, against cp -r", usages, same.name, f"zero{stage}{name.removeprefix('ckpttool convert')}, cp"
        )
        written = sum(f.stat().st_size for f in sample.rglob("*") if f.is_file())
        print(f"{written:,} bytes written")
    commands = [convert(root, out, UNIVERSAL), convert(root, out, STATES), *(peer(root, out, n) for n in workers)]
    title = "to universal, against DeepSpeed's converter"
    print_table(title, alternate(commands, peer_runs), UNIVERSAL, f"zero{stage} --to universal, peer")
    small = checkpoint(stage, "small") if scale == "large" else root
    for name in (ZERO, UNIVERSAL) if scale == "large" else ():
        peaks = [run_once(convert(r, out, name)).peak_mb for r in (small, root)]
        print(f"{name}: peak memory {peaks[0]:.0f} MB for 24M parameters, {peaks[1]:.0f} MB for 253M")
    _clear(sample)
    _clear(out)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="counted runs against cp (default: 5)")
    parser.add_argument("--peer-runs", type=int, default=3, help="counted runs against DeepSpeed's (default: 3)")
    parser.add_argument("--stages", type=int, nargs="+", choices=(2, 3), default=(2, 3))
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="of ds_to_universal")
    parser.add_argument("--scale", choices=SCALES, default="large")
    arguments = parser.parse_args()
    DATA.mkdir(exist_ok=True)
    for stage in arguments.stages:
        bench_stage(stage, arguments.scale, arguments.runs, arguments.peer_runs, arguments.workers)


if __name__ == "__main__":
    main()
