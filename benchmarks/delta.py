"""Measure ``delta`` and ``apply`` against whole copies, torch, xdelta3 and bsdiff, side by side in one run.

    python benchmarks/delta.py [--runs N] [--scale large|small|tiny] [--slow]

Two checkpoints of one model in bf16, of which 1.5 % of the elements differ, as between two steps of reinforcement
learning. ``--slow`` adds ``xdelta3`` and ``bsdiff`` if they are installed, once each: they take minutes.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

from consolidate import CKPTTOOL, PYTHON
from measure import DATA, SCALES, TRIAL, Command, alternate, print_table

SIZES = {"large": (4096, 24), "small": (1024, 24), "tiny": (64, 2)}
"""Width and number of square matrices."""
MAKE = """
import sys, torch
from safetensors.torch import save_file
out, width, layers = sys.argv[1], *map(int, sys.argv[2:])
torch.manual_seed(0)
a, b = {}, {}
for layer in range(layers):
    old = torch.randn(width, width) * 0.02
    new = torch.where(torch.rand(width, width) < 0.015, old * 1.02, old)
    a[f"layers.{layer}.weight"], b[f"layers.{layer}.weight"] = old.bfloat16(), new.bfloat16()
save_file(a, out + "/a.safetensors")
save_file(b, out + "/b.safetensors")
"""
COMPARE = """
import sys, torch
from safetensors.torch import load_file, save_file
a, b, out = sys.argv[1:]
a, b = load_file(a), load_file(b)
patch = {}
for name, new in b.items():
    changed = (a[name].view(torch.int16) != new.view(torch.int16)).flatten().nonzero().flatten()
    patch[name + ".indices"] = changed.int()
    patch[name + ".values"] = new.flatten()[changed]
save_file(patch, out)
"""
"""The same comparison in torch, with both checkpoints in memory."""


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="counted runs (default: 5)")
    parser.add_argument("--scale", choices=SCALES, default="large")
    parser.add_argument("--slow", action="store_true", help="also run xdelta3 and bsdiff, once")
    arguments = parser.parse_args()
    place = DATA / f"delta-{arguments.scale}"
    if not (place / "made").exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        subprocess.run([PYTHON, "-c", MAKE, str(place), *map(str, SIZES[arguments.scale])], check=True)
        (place / "made").touch()
    a, b, out = (str(place / "a.safetensors"), str(place / "b.safetensors"), DATA / "out")

    def clear() -> None:
        if out.is_file():
            out.unlink()
        shutil.rmtree(out, ignore_errors=True)

    reads = None if TRIAL else place
    delta = [CKPTTOOL, "delta", a, b]
    commands = [
        Command("cp of B", [["cp", b, str(out)]], clear, reads),
        Command("ckpttool delta", [[*delta, str(out)]], clear, reads),
        Command("ckpttool delta --jobs 1", [[*delta, str(out), "--jobs", "1"]], clear, reads),
        Command("torch, both in memory", [[PYTHON, "-c", COMPARE, a, b, str(out)]], clear, reads),
    ]
    print_table("delta", alternate(commands, arguments.runs), "ckpttool delta", "delta")
    made = DATA / "delta-made"
    shutil.rmtree(made, ignore_errors=True)
    subprocess.run([*delta, str(made)], check=True, capture_output=True)
    sizes = [Path(p).stat().st_size for p in (b, made / "delta.safetensors")]
    print(f"\nB: {sizes[0]:,} bytes; delta: {sizes[1]:,} bytes, {100 * sizes[1] / sizes[0]:.2f} %")
    commands = [
        Command("cp of B", [["cp", b, str(out)]], clear, reads),
        Command("ckpttool apply", [[CKPTTOOL, "apply", a, str(made), str(out)]], clear, reads),
    ]
    print_table("apply", alternate(commands, arguments.runs), "ckpttool apply", "apply")
    others = {"xdelta3": ["-e", "-f", "-s", a, b], "bsdiff": [a, b]}
    for program, options in others.items():
        if arguments.slow and shutil.which(program):
            command = Command(program, [[program, *options, str(out)]], clear, reads)
            usages = alternate([command, Command("ckpttool delta", [[*delta, str(out)]], clear, reads)], 1)
            print_table(program, usages, "ckpttool delta", program)
            command.prepare()
            subprocess.run([program, *options, str(out)], check=True)
            print(f"{program}: {out.stat().st_size:,} bytes")
    clear()


if __name__ == "__main__":
    main()
