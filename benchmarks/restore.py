"""Measure ckpttool.load on other ranks against DeepSpeed's load on the same, and against its universal checkpoints.

    python benchmarks/restore.py [--runs N] [--stages 2 3] [--scale large|small|tiny]

A checkpoint of 4 ranks is loaded on 4, 2 and 3, and one of 2 ranks on 4. The base is DeepSpeed's own load of the same
bytes on the same ranks. The first load of a process, as in a resume, is reported apart from the median of later loads,
for which the optimizer's states are already allocated. The checkpoints are made by ``consolidate.py``. Quote the
ratios: the seconds are this machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

from consolidate import HERE, PYTHON, RANKS, checkpoint
from measure import DATA, SCALES, Command, keep, run_once

if TYPE_CHECKING:
    from pathlib import Path


ROWS: dict[str, dict[str, list[float]]] = {}
"""The figures of one stage, by name and quantity."""


def restore(root: Path, stage: int, scale: str, ranks: int, way: str, runs: int) -> dict[str, Any]:
    """Load on a number of ranks; see ``restore_rank.py``."""
    command = [PYTHON, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [str(HERE / "restore_rank.py"), str(root), str(stage), scale, way, str(runs)]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOCAL_SIZE": str(ranks)}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    figures: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return figures


def bench_other_ranks(stage: int, scale: str, runs: int) -> None:
    """The one comparison that matters most: 4 ranks' checkpoint on 2."""
    half = RANKS // 2
    native = restore(checkpoint(stage, scale, ranks=half), stage, scale, half, "native", runs)
    _row(f"engine.load_checkpoint, {half} on {half}", native, native)
    changed = restore(checkpoint(stage, scale), stage, scale, half, "ckpttool", runs)
    _row(f"ckpttool.load, {RANKS} on {half}", changed, native)


def bench_stage(stage: int, scale: str, runs: int) -> None:
    """All comparisons of one stage."""
    four, two = checkpoint(stage, scale), checkpoint(stage, scale, ranks=2)
    out = DATA / "universal"
    print(f"\n=== ZeRO-{stage}, {scale} ===")
    print(f"{'':52}{'first s':>8}{'again s':>8}{'extra MB':>10}   of native on the same ranks: first, again")
    native = {ranks: restore(root, stage, scale, ranks, "native", runs) for ranks, root in ((4, four), (2, two))}
    for ranks, figures in native.items():
        _row(f"engine.load_checkpoint, {ranks} on {ranks}", figures, figures)
    for root, saved, ranks in ((four, 4, 4), (two, 2, 4), (four, 4, 2)):
        _row(f"ckpttool.load, {saved} on {ranks}", restore(root, stage, scale, ranks, "ckpttool", runs), native[ranks])
    _row("ckpttool.load, weights_only, 4 on 2", restore(four, stage, scale, 2, "weights", runs), native[2])
    tag = (four / "latest").read_text()
    peer = [PYTHON, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(four / tag)]
    peer += ["--output_folder", str(out / "universal"), "--inject_missing_state"]
    peer += ["--num_extract_workers", "2", "--num_merge_workers", "2"]
    made = run_once(Command("ds_to_universal", [peer], lambda: shutil.rmtree(out, ignore_errors=True)))
    (out / "latest_universal").write_text("universal")
    loaded = restore(out, stage, scale, 2, "universal", runs)
    both = {**loaded, **{key: made.wall + loaded[key] for key in ("seconds", "first")}}
    both["all"] = [made.wall + seconds for seconds in loaded["all"]]
    _row("load_universal, 4 on 2", loaded, native[2])
    _row("ds_to_universal and load_universal, 4 on 2", both, native[2])
    shutil.rmtree(out)


def _row(name: str, figures: dict[str, Any], native: dict[str, Any]) -> None:
    first, again = (figures[key] / native[key] for key in ("first", "seconds"))
    extra = figures["extra"] / 1e6
    seconds = f"{figures['first']:8.2f}{figures['seconds']:8.2f}"
    print(f"{name:52}{seconds}{extra:10.0f}   {first:.2f}x {again:.2f}x", flush=True)
    ROWS[name] = {"first": [figures["first"]], "again": figures["all"], "extra_mb": [extra]}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="counted loads, after one that is not (default: 3)")
    parser.add_argument("--stages", type=int, nargs="+", choices=(1, 2, 3), default=(2, 3))
    parser.add_argument("--scale", choices=SCALES, default="large")
    parser.add_argument("--quick", action="store_true", help="only 4 on 2, against DeepSpeed's 2 on 2")
    arguments = parser.parse_args()
    DATA.mkdir(exist_ok=True)
    bench = bench_other_ranks if arguments.quick else bench_stage
    for stage in arguments.stages:
        ROWS.clear()
        bench(stage, arguments.scale, arguments.runs)
        keep(f"zero{stage}", [name for name in ROWS if name.startswith("engine.load_checkpoint")][-1], ROWS)


if __name__ == "__main__":
    main()
