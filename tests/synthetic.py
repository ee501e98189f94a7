"""Layouts as large as no fixture can be, made without files."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.model import Checkpoint, CheckpointFile, Parameter, ParamGroup, ScalarState, State, Topology
from ckpttool.model.extents import blank_rows
from ckpttool.model.places import Place
from ckpttool.storage import LOCAL_SPEC

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

STATES = ("fp32", "exp_avg", "exp_avg_sq")


class Shares(Place):
    """An equal share of a tensor on each rank, as stage 3 has it; the last one is padded."""

    def __init__(self, numel: int, ranks: int, offset: int) -> None:
        self.numel = numel
        self.ranks = ranks
        self.offset = offset

    @property
    def rows(self) -> NDArray[np.void]:
        """One row for each rank."""
        share = -(-self.numel // self.ranks)
        table = blank_rows(self.ranks)
        table["file"] = np.arange(self.ranks)
        table["start"] = np.minimum(np.arange(self.ranks) * share, self.numel)
        table["numel"] = np.minimum(share, self.numel - table["start"])
        table["padding"] = share - table["numel"]
        table["offset"] = self.offset
        return table

    def sound(self, numel: int, dtype: str, sizes: Sequence[int]) -> bool:
        """Return True."""
        return True


def shapes_of(layers: int, hidden: int, experts: int = 0) -> dict[str, tuple[int, ...]]:
    """Parameters of a decoder: nine for each layer, and three for each expert."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (128_000, hidden)}
    for i in range(layers):
        p = f"model.layers.{i}."
        shapes |= {p + f"self_attn.{n}_proj.weight": (hidden, hidden) for n in "qkvo"}
        for expert in [""] if not experts else [f"experts.{e}." for e in range(experts)]:
            shapes |= {p + f"mlp.{expert}{n}_proj.weight": (7 * hidden // 2, hidden) for n in ("up", "gate", "down")}
        shapes |= {p + f"{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
    return shapes | {"lm_head.weight": (128_000, hidden)}


def large(ranks: int, layers: int, hidden: int, experts: int = 0) -> Checkpoint:
    """A checkpoint of stage 3 over many ranks."""
    shapes = shapes_of(layers, hidden, experts)
    share = sum(-(-math.prod(shape) // ranks) for shape in shapes.values()) * 4
    at, parameters = 0, []
    for name, shape in shapes.items():
        numel = math.prod(shape)
        states = {key: State(shape, "F32", Shares(numel, ranks, at + k * share)) for k, key in enumerate(STATES)}
        parameters.append(Parameter(name, shape, 0, states))
        at += -(-numel // ranks) * 4
    files = [
        CheckpointFile(f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt", 3 * share + 4096, "optimizer", r, "")
        for r in range(ranks)
    ]
    return made(parameters, files, ranks=ranks)


def made(parameters: Sequence[Parameter], files: Sequence[CheckpointFile], *, ranks: int, **more: Any) -> Checkpoint:
    """A checkpoint of stage 3 with these parameters and files."""
    group = ParamGroup(tuple(p.name for p in parameters), {"lr": 1e-4}, {"step": ScalarState(1.0, "F32")})
    given: dict[str, Any] = {
        "location": "/run/global_step1000", "root": "/run", "tag": "global_step1000", "format": "zero", "stage": 3,
        "topology": Topology(data_parallel=ranks), "dtype": "BF16", "deepspeed_version": "0.19.8", "step": 1000,
        "skipped_steps": 0, "parameters": tuple(parameters), "buffers": (), "aliases": {}, "groups": (group,),
        "files": tuple(files), "latest": "latest", "storage": LOCAL_SPEC,
    }  # fmt: skip
    return Checkpoint(**(given | more))
