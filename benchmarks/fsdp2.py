"""Measure exports of FSDP2 checkpoints against the tools of each framework, side by side in one run.

    python benchmarks/fsdp2.py [--runs N] [--peer-runs N] [--scale large|small|tiny] [--verl PYTHON]

The checkpoints (245M parameters, 4 ranks, fp32, AdamW) are made by torch at the first run and kept in ``.data``: 8 GB.
``--verl`` (or ``BENCHMARK_VERL``) is the Python of an environment with verl, whose merger is measured too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from measure import DATA, TRIAL, Command, alternate, print_table

HERE = Path(__file__).resolve().parent
RANKS = 2 if TRIAL else 4
PYTHON = sys.executable
CKPTTOOL = str(Path(PYTHON).with_name("ckpttool"))
MERGE = """
import sys
from accelerate.utils import merge_fsdp_weights
merge_fsdp_weights(sys.argv[1], sys.argv[2], safe_serialization=True)
"""
CONSOLIDATE = """
import glob, os, sys
from safetensors import safe_open
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
os.mkdir(sys.argv[2])
names = {name: 1 for path in glob.glob(sys.argv[1] + "/*.safetensors") for name in safe_open(path, "pt").keys()}
consolidate_safetensors_files(sys.argv[1], sys.argv[2], names)
"""
TO_TORCH = """
import os, sys
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
os.mkdir(sys.argv[2])
dcp_to_torch_save(sys.argv[1], sys.argv[2] + "/model.pt")
"""


def run(scale: str) -> Path:
    """A run in every layout, made once."""
    root = DATA / f"fsdp2-{scale}"
    if not (root / "done").exists():
        print(f"making {root.name} with torch ...", flush=True)
        shutil.rmtree(root, ignore_errors=True)
        command = [PYTHON, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
        command += [str(HERE / "make_fsdp2.py"), str(root), scale]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    return root


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="counted runs against cp (default: 5)")
    parser.add_argument("--peer-runs", type=int, default=3, help="counted runs against other tools (default: 3)")
    parser.add_argument("--scale", choices=("large", "small", "tiny"), default="large")
    parser.add_argument("--verl", default=os.environ.get("BENCHMARK_VERL"), help="Python of an environment with verl")
    arguments = parser.parse_args()
    DATA.mkdir(exist_ok=True)
    root, out = run(arguments.scale), DATA / "out"

    def command(name: str, reads: Path, *words: str) -> Command:
        return Command(name, [[str(word) for word in words]], lambda: shutil.rmtree(out, ignore_errors=True), reads)

    def export(src: Path, *options: str) -> Command:
        words = (CKPTTOOL, "consolidate", str(src), str(out), *(options or ("--to", "safetensors")))
        return command("ckpttool consolidate", src, *words)

    verl, trainer, shards = root / "verl/global_step_1/actor", root / "trainer/checkpoint-1", root / "shards"
    model = trainer / "pytorch_model_fsdp_0"

    def script(name: str, code: str, src: Path) -> Command:
        return command(name, src, PYTHON, "-c", code, str(src), str(out))

    peers = [
        ("DCP to torch.save", export(model, "--to", "torch"), script("dcp_to_torch_save", TO_TORCH, model)),
        ("DCP of Accelerate to safetensors", export(model), script("merge_fsdp_weights", MERGE, model)),
        (
            "DCP in safetensors, made whole",
            export(shards, "--to", "safetensors", "--allow-partial"),
            script("consolidate_safetensors_files", CONSOLIDATE, shards),
        ),
    ]
    if arguments.verl:
        merger = (arguments.verl, "-m", "verl.model_merger", "merge", "--backend", "fsdp", "--local_dir", str(verl))
        theirs = command("verl.model_merger", verl, *merger, "--target_dir", str(out))
        peers.insert(0, ("verl to bf16 safetensors", export(verl, "--to", "safetensors", "--dtype", "bf16"), theirs))
    for title, ours, theirs in peers:
        print_table(title, alternate([ours, theirs], arguments.peer_runs), ours.name, title)
    words = (CKPTTOOL, "convert", str(verl), str(out))
    for to in (("dcp", "--layout", "accelerate"), ("ranks", "--layout", "verl", "--world-size", "3")):
        title = f"verl, convert --to {to[0]}"
        copy = command("cp -r of the source", verl, "cp", "-r", str(verl), str(out))
        usages = alternate([command("ckpttool convert", verl, *words, "--to", *to), copy], arguments.runs)
        print_table(title, usages, copy.name, title)
    shutil.rmtree(out, ignore_errors=True)


if __name__ == "__main__":
    main()
