"""Checkpoint -> plan of the files of single ranks that verl and Accelerate load, with DTensors in them.

Each file serves one number of ranks, one mesh, and the torch releases that pickle a mesh in one form. Tensors are on
the CPU, as with ``StateDictOptions(cpu_offload=True)``: loaders copy them to the device of the parameter.

Source: verl 0.9, utils/checkpoint/fsdp_checkpoint_manager.py (``load_checkpoint``); Accelerate 1.15,
utils/fsdp_utils.py (``load_fsdp_model``, ``load_fsdp_optimizer``); torch 2.6 to 2.14, distributed/device_mesh.py
(``DeviceMesh.__getstate__``), distributed/tensor/_dtensor_spec.py and placement_types.py.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckpttool.containers.values import Opaque, OrderedDict, Size, TorchDType
from ckpttool.dtypes import DTYPES
from ckpttool.errors import ArgumentError, PlanError
from ckpttool.model import MASTER, MODULE, DeviceMesh
from ckpttool.plan import CopyPlan
from ckpttool.plan.builder import CopyBuilder, Placement
from ckpttool.targets.torch import TorchFileBuilder, as_in_torch, group_options, opaque_object, plain_file, view

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpttool.containers.values import TensorRef
    from ckpttool.model import Checkpoint, Parameter, State
    from ckpttool.plan import ConsistencyChecks, TargetFile

LAYOUTS = ("verl", "accelerate")
"""Layouts by name."""
FIRST_LAYOUTS = "2.13"
"""The first torch release that pickles the layout of a mesh in the place of its ranks."""
_SPEC = "torch.distributed.tensor._dtensor_spec"
_PLACEMENTS = "torch.distributed.tensor.placement_types"
_MESH = "torch.distributed._mesh_layout"


def mesh_for(
    checkpoint: Checkpoint,
    layout: str,
    *,
    world_size: int | None,
    mesh: Mapping[str, int] | Sequence[int] | None,
    device: str | None,
    torch: str | None,
) -> DeviceMesh:
    """Return the mesh of the run that loads the files: the given facts, otherwise the source's, otherwise defaults.

    Args:
        checkpoint: The source.
        layout: One of LAYOUTS.
        world_size: Number of ranks; None for the source's.
        mesh: Sizes of the dimensions by name, or sizes alone. The last dimension shards, the others replicate.
        device: Type of the run's device; default: "cuda".
        torch: Oldest release that loads the files, "2.6" or "2.13"; default: "2.13".

    Raises:
        ArgumentError: The mesh has another number of ranks than the world size.
    """
    own = checkpoint.mesh
    if mesh is not None:
        names, shape = (tuple(mesh), tuple(mesh.values())) if isinstance(mesh, Mapping) else ((), tuple(mesh))
        if world_size not in {None, math.prod(shape)}:
            problem = f"has {math.prod(shape)} ranks, but world_size is {world_size}"
            raise ArgumentError("mesh", problem, "leave out world_size", ("world_size",))
    else:
        ranks = world_size or checkpoint.topology.data_parallel
        names = own.names if own is not None and len(own.names) == 1 else ()
        names = names or (("fsdp",) if layout == "verl" else ())
        shape = (ranks,)
    device = device or ("cuda" if own is None else own.device)
    return DeviceMesh(names, shape, device, torch or (FIRST_LAYOUTS if own is None else own.torch))


def plan_rank_files(
    checkpoint: Checkpoint, layout: str, mesh: DeviceMesh, *, consistency: ConsistencyChecks | None = None
) -> CopyPlan:
    """Plan the files of all ranks; verl's ``fsdp_config.json`` is the last.

    Args:
        checkpoint: The source.
        layout: One of LAYOUTS.
        mesh: The mesh of the run that loads them.
        consistency: Consistency checks to make before the first write.

    Raises:
        PlanError: The checkpoint contains no parameters, does not distinguish buffers from frozen parameters, or does
            not record the order of the optimizer's parameters.
    """
    if not checkpoint.parameters:
        raise PlanError(checkpoint.location, "holds no parameters", "choose another checkpoint")
    unclear = [p.name for p in checkpoint.parameters if p.frozen] if not checkpoint.tells_buffers else []
    if unclear:
        problem = f"does not say whether {unclear[0]} is a frozen parameter, which is sharded, or a buffer"
        raise PlanError(
            checkpoint.location, problem, "pass the names of all that are not sharded in buffers", ("buffers",)
        )
    builder = CopyBuilder(checkpoint)
    ranks = math.prod(mesh.shape)
    files: list[TargetFile] = []
    for rank in range(ranks):
        model, optimizer = (
            (f"model_world_size_{ranks}_rank_{rank}.pt", f"optim_world_size_{ranks}_rank_{rank}.pt")
            if layout == "verl"
            else (f"pytorch_model_fsdp_0_rank{rank}.bin", f"optimizer_0_rank{rank}.bin")
        )
        files.append(_model(checkpoint, _RankFile(model, builder, mesh, rank)))
        if checkpoint.groups:
            files.append(_optimizer(checkpoint, _RankFile(optimizer, builder, mesh, rank), numbered=layout == "verl"))
        if layout == "verl":
            extra = TorchFileBuilder(f"extra_state_world_size_{ranks}_rank_{rank}.pt", builder)
            files.append(extra.build({"lr_scheduler": checkpoint.scheduler}))
    if layout == "verl":
        config = json.dumps({"FSDP_version": 2, "world_size": ranks}, indent=4)
        files.append(plain_file("fsdp_config.json", config.encode()))
    return CopyPlan(builder.sources, builder.casts, tuple(files), consistency)


def _model(checkpoint: Checkpoint, file: _RankFile) -> TargetFile:
    root = OrderedDict()
    for parameter in checkpoint.parameters:
        root[parameter.name] = file.part(checkpoint.weights(parameter), whole=parameter.name in checkpoint.unsharded)
    for buffer in checkpoint.buffers:
        root[buffer.name] = file.torch.whole(buffer.state)
    for alias, name in checkpoint.aliases.items():
        if name in root:
            root[alias] = root[name]
    return file.torch.build(root)


def _optimizer(checkpoint: Checkpoint, file: _RankFile, *, numbered: bool) -> TargetFile:
    """Return the optimizer's file of one rank.

    Args:
        checkpoint: The source.
        file: The file.
        numbered: Whether keys are numbers in the order of the groups, as of ``Optimizer.state_dict``, or names.
    """
    order = [parameter.name for parameter in checkpoint.parameters]
    groups: list[dict[str, Any]] = []
    keys: dict[str, Any] = {}
    for number, group in enumerate(checkpoint.groups):
        listed = list(group.listed or group.parameters)
        if numbered and not group.ordered:
            problem = "does not record the order of the optimizer's parameters, which verl's files count"
            raise PlanError(checkpoint.location, problem, 'choose to="dcp", or the layout accelerate', ("to",))
        if numbered and len(checkpoint.groups) == 1 and not checkpoint.masters_alone:
            listed = [
                p.name for p in checkpoint.parameters
            ]  # DeepSpeed lists no frozen parameters; verl's optimizer does
        keys.update({name: len(keys) + n if numbered else name for n, name in enumerate(listed)})
        options = file.torch.hyperparameters(group_options(checkpoint, number))
        plain = len(checkpoint.groups) == 1 and listed == [name for name in order if name in listed]
        if group.named or (numbered and (not plain or checkpoint.unsharded)):
            options["param_names"] = listed  # torch's own key; without it, numbers of several groups have no names
        groups.append({**options, "params": [keys[name] for name in listed]})
    state: dict[Any, dict[str, Any]] = {}
    for parameter in checkpoint.parameters:
        if parameter.trained and parameter.name in keys:
            state[keys[parameter.name]] = dict(_states(checkpoint, parameter, file))
    return file.torch.build({"state": state, "param_groups": groups})


def _states(checkpoint: Checkpoint, parameter: Parameter, file: _RankFile) -> Iterator[tuple[str, Any]]:
    for key, scalar in checkpoint.numbers(parameter).items():
        if key not in parameter.states:
            yield key, file.torch.scalar(as_in_torch(key, scalar))
    for key, state in parameter.states.items():
        if key not in {MASTER, MODULE}:
            yield key, file.part(state, whole=parameter.name in checkpoint.unsharded)


class _RankFile:
    """Builds the file of one rank.

    Args:
        name: The file, relative to the output.
        builder: Collects the plan's copies.
        mesh: The mesh.
        rank: The rank.
    """

    def __init__(self, name: str, builder: CopyBuilder, mesh: DeviceMesh, rank: int) -> None:
        self.torch = TorchFileBuilder(name, builder)
        self._mesh = mesh
        self._rank = rank
        self._pickled: Opaque | None = None

    def part(self, state: State, *, whole: bool) -> TensorRef | Opaque:
        """Return the rows of a tensor that this rank has, as a DTensor; if 0-dim or ``whole``, the tensor."""
        if not state.shape or whole:
            return self.torch.whole(state)
        rows, row = state.shape[0], math.prod(state.shape[1:])
        count = -(-rows // self._mesh.shape[-1])  # as torch.chunk
        first = min(rows, count * (self._rank % self._mesh.shape[-1]))
        own = min(rows, first + count) - first
        pieces = [Placement(state, state.dtype, 0, first * row, own * row)] if own * row else []
        storage = self.torch.storage(state.dtype, own * row, pieces)
        return self._dtensor(view(storage, state.dtype, 0, (own, *state.shape[1:])), state.shape)

    def _dtensor(self, local: TensorRef, shape: tuple[int, ...]) -> Opaque:
        dtype = TorchDType(DTYPES[local.dtype].torch)
        strides = tuple(math.prod(n or 1 for n in shape[d + 1 :]) for d in range(len(shape)))
        cls = Opaque("torch.distributed.tensor", "DTensor", "global")
        spec: dict[str, Any] = {
            "mesh": self._device_mesh(),
            "placements": (*(self._replicate() for _ in self._mesh.shape[1:]), _made(_PLACEMENTS, "Shard", dim=0)),
            "tensor_meta": Opaque(_SPEC, "TensorMeta", "new", (Size(shape), strides, dtype)),
        }
        if self._mesh.torch == FIRST_LAYOUTS:
            cut = (len(self._mesh.shape) - 1,)
            spec["shard_order"] = (Opaque(_SPEC, "ShardOrderEntry", "new", (0, cut)),)
            spec["use_strided_shard_as_shard_order"] = False
        strided = Opaque("torch.serialization", "_get_layout", "call", ("torch.strided",))
        wrapper = (cls, dtype, shape, strides, 0, strided, Opaque("torch", "device", "call", ("cpu",)), False)
        arguments = (
            Opaque("torch._utils", "_rebuild_wrapper_subclass", "global"),
            cls,
            wrapper,
            (None, {"_local_tensor": local, "_spec": opaque_object(_SPEC, "DTensorSpec", {**spec, "_hash": None})}),
        )
        return Opaque("torch._tensor", "_rebuild_from_type_v2", "call", arguments)

    def _replicate(self) -> Opaque:
        """Return a pickled ``Replicate``: torch 2.13 crashes without a state, older releases have none."""
        value = Opaque(_PLACEMENTS, "Replicate", "new")
        value.stated, value.state = self._mesh.torch == FIRST_LAYOUTS, {}
        return value

    def _device_mesh(self) -> Opaque:
        """Return the pickled mesh, the same object for all tensors of the file."""
        if self._pickled is None:
            self._pickled = opaque_object("torch.distributed.device_mesh", "DeviceMesh", self._mesh_state())
        return self._pickled

    def _mesh_state(self) -> dict[str, Any]:
        mesh, ranks = self._mesh, math.prod(self._mesh.shape)
        strides = [math.prod(mesh.shape[axis + 1 :]) for axis in range(len(mesh.shape))]
        coordinate = [self._rank // stride % size for size, stride in zip(mesh.shape, strides, strict=True)]
        names, numbers = mesh.names or None, tuple(range(ranks))
        # Names of process groups differ from run to run, except the group of all ranks. Without a name, full_tensor()
        # of a state fails that Optimizer.load_state_dict has taken from the file; a step and a save do not need it.
        groups = ["0"] if len(mesh.shape) == 1 else []
        data = struct.pack(f"<{ranks}i", *numbers)
        if mesh.torch != FIRST_LAYOUTS:
            return {
                "device_type": mesh.device,
                "mesh": self.torch.constant(data, "I32", mesh.shape),
                "mesh_dim_names": names,
                "_flatten_mesh_list": numbers,
                "_thread_id": None,
                "_coordinate_on_dim": coordinate,
                "_dim_group_names": groups,
            }
        axes = [
            _made(_MESH, "_FlatLayout", shape=(size,) if size > 1 else (), stride=(stride,) if size > 1 else ())
            for size, stride in zip(mesh.shape, strides, strict=True)
        ]
        return {
            "_device_type": mesh.device,
            "_layout": _made(_MESH, "_MeshLayout", axes=tuple(axes)),
            "_rank_map": self.torch.constant(data, "I32", (ranks,)),
            "_mesh_dim_names": names,
            "_root_mesh": None,
            "_flatten_rank_map": numbers,
            "_thread_id": None,
            "_flatten_mapping": {},
            "_dim_group_names": groups,
            "_rank": self._rank,
            "_coordinate_on_dim": tuple(coordinate),
            "_hash": None,
        }


def _made(module: str, name: str, **attributes: Any) -> Opaque:
    """Return an instance of a class that keeps its attributes in a dictionary."""
    return opaque_object(module, name, attributes)
