"""Measure ``average`` against reading the bytes, torch and mergekit's linear merge, side by side in one run.

    python benchmarks/average.py [--runs N] [--sources N] [--scale large|small|tiny] [--mergekit PROGRAM]

Sources are safetensors (fp32) with different values, and ZeRO-3 checkpoints of 4 ranks. The peers are ``cat`` of the
averaged bytes, the script that loads every ZeRO checkpoint with DeepSpeed and adds it in torch, and ``mergekit-yaml``
(merge_method: linear) if its path is given; it is not among the requirements.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from consolidate import CKPTTOOL, PYTHON, checkpoint
from measure import DATA, SCALES, TRIAL, Command, alternate, print_table

if TYPE_CHECKING:
    from pathlib import Path

PERTURB = """
import sys, torch
from safetensors.torch import load_file, save_file
tensors = load_file(sys.argv[1])
torch.manual_seed(int(sys.argv[3]))
save_file({n: t + torch.randn_like(t) / 100 for n, t in tensors.items()}, sys.argv[2], {"format": "pt"})
"""
"""Makes another checkpoint of the same shapes."""
AVERAGE = """
import sys, torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import save_file
*sources, out = sys.argv[1:]
total = get_fp32_state_dict_from_zero_checkpoint(sources[0])
for source in sources[1:]:
    for name, tensor in get_fp32_state_dict_from_zero_checkpoint(source).items():
        total[name] += tensor
save_file({name: tensor / len(sources) for name, tensor in total.items()}, out)
"""
"""Averages ZeRO checkpoints with DeepSpeed and torch."""


def make_sources(scale: str, count: int) -> tuple[list[Path], list[Path]]:
    """Return directories of safetensors and ZeRO-3 roots; made once."""
    root = checkpoint(3, scale)
    weights, roots = [], []
    for number in range(count):
        directory = DATA / f"average-{scale}" / f"weights-{number}"
        if not (directory / "model.safetensors").exists():
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            subprocess.run(
                [CKPTTOOL, "consolidate", str(root), str(directory / "same"), "--to", "safetensors"],
                check=True,
                capture_output=True,
            )
            made = directory / "same" / "model.safetensors"
            subprocess.run(
                [PYTHON, "-c", PERTURB, str(made), str(directory / "model.safetensors"), str(number)], check=True
            )
            shutil.rmtree(directory / "same")
            (directory / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["Plain"]}))
        weights.append(directory)
        copy = DATA / f"average-{scale}" / f"zero-{number}"
        if not copy.exists():  # the same values: hard links take no space
            shutil.copytree(root, copy, copy_function=os.link)
        roots.append(copy)
    return weights, roots


def linear_merge(program: str, sources: list[Path], out: Path) -> Command:
    """The merge of mergekit."""
    models = [{"model": str(source), "parameters": {"weight": 1.0}} for source in sources]
    config = {"models": models, "merge_method": "linear", "dtype": "float32"}
    path = DATA / "mergekit.yml"
    path.write_text(json.dumps(config))
    steps = [[program, str(path), str(out), "--no-copy-tokenizer"]]
    return Command("mergekit-yaml, linear", steps, lambda: shutil.rmtree(out, ignore_errors=True), sources[0].parent)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="counted runs (default: 5)")
    parser.add_argument("--sources", type=int, default=4, help="checkpoints to average (default: 4)")
    parser.add_argument("--scale", choices=SCALES, default="large")
    parser.add_argument("--mergekit", help="path of mergekit-yaml")
    arguments = parser.parse_args()
    DATA.mkdir(exist_ok=True)
    weights, roots = make_sources(arguments.scale, arguments.sources)
    out = DATA / "out"

    def clear() -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.with_suffix(".safetensors").unlink(missing_ok=True)

    def ours(sources: list[Path], name: str) -> Command:
        command = [CKPTTOOL, "average", *map(str, sources), str(out), "--to", "safetensors"]
        return Command(name, [command], clear, sources[0].parent if not TRIAL else None)

    name = "ckpttool average"
    files = [str(directory / "model.safetensors") for directory in weights]
    read = Command("cat of the bytes", [["cat", *files]], clear, weights[0].parent)
    peers = [linear_merge(arguments.mergekit, weights, out)] if arguments.mergekit else []
    print(f"=== {arguments.sources} sources, {SCALES[arguments.scale]} parameters each ===")
    print_table("safetensors", alternate([read, ours(weights, name), *peers], arguments.runs), name, "safetensors")
    script = [PYTHON, "-c", AVERAGE, *map(str, roots), str(out.with_suffix(".safetensors"))]
    theirs = Command("DeepSpeed and torch", [script], clear, roots[0])
    print_table("ZeRO-3", alternate([ours(roots, name), theirs], arguments.runs), name, "zero3")
    if arguments.sources > 2:
        few = alternate([ours(weights[:2], "2 sources"), ours(weights, "all sources")], 1)
        print(f"\npeak memory: {', '.join(f'{n} {u.peak_mb:.0f} MB' for n, u in few.items())}")
    clear()


if __name__ == "__main__":
    main()
