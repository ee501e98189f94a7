"""The whole tool in a minute: inspect a bundled checkpoint, consolidate it, load the result back.

python examples/demo.py [OUT]
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from safetensors import safe_open

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = Path("fixtures/checkpoints/zero3-dp2-bf16-trainer/checkpoint-3")
TRUTH = Path("fixtures/truth/zero3-dp2-bf16-trainer.safetensors")


def ckpttool(*arguments: str) -> None:
    """Print a command, and run it."""
    print(f"\n$ ckpttool {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "ckpttool", *arguments], check=True, cwd=ROOT)  # noqa: S603 - our own tool


def main() -> None:
    """Inspect, verify, consolidate, load."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("demo-out")
    shutil.rmtree(ROOT / out, ignore_errors=True)
    print("A tiny Llama, trained by the Hugging Face Trainer with DeepSpeed ZeRO-3 on 2 ranks, a partition for each:")
    ckpttool("inspect", str(CHECKPOINT))
    ckpttool("verify", str(CHECKPOINT), "--deep")
    ckpttool("consolidate", str(CHECKPOINT), str(out), "--to", "safetensors")

    print("\nLoaded back with the safetensors library:")
    with safe_open(ROOT / out / "model.safetensors", "np") as model, safe_open(ROOT / TRUTH, "np") as truth:
        names = list(model.keys())
        equal = sum(model.get_tensor(n).tobytes() == truth.get_tensor(f"fp32/{n}").tobytes() for n in names)
        elements = sum(model.get_tensor(n).size for n in names)
    print(f"  {len(names)} tensors, {elements:,} elements in {out}/model.safetensors")
    print(f"  {equal} of {len(names)} equal, bit for bit, the fp32 masters that the live engine held when it saved")
    if equal != len(names):
        raise SystemExit("the demo failed: weights differ")


if __name__ == "__main__":
    main()
