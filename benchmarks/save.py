"""Measure CheckpointManager.save against ``engine.save_checkpoint``, inside one train loop of real DeepSpeed.

    python benchmarks/save.py [--ranks 1 2] [--stages 2 3] [--parameters 100] [--runs 5] [--rounds 8]
                              [--blocking]

* Synchronous: both save the same engine in turn. DeepSpeed leaves the bytes in the page cache; ours are on the disk,
hashed, when the call returns. So DeepSpeed's is also measured with a sync of its files after it.
* Asynchronous: how long the loop waits, against one copy of the same bytes in memory, and against a blocking save to a
  target of 100 MB/s.
* How much slower a step is while a save runs.

Quote the ratios: the seconds are this machine's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from measure import DATA as ROOT

DATA = ROOT / "save"


def main() -> None:
    """Start the ranks for each combination, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--parameters", type=float, nargs="+", default=[100], help="millions")
    parser.add_argument("--blocking", action="store_true", help="measure no saves in the background")
    parser.add_argument("--width", type=int, default=4096, help="of a layer, as in a model of 7 thousand million")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=8, help="saves during which steps are timed (default: 8)")
    options = parser.parse_args()
    DATA.mkdir(parents=True, exist_ok=True)
    for stage, millions in itertools.product(options.stages, options.parameters):
        for ranks in options.ranks:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
            given = {
                "stage": stage,
                "parameters": int(millions * 10**6),
                "runs": options.runs,
                "rounds": options.rounds,
                "width": min(options.width, int((millions * 10**6) ** 0.5)),
                "blocking": options.blocking,
            }
            environment = {
                **os.environ,
                "DS_ACCELERATOR": "cpu",
                "OMP_NUM_THREADS": "1",
                "LOCAL_SIZE": str(ranks),
                "PYTHONWARNINGS": "ignore",
            }
            script = str(Path(__file__).with_name("save_rank.py"))
            done = subprocess.run(
                [*command, script, json.dumps(given), str(DATA)],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
            print(f"\n=== ZeRO-{stage}, {ranks} ranks, {millions:g}M parameters ===")
            print(done.stdout[done.stdout.index("::") + 2 :].strip(), flush=True)
    shutil.rmtree(DATA, ignore_errors=True)


if __name__ == "__main__":
    main()
