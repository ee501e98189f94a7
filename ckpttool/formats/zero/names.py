"""Parse the names of DeepSpeed's checkpoint files.

Source: DeepSpeed 0.19, runtime/engine.py (``_get_ckpt_name``, ``_get_zero_ckpt_name``, ``_get_expert_ckpt_name``) and
runtime/pipe/module.py (``ckpt_layer_path``).
"""

from __future__ import annotations

import re
from typing import NamedTuple

RUN_STATE = "ckpttool_run_state.pt"
"""File of a thin checkpoint that keeps what the model-states files had beside the weights: client state,
configuration. No pattern of DeepSpeed's loaders and scripts matches it."""
MAX_DIGITS = 6
"""Maximum number of digits in the number of a rank, layer or expert."""
_NAMES = (
    # The number after "pp_rank" is the data-parallel rank; up to 0.3.13 there was no "_" before "optim".
    (
        "optimizer",
        re.compile(r"(?P<prefix>bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt"),
    ),
    ("model", re.compile(r"zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")),
    ("model", re.compile(r"mp_rank_(?P<mp>\d+)_model_states\.pt")),
    ("layer", re.compile(r"layer_(?P<layer>\d+)(-model_(?P<mp>\d+))?-model_states\.pt")),
    ("expert", re.compile(r"(layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")),
    ("expert optimizer", re.compile(r"expp_rank_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")),
)


class ZeroName(NamedTuple):
    """A parsed file name."""

    name: str
    """The name itself."""
    kind: str
    """"optimizer", "model", "layer", "expert" or "expert optimizer"."""
    data_rank: int | None
    """Data-parallel rank; None if one file serves all ranks."""
    model_rank: int
    """Tensor- and pipeline-parallel rank."""
    prefix: str
    """"bf16_", "fp16_" or nothing."""
    layer: int = 0
    """Number of the pipeline layer or of the MoE layer."""
    expert: int = 0
    """Number of the expert, or of the expert-parallel rank."""


def is_of_tag(name: str) -> bool:
    """Return whether a file of this name makes its directory that of a tag: DeepSpeed's files, and thin checkpoints."""
    return name == RUN_STATE or parse_name(name) is not None


def parse_name(name: str) -> ZeroName | None:
    """Return the parts of a file name; None if DeepSpeed writes no such file."""
    for kind, pattern in _NAMES:
        match = pattern.fullmatch(name)
        if match:
            found = match.groupdict()
            data = found.get("dp")
            if any(len(n or "") > MAX_DIGITS for key, n in found.items() if key != "prefix"):
                return None  # a list of all numbers up to it would take all memory
            model, layer, expert = (int(found.get(key) or 0) for key in ("mp", "layer", "expert"))
            return ZeroName(
                name, kind, None if data is None else int(data), model, found.get("prefix") or "", layer, expert
            )
    return None
