"""The module side of a ZeRO checkpoint: names, shapes, buffers, ties and client state, the same at every stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.dtypes import itemsize
from ckpttool.errors import LayoutError
from ckpttool.formats.fields import shape_of
from ckpttool.model import State, extents, one_extent

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from ckpttool.containers.values import TensorRef
    from ckpttool.formats.zero_files import RankFile

# Source: DeepSpeed 0.3.12 to 0.19.8, runtime/engine.py (``_save_checkpoint``).
ENGINE_KEYS = frozenset(
    {
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
        "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
        "csr_tensor_module_names", "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
        "checkpoint_parallel_dimensions", "ds_config", "ds_version", "num_experts", "ds_autoep_layers",
        "autoep_layers", "universal_checkpoint_info",
    }
)  # fmt: skip
"""Keys of a model-states file that are DeepSpeed's; all others are the user's client state."""


def read_param_shapes(file: RankFile) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes of the trainable parameters, a mapping for each flat buffer, in the order of the buffer.

    Source: DeepSpeed 0.19, runtime/engine.py (``_get_zero_param_shapes``).
    """
    value = file.fields.get("param_shapes", object)
    groups = [value] if isinstance(value, dict) else value
    if not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
        raise file.fields.error("param_shapes", "is not a list of mappings")
    seen: set[str] = set()
    result: list[dict[str, tuple[int, ...]]] = []
    for group in groups:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, raw in group.items():
            shape = shape_of(raw)
            if not isinstance(name, str) or shape is None:
                raise file.fields.error("param_shapes", f"gives {name!r} no shape")
            if name in seen:
                raise file.fields.error("param_shapes", f"names {name!r} twice")
            seen.add(name)
            shapes[name] = shape
        result.append(shapes)
    return result


def read_module(file: RankFile) -> dict[str, TensorRef]:
    """The module's state dict: name to tensor, in the order of the module."""
    module = file.fields.get("module", object)
    if module is None:
        raise LayoutError(file.path, "holds no module: it is pipeline-parallel, which is not supported yet", "")
    return file.fields.tensor_mapping("module")


MAX_STRIDED = 1 << 20
"""Elements of a tensor that is not contiguous: each may need an extent of its own."""


def read_buffer_names(file: RankFile) -> set[str]:
    """Names of the persistent buffers."""
    return {n for n in file.fields.optional("buffer_names", list) or [] if isinstance(n, str)}


def whole_tensor(file: RankFile, ref: TensorRef) -> State:
    """A tensor that lies whole in one file, in whatever order of strides.

    Raises:
        LayoutError: Its elements lie scattered, and there are very many.
    """
    if ref.contiguous:
        return State(ref.shape, ref.dtype, one_extent(ref.numel, file.index, file.torch.locate(ref).start))
    if ref.numel > MAX_STRIDED:
        problem = f"a tensor of shape {ref.shape} is stored with strides {ref.stride}"
        raise LayoutError(file.path, problem, "save it contiguous")
    place = np.zeros(1, dtype=np.int64)
    for size, stride in zip(ref.shape, ref.stride, strict=True):
        place = (place[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    first = np.flatnonzero(np.concatenate([[True], np.diff(place) != 1]))  # where a run of neighbours begins
    table = extents(len(first))
    table["start"] = first
    table["numel"] = np.diff(np.append(first, len(place)))
    table["file"] = file.index
    base = file.torch.storages[ref.storage.key].start
    table["offset"] = base + (ref.offset + place[first]) * itemsize(ref.dtype)
    return State(ref.shape, ref.dtype, table)


def read_aliases(
    file: RankFile, module: Mapping[str, TensorRef], known: set[str], trained: Container[str]
) -> tuple[dict[str, str], dict[str, State]]:
    """Tied names, and where a tied tensor is stored a second time.

    ``shared_params`` tells them since 0.9.2; in older files two names of one tensor show by sharing its bytes.

    Args:
        file: The model-states file.
        module: Its state dict.
        known: Names that stand for tensors of their own.
        trained: Names that the optimizer holds.

    Returns:
        Alias to the name the parameter is stored under; alias to its own copy, which must equal the other.

    Raises:
        LayoutError: ``shared_params`` ties tensors of different shapes, or names nothing.
    """
    excluded = file.fields.values.get("frozen_param_shapes") is None
    aliases: dict[str, str] = {}
    duplicates: dict[str, State] = {}
    for alias, name in (file.fields.optional("shared_params", dict) or {}).items():
        if not isinstance(alias, str) or not isinstance(name, str):
            raise file.fields.error("shared_params", "ties what are no names")
        if excluded and alias not in module and name not in module and name not in trained:
            continue  # both were left out when it was saved
        if name not in known:
            raise file.fields.error("shared_params", f"ties {alias!r} to {name!r}, which is not there")
        if alias in trained:
            raise file.fields.error("shared_params", f"ties {alias!r} to {name!r}, but the optimizer holds both")
        aliases[alias] = name
        ours, theirs = module.get(alias), module.get(name)
        if ours is None or theirs is None or ours == theirs:
            continue
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            raise file.fields.error("shared_params", f"ties {alias} {ours.shape} to {name} {theirs.shape}")
        if ours.numel:
            duplicates[alias] = whole_tensor(file, ours)
    stored: dict[tuple[object, ...], str] = {}
    for name, ref in module.items():
        if ref.numel == 0:
            continue  # placeholders and empty tensors share nothing that matters
        first = stored.setdefault((ref.storage.key, ref.offset, ref.dtype, ref.shape, ref.stride), name)
        if first != name and name not in known:
            aliases.setdefault(name, first)
    return aliases, duplicates


def client_state(file: RankFile) -> dict[str, Any]:
    """What the user's code saved along with the model."""
    return {str(k): v for k, v in file.fields.values.items() if k not in ENGINE_KEYS}
