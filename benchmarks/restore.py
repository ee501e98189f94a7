"""Measure ckpttool.load on other ranks against DeepSpeed's load on the same, and against its universal checkpoints.

    python benchmarks/restore.py [--rounds N] [--runs N] [--stages 2 3] [--scale large|small|tiny]

A checkpoint of 4 ranks is loaded on 4 and 2, and one of 2 ranks on 2 and 4. The base is DeepSpeed's own load of the
same bytes on the same ranks. The first load of a process, as in a resume, is reported apart from later loads, for which
the optimizer's states are already allocated. The checkpoints are made by ``consolidate.py``. Quote the ratios: the
seconds are this machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
from typing import TYPE_CHECKING, Any

from consolidate import HERE, PYTHON, checkpoint
from measure import DATA, SCALES, Command, keep, run_once

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

UNIVERSAL = "load_universal, 4 on 2"


def restore(root: Path, stage: int, scale: str, ranks: int, way: str, runs: int) -> dict[str, Any]:
    """Load on a number of ranks; see ``restore_rank.py``."""
    command = [PYTHON, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [str(HERE / "restore_rank.py"), str(root), str(stage), scale, way, str(runs)]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOCAL_SIZE": str(ranks)}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{way}: {done.stderr[-3000:]}")
    figures: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return figures


def bench(stage: int, scale: str, runs: int, rounds: int, *, quick: bool) -> None:
    """Compare the ways of one stage; each round starts new processes, every second one in the reverse order."""
    four, two = checkpoint(stage, scale), checkpoint(stage, scale, ranks=2)
    out = DATA / "universal"
    ways = [("engine.load_checkpoint, 2 on 2", two, 2, "native"), ("ckpttool.load, 4 on 2", four, 2, "ckpttool")]
    if not quick:
        ways += [
            ("engine.load_checkpoint, 4 on 4", four, 4, "native"),
            ("ckpttool.load, 4 on 4", four, 4, "ckpttool"),
            ("ckpttool.load, 2 on 2", two, 2, "ckpttool"),
            ("ckpttool.load, 2 on 4", two, 4, "ckpttool"),
            ("ckpttool.load, weights_only, 4 on 2", four, 2, "weights"),
            (UNIVERSAL, out, 2, "universal"),
        ]
        made = convert(four, out)
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name, *_ in ways}
    for number in range(rounds):
        for name, root, ranks, way in ways[:: -1 if number % 2 else 1]:
            taken[name].append(restore(root, stage, scale, ranks, way, runs))
    rows = {name: _row(figures) for name, figures in taken.items()}
    if not quick:
        row = rows[UNIVERSAL]
        rows[f"ds_to_universal and {UNIVERSAL}"] = {
            "first": [made + seconds for seconds in row["first"]],
            "again": [made + seconds for seconds in row["again"]],
            "extra_mb": row["extra_mb"],
        }
    _print(f"ZeRO-{stage}, {scale}", rows)
    for ranks in (2,) if quick else (2, 4):
        base = f"engine.load_checkpoint, {ranks} on {ranks}"
        keep(f"zero{stage} on {ranks}", base, {name: row for name, row in rows.items() if name.endswith(f"on {ranks}")})
    if not quick:
        shutil.rmtree(out)


def convert(source: Path, out: Path) -> float:
    """Convert to a universal checkpoint with DeepSpeed; returns the seconds."""
    peer = [PYTHON, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    peer += ["--input_folder", str(source / (source / "latest").read_text()), "--output_folder", str(out / "universal")]
    peer += ["--num_extract_workers", "2", "--num_merge_workers", "2"]
    made = run_once(Command("ds_to_universal", [peer], lambda: shutil.rmtree(out, ignore_errors=True)))
    (out / "latest_universal").write_text("universal")
    return made.wall


def _row(figures: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    return {
        "first": [one["first"] for one in figures],
        "again": [seconds for one in figures for seconds in one["again"]],
        "extra_mb": [one["extra"] / 1e6 for one in figures],
    }


def _print(title: str, rows: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    print(f"\n=== {title} ===")
    print(f"{'':52}{'first s':>8}{'again s':>8}{'extra MB':>10}   of native on the same ranks: first, again")
    for name, row in rows.items():
        native = rows[f"engine.load_checkpoint, {name[-1]} on {name[-1]}"]
        first, again = (statistics.median(row[key]) for key in ("first", "again"))
        ratios = first / statistics.median(native["first"]), again / statistics.median(native["again"])
        print(f"{name:52}{first:8.2f}{again:8.2f}{max(row['extra_mb']):10.0f}   {ratios[0]:.2f}x {ratios[1]:.2f}x")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each way (default: 3)")
    parser.add_argument("--runs", type=int, default=2, help="loads of a process after its first one (default: 2)")
    parser.add_argument("--stages", type=int, nargs="+", choices=(1, 2, 3), default=(2, 3))
    parser.add_argument("--scale", choices=SCALES, default="large")
    parser.add_argument("--quick", action="store_true", help="only 4 on 2, against DeepSpeed's 2 on 2")
    arguments = parser.parse_args()
    DATA.mkdir(exist_ok=True)
    for stage in arguments.stages:
        bench(stage, arguments.scale, arguments.runs, arguments.rounds, quick=arguments.quick)


if __name__ == "__main__":
    main()
