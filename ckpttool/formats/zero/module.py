"""The module side of a ZeRO checkpoint, the same at every stage: names, shapes, buffers, ties and client state.

First of one file, then of all files of one model-parallel rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from ckpttool.containers.values import TensorRef, walk
from ckpttool.formats.fields import MAX_ELEMENTS, shape_of
from ckpttool.formats.tensors import whole_tensor
from ckpttool.messages import brief
from ckpttool.model import State
from ckpttool.model.places import Contiguous

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from ckpttool.formats.zero.files import RankFile, ZeroFiles

# Source: DeepSpeed 0.3.12 to 0.19.8, runtime/engine.py (``_save_checkpoint``).
ENGINE_KEYS = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "csr_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "num_experts",
        "ds_autoep_layers",
        "autoep_layers",
        "universal_checkpoint_info",
    }
)
"""DeepSpeed's keys in a model-states file; all others are the user's client state."""
DATA_KEYS = ("data_sampler", "random_ltd")
"""States of data efficiency: curriculum learning's data sampler, and random layerwise token dropping.

Source: DeepSpeed 0.8.0 to 0.19.8, runtime/engine.py (``_common_checkpoint_state``).
"""


def read_param_shapes(files: ZeroFiles) -> list[dict[str, tuple[int, ...]]]:
    """Return names and shapes of the trainable parameters: one mapping per flat buffer, in the order of the buffer.

    Source: DeepSpeed 0.19, runtime/engine.py (``_get_zero_param_shapes``); up to 0.5.10 the optimizer
    files have them, and up to 0.5.3 in one mapping.
    """
    file = _lists_shapes(files)
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
                raise file.fields.error("param_shapes", f"gives {brief(name, 200)} no shape")
            if name in seen:
                raise file.fields.error("param_shapes", f"names {brief(name, 200)} twice")
            seen.add(name)
            shapes[name] = shape
        result.append(shapes)
    return result


def _lists_shapes(files: ZeroFiles) -> RankFile:
    """Return the file with ``param_shapes``."""
    return files.model[0] if "param_shapes" in files.model[0].fields else files.optimizer[0]


def without_groups(files: ZeroFiles) -> bool:
    """Return whether one mapping lists all parameters, also frozen ones, as up to 0.5.3."""
    return isinstance(_lists_shapes(files).fields.values.get("param_shapes"), dict)


def mapped_sizes(files: ZeroFiles) -> list[dict[str, int]]:
    """Return names and elements of the trainable parameters from ``param_slice_mappings``, one mapping per group.

    They are in the order of the flat buffer unless ``round_robin_gradients`` is on. Empty without such a record.

    Source: DeepSpeed 0.19, runtime/bf16_optimizer.py (``_create_param_mapping``).
    """
    result: list[dict[str, int]] = []
    for r in range(files.ranks):
        states = files.states(r)
        groups = states.optional("param_slice_mappings", list) or []
        result += [{} for _ in range(len(groups) - len(result))]
        for sizes, group in zip(result, groups, strict=False):
            for name, fragment in group.items() if isinstance(group, dict) else ():
                state = getattr(fragment, "state", None)
                numel = state.get("numel") if isinstance(state, dict) else None
                if not isinstance(name, str) or not isinstance(numel, int) or not 0 <= numel <= MAX_ELEMENTS:
                    raise states.error("param_slice_mappings", f"gives {brief(name, 200)} no size")
                sizes[name] = sizes.get(name, 0) + numel
    return result


def read_module(file: RankFile) -> dict[str, TensorRef]:
    """Return the module's state dict: name to tensor, in the order of the module; empty for a pipeline."""
    return {} if file.fields.get("module", object) is None else file.fields.tensor_mapping("module")


def read_buffer_names(file: RankFile, module: Mapping[str, TensorRef] | None = None) -> set[str]:
    """Return the names of the persistent buffers.

    For a module that is registered several times under one parent, ``buffer_names`` has one name and the state dict all
    names: the others share the bytes and the last part of the name.

    Args:
        file: The model-states file.
        module: Its state dict; None for a pipeline, whose layers are in other files.

    Source: DeepSpeed 0.19, runtime/engine.py (``_get_buffer_names``, which follows ``named_children``).
    """
    names = {n for n in file.fields.optional("buffer_names", list) or [] if isinstance(n, str)}
    module = module or {}
    places = {(ref.storage.key, ref.offset, own_name(n)) for n in names if (ref := module.get(n)) and ref.numel}
    return names | {
        n for n, ref in module.items() if ref.numel and (ref.storage.key, ref.offset, own_name(n)) in places
    }


def own_name(name: str) -> str:
    """Return the last part of a tensor's name: its name in its own module."""
    return name.rpartition(".")[2]


class TensorNames(NamedTuple):
    """Names of tensors, by the part of the checkpoint that stores their values."""

    stored: Container[str]
    """Names under which tensors are stored, so that other names can be tied to them."""
    trained: Container[str]
    """Names of the parameters in the optimizer."""
    frozen: Container[str]
    """Names of the frozen parameters whose values are partitioned (stage 3)."""
    buffers: Container[str]
    """Names of buffers: several may share bytes, and each is stored."""


class Aliases(NamedTuple):
    """Tied names."""

    names: Mapping[str, str]
    """Alias to the stored name of the tensor."""
    copies: Mapping[str, State]
    """Alias to its own copy of the tensor, which must equal the tensor."""


def read_aliases(file: RankFile, module: Mapping[str, TensorRef], known: TensorNames, *, placeholders: bool) -> Aliases:
    """Return tied names, and second copies of tied tensors.

    ``shared_params`` records ties since 0.9.2, but not on every rank. Two names of one tensor also share its bytes, or
    at stage 3 its placeholder.

    Args:
        file: The model-states file.
        module: Its state dict.
        known: Names of tensors, by the part that stores them.
        placeholders: Whether the module contains an empty tensor for each parameter (stage 3).

    Raises:
        LayoutError: ``shared_params`` ties tensors of different shapes, or unknown names.
    """
    recorded = _recorded_ties(file, module, known, placeholders=placeholders)
    names = dict(recorded.names)
    if placeholders:
        for alias, name in _ties_by_placeholder(module, known.trained, known.frozen).items():
            if alias not in known.buffers:
                names.setdefault(alias, name)
    return Aliases(names | _ties_by_storage(module, known, names), recorded.copies)


def _recorded_ties(
    file: RankFile, module: Mapping[str, TensorRef], known: TensorNames, *, placeholders: bool
) -> Aliases:
    """Return the ties in ``shared_params``."""
    excluded = file.fields.values.get("frozen_param_shapes") is None
    names: dict[str, str] = {}
    copies: dict[str, State] = {}
    for alias, name in (file.fields.optional("shared_params", dict) or {}).items():
        if not isinstance(alias, str) or not isinstance(name, str):
            raise file.fields.error("shared_params", "ties keys that are not names")
        ours, theirs = module.get(alias), module.get(name)
        if excluded and theirs is None and name not in known.trained and alias not in known.trained:
            continue  # the save left out the frozen tensor, but DeepSpeed leaves its other names in the state dict
        if name not in known.stored:
            raise file.fields.error("shared_params", f"ties {brief(alias)} to {brief(name)}, which is not there")
        if alias in known.trained:
            problem = f"ties {brief(alias)} to {brief(name)}, but the optimizer holds both"
            raise file.fields.error("shared_params", problem)
        if ours is None or theirs is None:
            names[alias] = name
            continue
        if not placeholders and ours.numel == theirs.numel == 0:
            continue  # DeepSpeed ties by address, and all tensors without elements have the same address
        names[alias] = name
        if ours == theirs:
            continue
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            raise file.fields.error("shared_params", f"ties {alias} {ours.shape} to {name} {theirs.shape}")
        if ours.numel:
            copies[alias] = whole_tensor(file.torch, file.file_index, ours)
    return Aliases(names, copies)


def _ties_by_storage(module: Mapping[str, TensorRef], known: TensorNames, aliases: Container[str]) -> dict[str, str]:
    """Map names that share bytes to one of them: the trained one, or else the first."""
    stored: dict[tuple[object, ...], list[str]] = {}
    for name, ref in module.items():
        if ref.numel and name not in aliases and name not in known.buffers:
            stored.setdefault((ref.storage.key, ref.offset, ref.dtype, ref.shape, ref.stride), []).append(name)
    result: dict[str, str] = {}
    for names in stored.values():
        own = next((n for n in names if n in known.trained), names[0])
        result |= {n: own for n in names if n != own and n not in known.trained}
    return result


def _ties_by_placeholder(
    module: Mapping[str, TensorRef], trained: Container[str], frozen: Container[str]
) -> dict[str, str]:
    """Map names that share the placeholder of a partitioned parameter to the name of that parameter.

    ``shared_params`` lacks further names of a module that is registered several times under one parent, because
    DeepSpeed walks ``named_children``, which yields such a module once. The module's state dict has all names, and the
    tensors of a tied parameter share one (empty) storage.

    Source: DeepSpeed 0.19, runtime/engine.py (``_get_shared_params``).
    """
    owners: dict[str, list[str]] = {}
    for name, ref in module.items():
        if name in trained or name in frozen:
            owners.setdefault(ref.storage.key, []).append(name)
    result: dict[str, str] = {}
    for name, ref in module.items():
        tied = owners.get(ref.storage.key, [])
        if len(tied) == 1 and name not in trained and name not in frozen:
            result[name] = tied[0]
    return result


def embedded_storages(file: RankFile, *values: object) -> dict[str, State]:
    """Locate the storages of the tensors inside plain data of a file, by key."""
    result: dict[str, State] = {}
    for item in walk(list(values)):
        if isinstance(item, TensorRef):
            ref = item.storage
            where = file.torch.storages[ref.key]
            result[ref.key] = State((ref.numel,), ref.dtype, Contiguous(ref.numel, file.file_index, where.start))
    return result


def zenflow(file: RankFile) -> bool:
    """Return whether the run used ZenFlow, which updates the module's copies of selected columns before their masters.

    Source: DeepSpeed 0.19.8, runtime/zenflow/zenflow_stage_1_and_2.py (``selective_optimizer_step``,
    ``sync_fp32_param_from_gpu``).
    """
    config = file.fields.optional("ds_config", dict) or {}
    zero = config.get("zero_optimization")
    return isinstance(zero, dict) and isinstance(zero.get("zenflow"), dict)


def client_state(file: RankFile) -> dict[str, Any]:
    """Return the values that the user's code saved with the model; their keys need not be text.

    Without tensor parallelism and AutoEP, ``universal_checkpoint_info`` is among them: Megatron-DeepSpeed passes it.
    """
    values = file.fields.values
    whole = values.get("mp_world_size") == 1 and not values.get("ds_autoep_layers")
    of_engine = ENGINE_KEYS - {"universal_checkpoint_info"} if whole else ENGINE_KEYS
    return {k: v for k, v in values.items() if k not in of_engine}


class CommonFacts(TypedDict):
    """Fields of ``Checkpoint`` in the model-states files of all DeepSpeed formats."""

    deepspeed_version: str | None
    samples: int | None
    skipped_steps: int
    scheduler: Any
    data_states: Mapping[str, Any]
    client_state: Mapping[str, Any]
    ds_config: Mapping[str, Any]
    embedded: Mapping[str, State]


def common_facts(first: RankFile) -> CommonFacts:
    """Read the fields of a checkpoint that only the first model-states file has.

    Args:
        first: The file of the first model-parallel rank.
    """
    scheduler = first.fields.values.get("lr_scheduler")
    client = client_state(first)
    data = {key: first.fields.values[key] for key in DATA_KEYS if first.fields.values.get(key) is not None}
    return CommonFacts(
        deepspeed_version=first.fields.optional("ds_version", str),
        samples=first.fields.count("global_samples"),
        skipped_steps=first.fields.optional("skipped_steps", int) or 0,
        scheduler=scheduler,
        data_states=data,
        client_state=client,
        ds_config=first.fields.optional("ds_config", dict) or {},
        embedded=embedded_storages(first, client, scheduler, data),
    )
