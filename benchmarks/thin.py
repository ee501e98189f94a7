"""Measure ``prune --thin`` against loading with DeepSpeed and saving safetensors with torch, side by side in one run.

    python benchmarks/thin.py [--runs N] [--stages 2 3] [--scale large|small|tiny]

The root has two checkpoints of the same bytes (hard links); the older one is thinned to bf16. The peer is the usual
script: ``get_fp32_state_dict_from_zero_checkpoint``, a cast, ``save_file``, ``rm`` of the old files; it neither syncs
nor compares anything. ``consolidate`` writes the same weights without reading them back.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from consolidate import CKPTTOOL, PYTHON, checkpoint
from measure import DATA, SCALES, Command, alternate, keep, print_table

if TYPE_CHECKING:
    from pathlib import Path

OLD = "global_step0"
"""Tag of the checkpoint to thin."""
SCRIPT = """
import os, shutil, sys, torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import save_file
root, tag, out = sys.argv[1:]
state = get_fp32_state_dict_from_zero_checkpoint(root, tag)
seen, tensors = set(), {}
for name, tensor in state.items():
    if tensor.data_ptr() not in seen or not tensor.numel():
        tensors[name] = tensor.to(torch.bfloat16).contiguous()
    seen.add(tensor.data_ptr())
os.makedirs(out)
save_file(tensors, os.path.join(out, "model.safetensors"), metadata={"format": "pt"})
shutil.rmtree(os.path.join(root, tag))
"""
"""Thins a checkpoint with DeepSpeed and torch."""


def tree_bytes(directory: Path) -> int:
    """Bytes of all files below a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def compare(stage: int, scale: str, runs: int) -> None:
    """Thin a checkpoint of one stage in both ways."""
    source = checkpoint(stage, scale)
    tag = (source / "latest").read_text().strip()
    root, out = DATA / "thin", DATA / "thin-weights"

    def prepare() -> None:
        for directory in (root, out):
            shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(source, root, copy_function=os.link)
        shutil.copytree(source / tag, root / OLD, copy_function=os.link)

    name = "ckpttool prune --thin bf16"
    # The older of two checkpoints of one step is the one with the smaller number in its name.
    ours = Command(name, [[CKPTTOOL, "prune", str(root), "--keep-last", "1", "--thin", "bf16"]], prepare, source)
    script = [PYTHON, "-c", SCRIPT, str(root), OLD, str(out)]
    theirs = Command("DeepSpeed, torch, safetensors", [script], prepare, source)
    export = [CKPTTOOL, "consolidate", str(root / OLD), str(out), "--to", "safetensors", "--dtype", "bf16"]
    weights = Command("ckpttool consolidate (bf16)", [export], prepare, source)
    figures = alternate([ours, theirs, weights], runs)
    print_table(f"ZeRO-{stage}, {SCALES[scale]} parameters", figures, name, f"zero{stage}")
    prepare()
    before = tree_bytes(root / OLD)
    subprocess.run(ours.steps[0], check=True, stdout=subprocess.DEVNULL)
    after = tree_bytes(root / OLD)
    print(f"bytes: {before / 1e6:.1f} MB before, {after / 1e6:.1f} MB after, {before / after:.1f}x")
    keep(f"zero{stage}, bytes", "before", {"before": {"bytes": [before]}, "after": {"bytes": [after]}})
    for directory in (root, out):
        shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="counted runs (default: 5)")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--scale", choices=SCALES, default="large")
    arguments = parser.parse_args()
    DATA.mkdir(parents=True, exist_ok=True)
    for stage in arguments.stages:
        compare(stage, arguments.scale, arguments.runs)


if __name__ == "__main__":
    main()
