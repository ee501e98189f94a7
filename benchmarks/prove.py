"""Measure digests: of the live state during a save and after a load, and of files against the plain loops.

    python benchmarks/prove.py [--ranks 2] [--stages 2 3] [--parameters 100] [--runs 7]

* A save with and without digests, blocking and in the background, and a load with and without a proof, in turn in one
  process of real DeepSpeed for each rank. The save without digests replaces an internal function.
* ``ckpttool digest`` of the checkpoint, against loops of Python that read its files and compute SHA-256 or CRC-32.

Quote the ratios: the seconds are this machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from measure import DATA as ROOT
from measure import TRIAL, Command, alternate, keep, print_table

HERE = Path(__file__).resolve().parent
DATA = ROOT / "prove"
PYTHON = sys.executable
LOOP = """
import glob, hashlib, sys, zlib
for path in glob.glob(sys.argv[1] + "/**/*.pt", recursive=True):
    sha, crc = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            if sys.argv[2] == "sha256":
                sha.update(data)
            else:
                crc = zlib.crc32(data, crc)
"""


def train(stage: int, ranks: int, parameters: int, runs: int) -> None:
    """Save and load in turn; see ``prove_rank.py``."""
    command = [PYTHON, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [str(HERE / "prove_rank.py"), str(stage), str(parameters), str(runs), str(DATA)]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOCAL_SIZE": str(ranks)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    for title, (base, rows) in found.items():
        keep(f"zero{stage}, {title}", base, rows)
        print(f"\nzero{stage}, {title}")
        for name, quantities in rows.items():
            for quantity, values in quantities.items():
                print(f"  {name:28} {quantity:6} {sorted(values)[len(values) // 2]:8.3f}")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--parameters", type=float, default=0.1 if TRIAL else 100, help="millions")
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    DATA.mkdir(parents=True, exist_ok=True)
    for stage in options.stages:
        shutil.rmtree(DATA, ignore_errors=True)
        train(stage, options.ranks, int(options.parameters * 10**6), options.runs)
    saved = DATA / "blocking with"
    ours = str(Path(PYTHON).with_name("ckpttool"))
    commands = [Command("ckpttool digest", [[ours, "digest", str(saved)]], lambda: None, saved)]
    for name in ("sha256", "crc32"):
        loop = [PYTHON, "-c", LOOP, str(saved), name]
        commands.append(Command(f"read and {name}", [loop], lambda: None, saved))
    print_table("digest of files", alternate(commands, options.runs), "read and sha256", "digest of files")
    shutil.rmtree(DATA, ignore_errors=True)


if __name__ == "__main__":
    main()
