"""Cast the output of zero_to_fp32 to bf16: ``cast_bf16.py DIRECTORY`` casts every safetensors file in it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def main() -> None:
    """Cast file by file, in place."""
    for path in sorted(Path(sys.argv[1]).glob("*.safetensors")):
        tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
