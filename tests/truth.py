"""The bundled checkpoints, the state of the live engine at each save, and the expected layout."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ckpttool.model import Topology

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from numpy.typing import NDArray

    from ckpttool.model import Checkpoint, State

HERE = Path(__file__).resolve().parent.parent / "fixtures"
REFUSED = {"ds0.3.16-zero3-dp2-fp16": "the position of each parameter is unknown"}
"""Bundled checkpoints that cannot be read, and why: they do not say enough."""
NAMES = sorted({p.name for p in (HERE / "checkpoints").iterdir()} - REFUSED.keys())
"""Every other bundled checkpoint. What is read is compared with the truth for all of them, in this process."""

REPRESENTATIVE = (
    "autoep-zero3-dp2-ep2-bf16",  # experts over some of the ranks, stacked
    "autotp-zero2-tp2-dp2-bf16-fused",  # slices that are woven
    "megatron-zero1-tp2-dp2-bf16",  # means of copies, a padded vocabulary
    "moe-zero0-dp2-ep2-bf16",  # no ZeRO, experts in files of their own
    "pipeline-zero0-pp2-dp2-fp16",  # layers in files of their own, states of no known parameter
    "universal-zero3-dp2-bf16",  # a file for each state
    "zero1-dp2-bf16-muon",  # whole matrices beside partitions
    "zero2-dp2-bf16",
    "zero2-dp2-bf16-legacy",  # files in the form before ZIP
    "zero2-dp2-bf16-trainer",  # inside a directory of the Hugging Face Trainer
    "zero3-dp2-bf16-nvme",  # raw files
    "zero3-dp4-bf16",
)
"""One of each way in which states are laid out: enough for what comes behind reading, which knows only extents."""


NUMPY: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("float64"), "F32": np.dtype("float32"), "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16), "I64": np.dtype("int64"), "I32": np.dtype("int32"),
    "I16": np.dtype("int16"), "I8": np.dtype("int8"), "U8": np.dtype("uint8"), "BOOL": np.dtype("bool"),
}  # fmt: skip
"""The dtypes of numpy, by their names in safetensors."""
TORCH = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""The dtypes of torch, by their names in safetensors."""


@dataclass(frozen=True)
class Truth:
    """What the engine held."""

    name: str
    """The checkpoint."""
    arrays: dict[str, NDArray[Any]]
    """By "fp32/NAME", "exp_avg/NAME", ..., "module/NAME", "buffer/NAME"; whole, padding of a vocabulary included."""
    facts: dict[str, Any]
    """Step, tied names, frozen names, groups."""

    @functools.cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The arrays as tensors of torch."""
        return {key: as_tensor(array) for key, array in self.arrays.items()}

    # ------------------------------------------------------------------------------------- what of it was saved

    @property
    def universal(self) -> bool:
        """Whether it was converted, and only the result kept."""
        return os.path.exists(os.path.join(source(self.name), "latest_universal"))

    @functools.cached_property
    def topology(self) -> Topology:
        """The ranks of the run; under MiCS, those that do not hold the same."""
        shared = 2 if self.name.endswith("-mics") else self.facts["world_size"]
        return Topology(**self.facts.get("topology", {"data_parallel": shared}))

    @property
    def unassigned(self) -> bool:
        """Whether the optimizer's states are only numbered, and nothing tells whose they are.

        Without ZeRO, in a pipeline; but BF16_Optimizer partitions at stage 0 too, and then names are recorded.
        """
        without_zero = self.facts["stage"] == 0 and self.facts["dtype"] != "bf16"
        return without_zero and self.topology.pipeline_parallel > 1

    @property
    def stage(self) -> int | None:
        """What the files are laid out for."""
        if self.universal:
            return None
        partitioned_anyhow = self.facts["stage"] == 0 and self.topology.pipeline_parallel > 1 and not self.unassigned
        return 1 if partitioned_anyhow else self.facts["stage"]

    @property
    def release(self) -> tuple[int, ...]:
        """The DeepSpeed that saved it."""
        _, _, at_end = self.name.partition("-ds")
        release: str = self.facts.get("release") or at_end or "0.19.8"
        return tuple(map(int, release.split(".")))

    @property
    def elastic(self) -> bool:
        """Whether states are in lists, without the hyper-parameters: at stages 1 and 2, the default up to 0.5.8."""
        return self.name.endswith("-elastic") or (self.release < (0, 5, 9) and self.facts["stage"] in {1, 2})

    @property
    def saved_frozen(self) -> list[str]:
        """Frozen parameters that are there; what has no elements is saved as if it were one."""
        left_out = "without-frozen" in self.name or "lora-trainer" in self.name
        # Source: DeepSpeed 0.19, checkpoint/ds_to_universal.py, which does not copy the layers of a pipeline.
        left_out |= self.universal and self.topology.pipeline_parallel > 1
        left_out |= self.facts["stage"] == 3 and self.release < (0, 9, 1)
        frozen = {*(() if left_out else self.facts["frozen"]), *self.facts.get("empty", ())}
        return [n for n in self.facts["order"] if n in frozen]

    @property
    def tied(self) -> dict[str, str]:
        """Every further name of a parameter that is there, and its first."""
        gone = {*self.facts["frozen"]} - {*self.saved_frozen}
        return {alias: name for alias, name in self.facts["tied"].items() if name not in gone}

    @property
    def order(self) -> list[str] | None:
        """Parameters in the order of the module; None where no file has them in that order."""
        if self.universal and self.topology.pipeline_parallel > 1:
            return None
        gone = {*self.facts["frozen"]} - {*self.saved_frozen}
        return [self.stored_name(n) for n in _in_module_order(self.facts["order"]) if n not in gone]

    @property
    def parameters(self) -> set[str]:
        """Names of all parameters that are there."""
        return {self.stored_name(n) for n in self.facts["order"]} - ({*self.facts["frozen"]} - {*self.saved_frozen})

    def stored_name(self, name: str) -> str:
        """What a parameter is called: a tied layer goes by its number where nothing names its key."""
        return name.replace("tied_modules.embed.", "0.") if self.unassigned else name

    @functools.cached_property
    def states(self) -> dict[str, NDArray[Any]]:
        """Every state that the checkpoint holds of a parameter or buffer, by "STATE/NAME"."""
        held = {}
        for key, array in self.arrays.items():
            kind, _, name = key.partition("/")
            if kind in {"adapter", "adapter_fp32"} or not self._is_saved(kind, name):
                continue
            rows = self.facts.get("vocabulary", {}).get(name)
            held[f"{kind}/{self.stored_name(name)}"] = array if rows is None else array[:rows]
        return held

    def _is_saved(self, kind: str, name: str) -> bool:
        """Whether there is a state of that kind, of a parameter or buffer that the engine had."""
        spread = self.topology.tensor_parallel > 1 or self.topology.pipeline_parallel > 1
        if kind == "buffer":
            return not (self.universal and self.topology.pipeline_parallel > 1)
        if name in self.facts["frozen"] or name in self.facts.get("empty", ()):
            return name in self.saved_frozen
        if kind != "module":
            return not self.unassigned
        if self.facts["stage"] == 3 or name in self.facts.get("averaged", ()):
            return False  # only the masters are kept; or no rank has the copy of a mean
        if self.universal:
            # Whole copies come along with the model states of a single rank, but experts' files do not.
            return not spread and ".experts." not in name
        return True

    @property
    def scalars(self) -> list[dict[str, float]]:
        """For each group the states that are one number; a parameter that is itself one has its moments for itself."""
        groups = self.facts["groups"]
        listed = self.facts.get("scalars") or [{"step": self.facts["adam_step"]}] * len(groups)
        return [{k: v for k, v in group.items() if k not in self.facts.get("states", ())} for group in listed]

    # ------------------------------------------------------------------------------------- what is made of it

    def state_dict(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """What consolidation must give: masters, or else the model's copies, in one type; buffers as they are.

        Under ZenFlow the copies are newer.
        """
        weights = {}
        first, second = ("module", "fp32") if "-zenflow" in self.name else ("fp32", "module")
        for key, array in self.states.items():
            kind, _, name = key.partition("/")
            if kind == first or (kind == second and f"{first}/{name}" not in self.states):
                weights[name] = as_tensor(array).to(dtype)
            elif kind == "buffer":
                weights[name] = as_tensor(array)
        return weights


def _in_module_order(names: Sequence[str]) -> list[str]:
    """Put experts of other ranks, which the truth lists last, behind those of their layer."""
    mark = ".deepspeed_experts."
    first: dict[str, int] = {}

    def place(at: int) -> tuple[int, int, int]:
        layer, is_expert, rest = names[at].partition(mark)
        if not is_expert:
            return at, 0, 0
        return first.setdefault(layer, at), int(rest.partition(".")[0]), at

    return [names[at] for *_, at in sorted((*place(at), at) for at in range(len(names)))]


# ------------------------------------------------------------------------------------------------- where it lies


def _latest(name: str) -> Path:
    """The file that names the tag."""
    found = [p for p in (HERE / "checkpoints" / name).rglob("latest*") if p.name in {"latest", "latest_universal"}]
    (only,) = found
    return only


@functools.cache
def source(name: str) -> str:
    """The directory to pass as SRC."""
    return str(_latest(name).parent)


@functools.cache
def tag_directory(name: str) -> str:
    """The directory that holds the files."""
    return os.path.join(source(name), _latest(name).read_text())


@functools.cache
def truth(name: str) -> Truth:
    """Load the truth of a checkpoint."""
    arrays, metadata = read_safetensors(HERE / "truth" / f"{name}.safetensors")
    return Truth(name, arrays, json.loads(metadata["truth"]))


def read_safetensors(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Read a safetensors file with numpy alone, independently of the code under test.

    Source: https://github.com/huggingface/safetensors, README, "Format".
    """
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    metadata: dict[str, str] = header.pop("__metadata__", {})
    arrays = {}
    for key, entry in header.items():
        first, last = (start + offset for offset in entry["data_offsets"])
        arrays[key] = np.frombuffer(data[first:last], NUMPY[entry["dtype"]]).reshape(entry["shape"])
    return arrays, metadata


# ------------------------------------------------------------------------------------------------- bytes


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, in C order."""
    import torch

    data: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """The tensor of torch with the same elements."""
    import torch

    spelling = next(key for key, dtype in NUMPY.items() if dtype == array.dtype)
    dtype = getattr(torch, TORCH[spelling])
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    return torch.frombuffer(bytearray(array.tobytes()), dtype=dtype).reshape(array.shape)


def gather(checkpoint: Checkpoint, state: State) -> bytes:
    """The bytes of a state, put together as its extents say, by the plainest of means."""
    data = gathered({i: checkpoint.path(i) for i in {int(n) for n in state.extents["file"]}}, state)
    if not state.mean_with:
        return data
    assert state.dtype == "F32"
    total = np.frombuffer(data, np.float32).copy()
    for other in state.mean_with:
        total += np.frombuffer(gather(checkpoint, other), np.float32)
    mean: bytes = (total / np.float32(1 + len(state.mean_with))).tobytes()
    return mean


def gathered(paths: Mapping[int, str | Path], state: State) -> bytes:
    """The bytes of one state alone: every run of every extent put where it belongs; what none fills is "?"."""
    width = state.nbytes // state.numel if state.numel else 0
    out = bytearray(b"?" * state.nbytes)
    files = {i: Path(path).read_bytes() for i, path in paths.items()}
    for row in state.extents:
        start, numel, pitch, stride = (int(row[k]) for k in ("start", "numel", "pitch", "stride"))
        for run in range(int(row["runs"])):
            begin = int(row["offset"]) + run * stride * width
            piece = files[int(row["file"])][begin : begin + numel * width]
            at = (start + run * pitch) * width
            out[at : at + numel * width] = piece
    assert len(out) == state.nbytes
    return bytes(out)
