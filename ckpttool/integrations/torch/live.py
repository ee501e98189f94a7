"""The tensors of a live torch run on this rank: weights, buffers and optimizer states.

Works with plain torch, DDP, and DTensors of FSDP2 and tensor parallelism, whose parts have a place in the whole tensor.

Source: torch 2.13, distributed/tensor (placements and meshes), optim/optimizer.py (``state``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckpttool.dtypes import BY_TORCH_NAME
from ckpttool.errors import ArgumentError
from ckpttool.formats.dtensor import DTensor, Mesh, MeshPlacement
from ckpttool.model import DeviceMesh
from ckpttool.model.items import STEP, WEIGHTS
from ckpttool.model.names import WRAPPERS, plain_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


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


def pieces_of(named: NamedTensors, optimizers: Sequence[Any] = ()) -> list[Piece]:
    """Return the parts that this rank has of the parameters, the buffers, and the states of the optimizers.

    Raises:
        ArgumentError: The optimizers have no parameter of the model, or as for ``piece_of``.
    """
    pieces = [piece_of(WEIGHTS, name, parameter) for name, parameter in named.parameters.items()]
    pieces += [replace(piece_of(WEIGHTS, name, buffer), is_buffer=True) for name, buffer in named.buffers.items()]
    names = named.names
    trained = [(one, p) for one in optimizers for group in one.param_groups for p in group["params"]]
    known = [(owner, p) for owner, p in trained if id(p) in names]
    if trained and not known:
        problem, hint = "has no parameter of the model", "make it after the model is wrapped"
        hint += " (fully_shard replaces parameters), or leave it out to digest the weights alone"
        raise ArgumentError("optimizer", problem, hint)
    for owner, parameter in known:
        for key, value in owner.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and not (is_number(key, value, parameter) or wrapped_class(value)):
                pieces.append(piece_of(key, names[id(parameter)], value))
    return pieces


def is_number(key: str, value: Any, parameter: Any) -> bool:
    """Return whether an optimizer state is one number for a parameter."""
    if not isinstance(value, torch.Tensor):
        return isinstance(value, bool | int | float)
    return value.numel() == 1 and value.dim() <= 1 and (key == STEP or value.shape != parameter.shape)


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


def type_name(dtype: Any) -> str:
    """Return a torch dtype in safetensors' spelling."""
    return BY_TORCH_NAME[str(dtype).removeprefix("torch.")].name


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
