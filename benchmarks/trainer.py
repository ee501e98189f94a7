"""Measure a ZeRO-3 save of the Hugging Face Trainer through ``CkptCallback`` against its own save.

    python benchmarks/trainer.py [--ranks 2] [--parameters 100] [--runs 5]

The Trainer's own save gathers the 16-bit weights on rank 0 (``stage3_gather_16bit_weights_on_model_save``), writes them
with ``save_model``, and saves the engine. The callback saves the engine as a commit: blocking, or in the background.
The weights for ``from_pretrained`` are exported in the background; that time is shown as well. Quote the ratios.
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

DATA = ROOT / "trainer"


def main() -> None:
    """Start the ranks, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parameters", type=float, default=100, help="millions")
    parser.add_argument("--width", type=int, default=1024, help="hidden size of the model")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    DATA.mkdir(parents=True, exist_ok=True)
    given = {"parameters": int(options.parameters * 10**6), "width": options.width, "runs": options.runs}
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "LOCAL_SIZE": str(options.ranks),
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
    script = str(Path(__file__).with_name("trainer_rank.py"))
    done = subprocess.run(
        [*command, script, json.dumps(given), str(DATA)], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    print(f"\n=== Hugging Face Trainer, ZeRO-3, {options.ranks} ranks, {options.parameters:g}M parameters ===")
    print(done.stdout[done.stdout.index("::") + 2 :].strip(), flush=True)
    shutil.rmtree(DATA, ignore_errors=True)


if __name__ == "__main__":
    main()
