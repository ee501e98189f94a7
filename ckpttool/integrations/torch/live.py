"""Digest the live state of this rank in place: weights, buffers and optimizer states, on the device that has them.

Works with plain torch, DDP, and DTensors of FSDP2 and tensor parallelism, whose parts are digested at their place in
the whole tensor. The parts of all ranks are then merged: replicas must be equal, and parts must cover each tensor once.

Source: torch 2.13, distributed/tensor (placements and meshes), optim/optimizer.py (``state``).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckpttool import digests
from ckpttool.checksums import crc32
from ckpttool.dtypes import BY_TORCH_NAME, numpy_dtype
from ckpttool.errors import ArgumentError
from ckpttool.formats.dtensor import DTensor, Mesh, MeshPlacement
from ckpttool.model import DeviceMesh
from ckpttool.model.names import WRAPPERS, plain_name
from ckpttool.model.rank_digest import BOX, COPY, NO_SUM, Part, RankDigest, RankFacts
from ckpttool.model.state_digest import (
    NOT_COMPARED,
    NOT_HYPERPARAMETERS,
    PYTHON,
    STEP,
    WEIGHTS,
    canonical,
    items_of,
    leaves,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CHUNK_WORDS = 1 << 22
"""Words that are digested at once on a device."""
COPIED_ELEMENTS = 1 << 14
"""Most elements of a tensor on a device that is digested on the host: a copy is faster than the device's calls."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The part of a tensor that this rank has."""

    key: str
    """State: "weights", "module", "exp_avg"."""
    name: str
    """Parameter or buffer."""
    tensor: torch.Tensor
    """The elements, on any device."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    starts: tuple[int, ...] | int
    """Index of the first element in each dimension; or in C order, if the elements are one run."""
    is_buffer: bool = False
    """True for a buffer: each rank may have its own values."""

    @property
    def whole(self) -> bool:
        """True if the part is the whole tensor."""
        return bool(self.tensor.numel() == math.prod(self.shape))

    @property
    def dtype(self) -> str:
        """Its dtype in safetensors' spelling."""
        return type_name(self.tensor.dtype)

    @property
    def first(self) -> int | None:
        """Index of the first element in C order, if the elements are one run; else None."""
        if isinstance(self.starts, int):
            return self.starts
        if all(n == m for n, m in zip(self.tensor.shape[1:], self.shape[1:], strict=True)):
            return self.starts[0] * math.prod(self.shape[1:]) if self.starts else 0
        return None

    @property
    def place(self) -> int:
        """Identifier of the part, the same on all ranks that have it; see ``RankDigest.rows``."""
        if self.first is not None:
            return self.first
        text = f"{self.starts} {tuple(self.tensor.shape)}".encode()
        return BOX | int.from_bytes(hashlib.sha256(text).digest()[:8], "little")

    def digest(self) -> int:
        """Return the digest of its elements, computed on the device that has them."""
        tensor = self.tensor.detach()
        at = self.starts if self.first is None else self.first
        if not tensor.numel():
            return 0
        if tensor.device.type != "cpu" and tensor.numel() <= COPIED_ELEMENTS:
            tensor = tensor.cpu()
        if tensor.device.type != "cpu":
            return _on_device(tensor, at, self.shape)
        values = as_array(tensor)
        if isinstance(at, int):
            return digests.digest(values.reshape(-1), at)
        return digests.digest_box(values, at, self.shape)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LiveState(RankFacts):
    """The live state of one rank."""

    pieces: Sequence[Piece]
    """Its parts of all tensors; a shard may be empty."""

    def with_given(self, client_state: Mapping[str, Any], rank_state: Any) -> LiveState:
        """Return the state with the client state, and with the state of this rank that the user gives, or None."""
        own = {} if rank_state is None else values_of("rank_state", rank_state)
        values = {**self.values, **values_of("client_state", client_state)}
        return replace(self, values=values, own={**self.own, **own})

    def _digests(self) -> list[int]:
        if torch.get_num_threads() == 1:
            return [piece.digest() for piece in self.pieces]
        with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="ckpttool-digest") as pool:
            return list(pool.map(Piece.digest, self.pieces))

    def digest(self, found: Sequence[tuple[int, int]] | None = None) -> RankDigest:
        """Digest the state of this rank.

        Args:
            found: Digest and checksum of each piece, if they are known; see ``RankDigest.rows``.
        """
        values = [(one, NO_SUM) for one in self._digests()] if found is None else found
        rows = [
            [p.place, p.tensor.numel(), value & digests.MASK, value >> 64, checksum]
            for p, (value, checksum) in zip(self.pieces, values, strict=True)
        ]
        return RankDigest(
            parts=[Part(p.key, p.name, p.dtype, p.shape, p.is_buffer) for p in self.pieces],
            rows=np.array(rows, dtype=np.uint64).reshape(-1, 5),
            **{name: getattr(self, name) for name in RankFacts.__dataclass_fields__},
        )


class SavedDigests:
    """The digests that a save records, computed in any thread.

    A checksum, which takes a tenth of the time, shows whether a part that another rank digests has the same bytes.

    Args:
        state: The live state of this rank.
        held: Parts with the bytes that the save writes, by index: if the train loop continues before the save has
            ended, all others are digested at once.
        copies: The parts that other ranks have too, by index: whether another one digests it.
        waits: Whether the train loop waits for the save.
    """

    def __init__(self, state: LiveState, held: Mapping[int, Piece], copies: Mapping[int, bool], *, waits: bool) -> None:
        self._state = replace(state, pieces=[held.get(n, piece) for n, piece in enumerate(state.pieces)])
        self._copies = copies
        self._known = {n: self._one(n) for n in range(len(state.pieces)) if n not in held and not waits}

    def compute(self) -> RankDigest:
        """Return the digests of this rank."""
        return self._state.digest([self._known.get(n) or self._one(n) for n in range(len(self._state.pieces))])

    def _one(self, n: int) -> tuple[int, int]:
        """Return the digest of a part, and its checksum as ``RankDigest.rows`` has it, if other ranks have the part."""
        piece, is_copy = self._state.pieces[n], self._copies.get(n)
        if is_copy is None:
            return piece.digest(), NO_SUM
        checksum = crc32(as_array(piece.tensor).reshape(-1).view(np.uint8).data)
        return (0, checksum | COPY) if is_copy else (piece.digest(), checksum)


def as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor on the CPU as an array that shares its memory if it is contiguous."""
    dtype = BY_TORCH_NAME[str(tensor.dtype).removeprefix("torch.")]
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), numpy_dtype(dtype.name))
    # Two steps: numpy has no bf16, and a 0-dim tensor cannot be seen as bytes.
    flat = tensor.reshape(-1)
    if flat.stride() != (1,):  # of one element, which counts as contiguous with any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    raw: np.ndarray[Any, Any] = flat.view(torch.uint8).numpy()
    return raw.view(numpy_dtype(dtype.name)).reshape(tuple(tensor.shape))


@cache
def _factors_on(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(digests.factors_in_block().view(np.int64)).to(device)


def _on_device(tensor: torch.Tensor, at: tuple[int, ...] | int, shape: Sequence[int]) -> int:
    """Return the digest of a part, computed by integer operations of its device, which wrap around at 2^64."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.dtype in {torch.float16, torch.bfloat16}:
        flat = flat.float()  # of one part, as the optimizer's step does
    per_element = max(1, flat.element_size() // 4)
    words = flat.view(
        torch.int32 if flat.element_size() >= 4 else {1: torch.uint8, 2: torch.int16}[flat.element_size()]
    )
    mask = 0xFFFF if words.dtype == torch.int16 else 0xFFFFFFFF
    total = [0] * digests.LANES
    for begin in range(0, len(words), CHUNK_WORDS):
        wide = words[begin : begin + CHUNK_WORDS].to(torch.int64) & mask
        places = torch.arange(begin, begin + len(wide), dtype=torch.int64, device=flat.device)
        if isinstance(at, int):
            places += at * per_element
        else:
            places = _place(places // per_element, tensor.shape, at, shape) * per_element + places % per_element
        blocks = places >> 12
        first = int(blocks.min())
        of_blocks = digests.factors_of_blocks(first, int(blocks.max()) - first + 1).view(np.int64)
        factors = torch.from_numpy(of_blocks).to(flat.device)
        blocks -= first
        places &= digests.BLOCK_WORDS - 1
        for lane in range(digests.LANES):
            coefficients = _factors_on(flat.device)[lane][places] * factors[lane][blocks]
            total[lane] += int((wide * coefficients).sum())
    high, low = total[1] & digests.MASK, total[0] & digests.MASK
    return high << 64 | low


def _place(element: torch.Tensor, own: Sequence[int], starts: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """Return the indexes in the whole tensor of elements of a box."""
    place = torch.zeros_like(element)
    for dim in reversed(range(len(shape))):
        place += (element % own[dim] + starts[dim]) * math.prod(shape[dim + 1 :])
        element = element // own[dim]
    return place


# --------------------------------------------------------------------------------------------------- torch's state


@dataclass(frozen=True, slots=True, eq=False)
class NamedTensors:
    """The tensors of a torch model, by the names of its state dict without the names of wrappers."""

    module: Any
    """The model without DDP and ``torch.compile``."""
    parameters: Mapping[str, Any]
    """Its parameters, each by its first name."""
    buffers: Mapping[str, Any]
    """Its persistent buffers."""
    aliases: Mapping[str, str]
    """Tied names: further name in the state dict to the first one."""
    others: Sequence[str]
    """Further names in the state dict: extra state, and what hooks add."""

    @property
    def names(self) -> dict[int, str]:
        """Names of parameters by identity."""
        return {id(parameter): name for name, parameter in self.parameters.items()}


def named_tensors(model: Any) -> NamedTensors:
    """Return the tensors of a torch model: plain, DDP, FSDP2, HSDP or tensor-parallel.

    Raises:
        ArgumentError: It is not a module, or it is the module of an engine.
    """
    if not isinstance(model, torch.nn.Module):
        problem = f"is a {type(model).__name__}, not a torch.nn.Module or a DeepSpeed engine"
        raise ArgumentError("model", problem, "pass the model that is trained")
    module = unwrapped(model)
    if any(hasattr(parameter, "ds_tensor") for parameter in module.parameters()):
        problem = "is the module of a ZeRO-3 engine, whose weights are partitioned"
        raise ArgumentError("model", problem, "pass the engine")
    state_dict = {plain_name(name) for name in module.state_dict()}  # after which FSDP2 has sharded parameters
    parameters = {plain_name(full): parameter for full, parameter in module.named_parameters()}
    buffers = {plain_name(full): buffer for full, buffer in module.named_buffers()}
    names = {id(tensor): name for name, tensor in (*parameters.items(), *buffers.items())}
    every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    named = {plain_name(name): names[id(tensor)] for name, tensor in every}
    return NamedTensors(
        module,
        parameters,
        {name: buffer for name, buffer in buffers.items() if name in state_dict},
        {name: first for name, first in named.items() if name != first and name in state_dict},
        sorted(state_dict - named.keys()),
    )


def live_state(
    model: Any, optimizer: Any = None, scheduler: Any = None, extra: Mapping[str, Any] | None = None
) -> LiveState:
    """Return the live state of a torch model on this rank: plain, DDP, FSDP2, HSDP or tensor-parallel.

    Args:
        model: ``torch.nn.Module``; wrappers of DDP, ``torch.compile`` and activation checkpointing are left out.
        optimizer: Its ``torch.optim.Optimizer``, or a list of several; None for the weights alone.
        scheduler: Its learning-rate scheduler, or several by name.
        extra: The states of other objects, by name.

    Raises:
        ArgumentError: The model is not a module, or a tensor is distributed as partial sums.
    """
    named = named_tensors(model)
    pieces = [piece_of(WEIGHTS, name, parameter) for name, parameter in named.parameters.items()]
    pieces += [replace(piece_of(WEIGHTS, name, buffer), is_buffer=True) for name, buffer in named.buffers.items()]
    found = {} if optimizer is None else _optimizer_state(optimizer, named.names, pieces)
    of_groups = found.get("group_of", {})
    return LiveState(
        pieces=pieces,
        ungrouped=[name for name, p in named.parameters.items() if p.requires_grad and name not in of_groups],
        values={**scheduler_values(scheduler), **extra_values(extra or {})},
        aliases=named.aliases,
        others=named.others,
        frozen=[name for name, p in named.parameters.items() if not p.requires_grad],
        trains=optimizer is not None,
        pending=pending_gradients(named.module) if optimizer is not None else "",
        **found,
    )


def _optimizer_state(optimizer: Any, names: Mapping[int, str], pieces: list[Piece]) -> dict[str, Any]:
    """Add the tensors of an optimizer to ``pieces``; return its other facts, by their names in ``RankFacts``."""
    numbers: dict[str, dict[str, float]] = {}
    types: dict[str, dict[str, str]] = {}
    unproven: dict[str, str] = {}
    group_of = {}
    strangers = 0
    optimizers = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    groups = [(one, group) for one in optimizers for group in one.param_groups]
    for number, (owner, group) in enumerate(groups):
        for parameter in group["params"]:
            name = names.get(id(parameter), "")
            if not name:
                strangers += 1
                continue
            group_of[name] = number
            for key, value in owner.state.get(parameter, {}).items():
                if (found := number_of(key, value, parameter)) is not None:
                    numbers.setdefault(key, {})[name] = found
                    types.setdefault(key, {})[name] = type_of(value)
                elif isinstance(value, torch.Tensor) and not wrapped_class(value):
                    pieces.append(piece_of(key, name, value))
                elif isinstance(value, torch.Tensor):
                    unproven[key] = f"it is a {wrapped_class(value)}, not a tensor"
                elif value is not None and not (isinstance(value, list | tuple | dict) and not value):
                    unproven[key] = f"it is a {type(value).__name__}, not a tensor"
    if strangers:
        unproven[f"{strangers} parameters of the optimizer"] = "the model does not have them"
    if strangers and not group_of:
        problem, hint = "has no parameter of the model", "make it after the model is wrapped"
        hint += " (fully_shard replaces parameters), or leave it out to digest the weights alone"
        raise ArgumentError("optimizer", problem, hint)
    options = [options_of(group) for _, group in groups]
    return {"numbers": numbers, "types": types, "unproven": unproven, "groups": options, "group_of": group_of}


def pending_gradients(module: Any) -> str:
    """Return the gradients that a module has, as text for the user; "" if there are none."""
    found = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is not None]
    if not found:
        return ""
    return f"the gradients of {len(found):,} parameters, to which the next backward pass adds"


def _gradient_holders(module: Any) -> Iterator[tuple[Any, str]]:
    """Yield each object that may have a gradient, and the attribute: FSDP2 accumulates some beside the parameters.

    Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py (``unsharded_accumulated_grad``).
    """
    for parameter in module.parameters():
        yield parameter, "grad"
    for inner in module.modules():
        state = inner._get_fsdp_state() if hasattr(inner, "_get_fsdp_state") else None
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for one in [one for group in groups if group is not None for one in group.fsdp_params]:
            yield one, "unsharded_accumulated_grad"
            if (unsharded := getattr(one, "_unsharded_param", None)) is not None:
                yield unsharded, "grad"


def has_gradients(module: Any) -> bool:
    """Return whether a module has gradients that the next backward pass would add to."""
    return any(getattr(holder, name, None) is not None for holder, name in _gradient_holders(module))


def drop_gradients(module: Any) -> None:
    """Drop the gradients of a module."""
    for holder, name in _gradient_holders(module):
        if getattr(holder, name, None) is not None:
            setattr(holder, name, None)


def unwrapped(model: Any) -> Any:
    """Return the module inside DDP and ``torch.compile``."""
    while True:
        inner = next((getattr(model, name) for name in WRAPPERS if name in getattr(model, "_modules", {})), None)
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def number_of(key: str, value: Any, parameter: Any) -> float | None:
    """Return an optimizer state that is one number for a parameter; None for any other state."""
    if isinstance(value, bool | int | float):
        return float(value)
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.dim() > 1:
        return None
    if key != STEP and value.shape == parameter.shape:
        return None
    return float(value.full_tensor() if hasattr(value, "full_tensor") else value)


def type_name(dtype: Any) -> str:
    """Return a torch dtype in safetensors' spelling."""
    return BY_TORCH_NAME[str(dtype).removeprefix("torch.")].name


def type_of(number: Any) -> str:
    """Return the type of a number of ``number_of``."""
    known = BY_TORCH_NAME.get(str(getattr(number, "dtype", "")).removeprefix("torch."))
    return PYTHON if known is None else known.name


def options_of(group: Mapping[str, Any]) -> dict[str, str]:
    """Return the hyper-parameters of a parameter group as text."""
    return {key: canonical(value, tensor_text) for key, value in group.items() if key not in NOT_HYPERPARAMETERS}


def scheduler_values(scheduler: Any) -> dict[str, str]:
    """Return the state of a scheduler, or of several by name, as text by path."""
    several = scheduler if isinstance(scheduler, Mapping) else {"": scheduler}
    states = {name: one.state_dict() if hasattr(one, "state_dict") else {} for name, one in several.items()}
    return leaves("scheduler", states[""] if [*states] == [""] else states, tensor_text)


def extra_values(states: Mapping[str, Any]) -> dict[str, str]:
    """Return the items of the states of other objects as text, by "extra.name.key"."""
    return {key: text for name, state in states.items() for key, text in values_of(f"extra.{name}", state).items()}


def values_of(kind: str, state: Any) -> dict[str, str]:
    """Return the items of plain data as text, by "kind.key"; data of another form as one item."""
    if not isinstance(state, Mapping):
        return {kind: canonical(state, tensor_text)}
    return {f"{kind}.{key}": canonical(value, tensor_text) for key, value in items_of(state)}


def tensor_text(value: Any) -> str | None:
    """Return a tensor, an array or a number of numpy as text; None for any other object.

    A number counts by its value; a tensor or an array by its type, shape and elements.
    """
    if isinstance(value, np.generic | np.ndarray):
        return _array_text(np.asarray(value))
    if not isinstance(value, torch.Tensor):
        return None
    if value.dim() == 0 and value.dtype.is_floating_point | (not value.is_complex()):
        return canonical(value.item())
    if str(value.dtype).removeprefix("torch.") in BY_TORCH_NAME and not value.is_quantized:
        found = BY_TORCH_NAME[str(value.dtype).removeprefix("torch.")].name
        return f"tensor {found} {list(value.shape)} {Piece('', '', value, tuple(value.shape), 0).digest():032x}"
    return _array_text(value.detach().cpu().resolve_conj().resolve_neg().numpy())


def _array_text(array: np.ndarray[Any, Any]) -> str:
    native = array.dtype.newbyteorder("=")
    what = f"array {native} {list(array.shape)}"
    if array.dtype.names is not None:
        return f"{what} {canonical({name: array[name] for name in array.dtype.names}, tensor_text)}"
    plain = array.dtype.kind in "biufc" and array.dtype.itemsize <= 16 and array.dtype.char not in "gG"
    if array.ndim == 0 and (plain or array.dtype.kind in "US"):
        return canonical(array.item())
    if plain:
        data = np.ascontiguousarray(array.astype(native)).tobytes()
        return f"{what} {hashlib.sha256(data).hexdigest()}"
    if array.dtype.kind in "OUSgGMmV" or array.dtype.char in "gG":  # extended precision has bytes without a value
        elements = array.astype("i8") if array.dtype.kind in "Mm" else array
        items = elements.ravel().tolist()
        return f"{what} {canonical([repr(item) for item in items] if array.dtype.kind != 'O' else items, tensor_text)}"
    return f"{NOT_COMPARED}numpy.ndarray of {array.dtype}"


def wrapped_class(tensor: Any) -> str:
    """Return the class of a tensor that has its values in other tensors, as torchao's 8-bit states; "" for others."""
    inner = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    return type(inner).__name__ if is_traceable_wrapper_subclass(inner) else ""


def piece_of(key: str, name: str, tensor: Any) -> Piece:
    """Return the part of a tensor that this rank has.

    Raises:
        ArgumentError: It has a type or a class that checkpoints cannot have, or no values; or it is a DTensor of
            partial sums, or of parts that are not one block.
    """
    tensor = tensor.detach()
    if str(tensor.dtype).removeprefix("torch.") not in BY_TORCH_NAME:
        raise ArgumentError(name, f"has {key} of {tensor.dtype}, a type that ckpttool does not read", "leave it out")
    if found := wrapped_class(tensor):
        raise ArgumentError(
            name, f"has {key} of the class {found}, whose values ckpttool does not read", "leave it out"
        )
    if tensor.is_meta:
        raise ArgumentError(name, f"has {key} on the meta device, without values", "load the model first")
    shape = tuple(map(int, tensor.shape))
    if not hasattr(tensor, "placements"):
        return Piece(key, name, tensor, shape, 0)
    mesh = tensor.device_mesh
    if not all(kind.is_replicate() or hasattr(kind, "dim") for kind in tensor.placements):
        problem = f"is distributed as {list(tensor.placements)}: partial sums are not a value"
        raise ArgumentError(name, problem, "digest it after it is reduced")
    cuts = (MeshPlacement(getattr(kind, "dim", None), getattr(kind, "split_factor", 0)) for kind in tensor.placements)
    own = DeviceMesh(tuple(mesh.mesh_dim_names or ()), tuple(mesh.shape), mesh.device_type, "")
    ranks = Mesh(own, tuple(mesh.mesh.flatten().tolist()), tuple(mesh.get_coordinate() or ()))
    block = DTensor(None, shape, tuple(cuts), ranks).block()  # type: ignore[arg-type]  # the layout alone
    local = tensor.to_local()
    if block is None or block[1] != tuple(local.shape):
        problem = f"has a part of {list(local.shape)} elements on this rank, which its placements do not explain"
        raise ArgumentError(name, problem, "report it with the mesh and the placements")
    return Piece(key, name, local, shape, block[0])
