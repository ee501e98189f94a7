"""The bundled checkpoints and what the live engine really held when each was saved."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

if TYPE_CHECKING:
    import torch

    from ckpttool.model import Checkpoint, State

HERE = Path(__file__).resolve().parent.parent / "fixtures"
NAMES = sorted(p.name for p in (HERE / "checkpoints").iterdir())
"""Every bundled checkpoint."""
WITH_MASTER_AND_COPY = [n for n in NAMES if not n.startswith("zero3")]
"""Those that keep both masters and whole 16-bit copies."""


@dataclass(frozen=True)
class Truth:
    """What the engine held."""

    tensors: dict[str, torch.Tensor]
    """By "fp32/NAME", "exp_avg/NAME", "exp_avg_sq/NAME", "module/NAME", "buffer/NAME"."""
    facts: dict[str, Any]
    """Step, tied names, frozen names, groups."""

    def state_dict(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """What consolidation must give: masters and frozen parameters in one type, buffers as they are."""
        weights = {}
        for key, tensor in self.tensors.items():
            kind, _, name = key.partition("/")
            if kind == "fp32" or (kind == "module" and name in self.facts["frozen"]):
                weights[name] = tensor.to(dtype)
            elif kind == "buffer":
                weights[name] = tensor
        return weights


def source(name: str) -> str:
    """The directory to pass as SRC."""
    root = HERE / "checkpoints" / name
    return str(root / "checkpoint-3" if name.endswith("-trainer") else root)


def tag_directory(name: str) -> str:
    """The directory that holds the files."""
    return os.path.join(source(name), "global_step3")


@functools.cache
def truth(name: str) -> Truth:
    """Load the truth of a checkpoint."""
    with safe_open(str(HERE / "truth" / f"{name}.safetensors"), "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return Truth(tensors, json.loads(file.metadata()["truth"]))


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, in C order."""
    import torch

    data: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


def gather(checkpoint: Checkpoint, state: State) -> bytes:
    """The bytes of a state, put together as its extents say, by the plainest of means."""
    width = state.nbytes // state.numel if state.numel else 0
    parts = []
    for row in state.extents:
        with open(checkpoint.path(int(row["file"])), "rb") as file:
            file.seek(int(row["offset"]))
            parts.append(file.read(int(row["numel"]) * width))
    return b"".join(parts)
