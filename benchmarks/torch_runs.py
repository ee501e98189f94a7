"""Measure saves and loads of live torch runs against ``torch.distributed.checkpoint``, inside one process per rank.

    python benchmarks/torch_runs.py [--ranks 2] [--kinds fsdp ddp] [--parameters 100] [--runs 5]

* A blocking save with AdamW's states: ``CheckpointManager.save`` with and without digests, and ``get_state_dict`` with
  ``dcp.save``. Both sync their files.
* The stall of a save in the background: until ``save`` returns, and until ``dcp.async_save`` returns.
* A load into the run: ``ckpttool.load``, also with ``staged=False``, and ``dcp.load`` with ``set_state_dict``; into an
  optimizer that has states, and into one without, as after a restart.

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
from measure import TRIAL, keep

HERE = Path(__file__).resolve().parent
DATA = ROOT / "torch_runs"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", default=["fsdp", "ddp"], choices=["fsdp", "ddp"])
    parser.add_argument("--parameters", type=float, default=0.1 if TRIAL else 100, help="millions")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    for kind in options.kinds:
        shutil.rmtree(DATA, ignore_errors=True)
        DATA.mkdir(parents=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
        given = [kind, str(int(options.parameters * 10**6)), str(options.runs), str(DATA)]
        done = subprocess.run(
            [*command, str(HERE / "torch_runs_rank.py"), *given],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
        for title, (base, rows) in found.items():
            keep(f"{kind} on {options.ranks} ranks, {title}", base, rows)
            print(f"\n{kind} on {options.ranks} ranks, {title}")
            for name, quantities in rows.items():
                for quantity, values in quantities.items():
                    print(f"  {name:40} {quantity:8} {sorted(values)[len(values) // 2]:10.3f}", flush=True)
    shutil.rmtree(DATA, ignore_errors=True)


if __name__ == "__main__":
    main()
