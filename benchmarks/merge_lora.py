"""Measure ``consolidate --merge-lora`` against PEFT's ``merge_and_unload``, side by side in one run.

    python benchmarks/merge_lora.py [--runs N] [--scale large|small|tiny]

A Llama with random weights in bf16, and an adapter of rank 16 on all its linear layers.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess

from consolidate import CKPTTOOL, PYTHON
from measure import DATA, SCALES, TRIAL, Command, alternate, print_table

SIZES = {"large": (1024, 50_000, 16), "small": (512, 10_000, 6), "tiny": (64, 100, 2)}
"""Hidden size, vocabulary, layers."""
MAKE = """
import sys, torch, peft, transformers
out, hidden, vocabulary, layers = sys.argv[1], *map(int, sys.argv[2:])
config = transformers.LlamaConfig(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=4 * hidden,
    num_hidden_layers=layers, num_attention_heads=8)
model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
model.save_pretrained(out + "/base")
options = peft.LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
peft.get_peft_model(model, options).save_pretrained(out + "/adapter")
"""
MERGE = """
import sys, torch, peft, transformers
base, adapter, out = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().to(torch.bfloat16).save_pretrained(out)
"""


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="counted runs (default: 5)")
    parser.add_argument("--scale", choices=SCALES, default="large")
    arguments = parser.parse_args()
    place = DATA / f"lora-{arguments.scale}"
    if not (place / "adapter" / "adapter_config.json").exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        sizes = map(str, SIZES[arguments.scale])
        subprocess.run([PYTHON, "-c", MAKE, str(place), *sizes], check=True, capture_output=True)
    base, adapter, out = place / "base", place / "adapter", DATA / "out"

    def clear() -> None:
        shutil.rmtree(out, ignore_errors=True)

    reads = None if TRIAL else place
    ours = [CKPTTOOL, "consolidate", str(adapter), str(out), "--to", "safetensors", "--merge-lora", "--base", str(base)]
    theirs = [PYTHON, "-c", MERGE, str(base), str(adapter), str(out)]
    commands = [
        Command("cp of the base", [["cp", "-r", str(base), str(out)]], clear, reads),
        Command("ckpttool --merge-lora", [[*ours, "--dtype", "bf16"]], clear, reads),
        Command("PEFT, merge_and_unload", [theirs], clear, reads),
    ]
    print_table("merge LoRA", alternate(commands, arguments.runs), "ckpttool --merge-lora", "merge")
    clear()


if __name__ == "__main__":
    main()
