"""Measure inspect and consolidate against ``cp`` and ``zero_to_fp32.py``, side by side in one run.

    python benchmarks/consolidate.py [--runs N] [--stages 2 3] [--peer-runs N] [--scale large|small|tiny]

The checkpoints (253M parameters and a tenth of it, 4 ranks, bf16) are made by real DeepSpeed at the first run and kept
in ``benchmarks/.data`` (or ``$CKPTTOOL_BENCHMARK_DATA``): 7 GB. Quote the ratios: the seconds are this machine's.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from measure import DATA, SCALES, TRIAL, Command, Usage, alternate, keep, print_table, run_once

HERE = Path(__file__).resolve().parent
RANKS = 2 if TRIAL else 4
PYTHON = sys.executable
CKPTTOOL = str(Path(PYTHON).with_name("ckpttool"))

# Counts the bytes that inspect reads from files, without Python's own start-up.
COUNT_BYTES = """
import sys
from ckpttool import storage, inspect
count = 0
read = storage.LocalReader.read
def counted(self, start, end):
    global count
    count += end - start
    return read(self, start, end)
storage.LocalReader.read = counted
checkpoint = inspect(sys.argv[1])
print(count, checkpoint.nbytes)
"""


def checkpoint(stage: int, scale: str, ranks: int = RANKS) -> Path:
    """A checkpoint made by real DeepSpeed, made once."""
    root = DATA / (f"zero{stage}-{scale}" if ranks == RANKS else f"zero{stage}-dp{ranks}-{scale}")
    if not (root / "latest").exists():
        print(f"making {root.name} with DeepSpeed ...", flush=True)
        shutil.rmtree(root, ignore_errors=True)
        command = [PYTHON, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command += [str(HERE / "make_checkpoint.py"), str(root), str(stage), scale]
        env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOCAL_SIZE": str(ranks)}
        subprocess.run(command, check=True, env=env, capture_output=True)
    return root


def ours(root: Path, out: Path, dtype: str) -> Command:
    """Our consolidation."""
    command = [CKPTTOOL, "consolidate", str(root), str(out), "--to", "safetensors", "--dtype", dtype]
    return Command(f"ckpttool consolidate ({dtype})", [command], lambda: shutil.rmtree(out, ignore_errors=True), root)


def copy(source: Path, out: Path, name: str) -> Command:
    """``cp`` of the bytes that ckpttool writes."""
    return Command(name, [["cp", "-r", str(source), str(out)]], lambda: shutil.rmtree(out, ignore_errors=True), source)


def peer(root: Path, out: Path, *, cast: bool = False) -> Command:
    """DeepSpeed's own script, followed by a cast if bf16 is wanted."""
    script = str(root / "zero_to_fp32.py")
    steps = [[PYTHON, script, str(root), str(out), "--safe_serialization"]]
    if cast:
        steps.append([PYTHON, str(HERE / "cast_bf16.py"), str(out)])
    name = "zero_to_fp32.py, then cast to bf16" if cast else "zero_to_fp32.py --safe_serialization"
    return Command(name, steps, lambda: shutil.rmtree(out, ignore_errors=True), root)


def evict(root: Path) -> None:
    """Evict a checkpoint's files from the page cache."""
    for path in root.rglob("*.pt"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def drop_caches() -> bool:
    """Empty the whole page cache, Python itself included, where that is allowed and something is measured."""
    if TRIAL:
        return False
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def bench_inspect(root: Path, runs: int) -> None:
    """Time and bytes of ``inspect``."""
    command = [[CKPTTOOL, "inspect", str(root)]]
    cold = Command("cold", command, lambda: evict(root))
    warm = Command("warm", command, lambda: None)
    usages = alternate([cold, warm], runs)
    taken = {n: {q: [getattr(u, q) for u in f.runs] for q in ("wall", "cpu", "peak_mb")} for n, f in usages.items()}
    keep(f"inspect {root.name}", "warm", taken)
    frozen = (
        f", {run_once(warm).wall:.2f} s with an empty page cache (Python read from disk too)" if drop_caches() else ""
    )
    counted = subprocess.run([PYTHON, "-c", COUNT_BYTES, str(root)], capture_output=True, text=True, check=True)
    read, total = map(int, counted.stdout.split())
    print(
        f"inspect: {usages['cold'].wall:.2f} s with the checkpoint not in memory, "
        f"{usages['warm'].wall:.2f} s warm{frozen}; "
        f"{usages['warm'].peak_mb:.0f} MB peak, read {read:,} of {total:,} bytes (1/{total // read:,})"
    )


def bench_stage(stage: int, scale: str, runs: int, peer_runs: int) -> None:
    """All comparisons on one stage's checkpoint."""
    root, out = checkpoint(stage, scale), DATA / "out"
    print(f"\n=== ZeRO-{stage}, {RANKS} ranks, {SCALES[scale]} parameters ===")
    bench_inspect(root, runs)
    for dtype in ("fp32", "bf16"):
        sample = DATA / f"sample-{dtype}"
        shutil.rmtree(sample, ignore_errors=True)
        made = ours(root, sample, dtype)
        run_once(made)
        name = "cp of the same output"
        usages = alternate([copy(sample, out, name), ours(root, out, dtype)], runs)
        print_table(f"to {dtype}, against cp", usages, name, f"zero{stage} to {dtype}, cp")
        theirs = peer(root, out, cast=dtype == "bf16")
        title = f"to {dtype}, against DeepSpeed's script"
        print_table(
            title, alternate([ours(root, out, dtype), theirs], peer_runs), made.name, f"zero{stage} to {dtype}, script"
        )
        shutil.rmtree(sample)
    if scale == "large":
        bench_memory(checkpoint(stage, "small"), root, out)
    shutil.rmtree(out, ignore_errors=True)


def bench_memory(small: Path, large: Path, out: Path) -> None:
    """Peak memory for a model ten times as large, against start-up."""
    start = run_once(Command("start", [[CKPTTOOL, "--version"]], lambda: None))
    peaks: dict[str, Usage] = {}
    for dtype in ("fp32", "bf16"):
        for name, root in (("24M", small), ("253M", large)):
            peaks[f"{name} to {dtype}"] = run_once(ours(root, out, dtype))
    print(
        f"\npeak memory: start-up {start.peak_mb:.0f} MB; "
        + ", ".join(f"{k} {u.peak_mb:.0f} MB" for k, u in peaks.items())
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="counted runs against cp (default: 5)")
    parser.add_argument("--peer-runs", type=int, default=3, help="counted runs against zero_to_fp32.py (default: 3)")
    parser.add_argument("--stages", type=int, nargs="+", choices=(2, 3), default=(2, 3))
    parser.add_argument("--scale", choices=SCALES, default="large")
    arguments = parser.parse_args()
    DATA.mkdir(exist_ok=True)
    for stage in arguments.stages:
        bench_stage(stage, arguments.scale, arguments.runs, arguments.peer_runs)


if __name__ == "__main__":
    main()
