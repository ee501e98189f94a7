"""Weights large enough for multipart uploads, made without training."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

TENSORS = {"first.weight": 2_800_000, "second.weight": 2_800_000, "small.bias": 1000}
"""Elements of each tensor; each of the two takes two parts of 5 MiB and a rest."""


def write_weights(directory: Path, tensors: dict[str, int] | None = None) -> Path:
    """A directory with one safetensors file of numbers that are all different."""
    directory.mkdir(parents=True)
    header: dict[str, object] = {}
    at = 0
    for name, numel in (tensors or TENSORS).items():
        header[name] = {"dtype": "F32", "shape": [numel], "data_offsets": [at, at + 4 * numel]}
        at += 4 * numel
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for seed, numel in enumerate((tensors or TENSORS).values()):
            (np.arange(numel, dtype=np.float32) * np.float32(1.5) + np.float32(seed)).tofile(file)
    return directory
