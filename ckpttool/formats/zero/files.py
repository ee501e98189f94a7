"""The files of a DeepSpeed checkpoint: their names, and those that are opened, by rank.

Structure and numbers only, no tensor bytes.

Source: DeepSpeed 0.19, runtime/engine.py (``_get_ckpt_name``, ``_get_zero_ckpt_name``, ``_get_expert_ckpt_name``) and
runtime/pipe/module.py (``ckpt_layer_path``).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.containers.values import TensorRef
from ckpttool.model import ScalarState

if TYPE_CHECKING:
    from ckpttool.containers.torch_file import TorchFile
    from ckpttool.errors import LayoutError
    from ckpttool.formats.fields import Fields
    from ckpttool.formats.location import Location
    from ckpttool.model import CheckpointFile


RUN_STATE = "ckpttool_run_state.pt"
"""File of a thin checkpoint with the content of the model-states files except the weights: client state, configuration.
No pattern of DeepSpeed's loaders and scripts matches it."""
MAX_DIGITS = 6
"""Maximum number of digits in the number of a rank, layer or expert."""
_NAMES = (
    # The number after "pp_rank" is the data-parallel rank; up to 0.3.13 "optim" follows without "_".
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
    """Return whether the directory of a file of this name is a tag's: DeepSpeed's files, and thin checkpoints."""
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


MAX_RANKS = 1 << 20
"""Maximum number of ranks in a file."""


class RankFile(NamedTuple):
    """The structure of one file."""

    file_index: int
    """Index into the checkpoint's files."""
    torch: TorchFile
    """Its structure."""
    fields: Fields
    """Its top-level mapping."""
    numbers: dict[tuple[str, int], ScalarState]
    """Values of tensors of one element, by (storage key, element)."""

    @property
    def path(self) -> str:
        """Its path, for errors."""
        return self.torch.path

    def scalar(self, value: object) -> ScalarState | None:
        """Return the value of a Python number or a 0-dim tensor of this file; None for other values."""
        if isinstance(value, bool | int | float):
            return ScalarState(value, None)
        if isinstance(value, TensorRef) and value.shape == ():
            return self.numbers.get((value.storage.key, value.offset))
        return None

    def single(self, value: object) -> ScalarState | None:
        """Return the value of a tensor of shape (1,) of this file; None for other values."""
        if not isinstance(value, TensorRef) or value.shape != (1,):
            return None
        number = self.numbers.get((value.storage.key, value.offset))
        return None if number is None else replace(number, shape=(1,))


class SwappedFile(NamedTuple):
    """Raw elements of one tensor, copied from an NVMe swap folder."""

    file_index: int
    """Index into the checkpoint's files."""
    path: str
    """Its path, for errors."""
    nbytes: int
    """Its size; may be rounded up."""


class ExpertFile(NamedTuple):
    """One expert of one MoE layer."""

    layer: int
    """Number of the MoE layer; 0 for releases that did not record it."""
    expert: int
    """Number of the expert in the layer."""
    file: RankFile
    """Its weights."""


class LayerFile(NamedTuple):
    """One layer of a pipeline."""

    layer: int
    """Number of the layer in the whole pipeline."""
    tensor_rank: int
    """Tensor-parallel rank."""
    file: RankFile
    """Its state dict."""


class ZeroFiles(NamedTuple):
    """The files of one model-parallel rank; of the whole model if there is only one."""

    location: Location
    """Their directory."""
    stage: int
    """0, 1, 2 or 3."""
    model_rank: int
    """Pipeline stage times tensor-parallel ranks plus tensor-parallel rank."""
    model: list[RankFile]
    """Model states: one file at stages 0 to 2, one for each rank at stage 3."""
    optimizer: list[RankFile]
    """Optimizer states, one file for each rank; none at stage 0."""
    experts: tuple[ExpertFile, ...] = ()
    """Experts' weights: MoE saves them in separate files."""
    expert_optimizer: tuple[RankFile, ...] = ()
    """At stage 0 with MoE: the whole optimizer of each expert-parallel rank."""
    swapped: tuple[dict[str, SwappedFile], ...] = ()
    """Tensors offloaded to NVMe: for each rank, file by name."""
    recorded: tuple[tuple[str, ...], ...] = ()
    """At stage 0: the parameters of each group in the optimizer's order, if the manifest has them."""
    order: tuple[str, ...] = ()
    """At stage 0: the parameters of all groups in the order of an optimizer; used if their names are unknown."""

    @property
    def ranks(self) -> int:
        """Data-parallel ranks over which the optimizer is partitioned."""
        return len(self.optimizer)

    def states(self, rank: int) -> Fields:
        """Return the ``optimizer_state_dict`` of a rank's optimizer file."""
        return self.optimizer[rank].fields.child("optimizer_state_dict")


class AllFiles(NamedTuple):
    """The files of a whole checkpoint."""

    slices: tuple[ZeroFiles, ...]
    """One for each model-parallel rank."""
    layers: tuple[LayerFile, ...]
    """The layers of a pipeline."""
    files: tuple[CheckpointFile, ...]
    """All of them."""
    notes: tuple[LayoutError, ...]
    """Findings that do not stop the reader."""
    renamed: tuple[str, ...] = ()
    """Accepted files that were saved under other names (``trust_names``)."""
