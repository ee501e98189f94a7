"""DTensors in the pickle of one rank: the block of the whole tensor that the rank stores.

Source: torch 2.6 to 2.13, distributed/tensor/_api.py, placement_types.py, _dtensor_spec.py and
distributed/device_mesh.py (``DeviceMesh.__getstate__``); distributed/_mesh_layout.py from 2.13 on.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.containers.values import Opaque, TensorRef, TorchDType
from ckpttool.dtypes import BY_TORCH_NAME
from ckpttool.errors import LayoutError
from ckpttool.formats.fields import WHOLE, shape_of
from ckpttool.model import DeviceMesh

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

RESTORE = "restore it from a copy"
_PLACEMENTS = {"Shard", "_StridedShard", "Replicate"}


class MeshPlacement(NamedTuple):
    """How one dimension of the mesh distributes a tensor."""

    dim: int | None
    """The cut dimension of the tensor; None for copies on all ranks."""
    split_factor: int = 0
    """For a strided shard, the number of pieces that mesh dimensions to the right have cut before; 0 for others."""


class Mesh(NamedTuple):
    """The ranks that share a tensor, as an array."""

    of: DeviceMesh
    """Its dimensions."""
    ranks: tuple[int, ...]
    """Global ranks in C order."""
    coordinate: tuple[int, ...]
    """Position of the rank that wrote the file."""

    @property
    def rank(self) -> int:
        """The rank that wrote the file."""
        index = 0
        for size, position in zip(self.shape, self.coordinate, strict=True):
            index = index * size + position
        return self.ranks[index]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return self.of.shape


class DTensor(NamedTuple):
    """A tensor that is distributed over ranks, and the part of one rank."""

    local: TensorRef
    """The elements of this rank."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    placements: tuple[MeshPlacement, ...]
    """One for each dimension of the mesh."""
    mesh: Mesh
    """The ranks."""

    def block(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the first index and the size, in each dimension, of the block that this rank stores.

        Returns:
            None if the elements are not one block: the pieces of a strided shard whose partner was replicated.
        """
        offsets, sizes = [0] * len(self.shape), list(self.shape)
        for dim in range(len(self.shape)):
            order = self._order(dim)
            if order is None:
                return None
            for axis in order:
                count = math.ceil(sizes[dim] / self.mesh.shape[axis])  # as torch.chunk
                first = min(sizes[dim], count * self.mesh.coordinate[axis])
                offsets[dim] += first
                sizes[dim] = min(sizes[dim], first + count) - first
        return tuple(offsets), tuple(sizes)

    def _order(self, dim: int) -> list[int] | None:
        """Return the axes of the mesh that cut a dimension, in the order of the cuts."""
        order: list[int] = []
        for axis in reversed(range(len(self.placements))):
            placement = self.placements[axis]
            if placement.dim != dim:
                continue
            if placement.split_factor:
                if placement.split_factor != math.prod(self.mesh.shape[a] for a in order):
                    return None
                order.append(axis)  # cuts the pieces that the axes to the right have made
            else:
                order.insert(0, axis)
        return order


def dtensor_of(path: str, name: str, value: object, numbers: Callable[[TensorRef], list[int]]) -> DTensor | None:
    """Return a value as DTensor; None if it is none.

    Args:
        path: The file.
        name: Name of the tensor in it, for errors.
        value: The value.
        numbers: Reads the elements of a tensor of integers.

    Raises:
        LayoutError: It is a DTensor of an unknown form, or distributed in a way that cannot be read.
    """
    if not isinstance(value, Opaque) or value.name != "_rebuild_from_type_v2" or len(value.args) != 4:
        return None
    _, cls, arguments, state = value.args
    kind = cls.name if isinstance(cls, Opaque) else ""
    if kind == "ShardedTensor":
        raise LayoutError(path, f"holds {name} as a ShardedTensor of FSDP1, which is not read", WHOLE)
    if kind != "DTensor":
        return None
    fields = state[1] if isinstance(state, tuple) and len(state) == 2 else state
    spec = _state(fields.get("_spec")) if isinstance(fields, dict) else None
    local = fields.get("_local_tensor") if isinstance(fields, dict) else None
    if not isinstance(local, TensorRef) or spec is None or not isinstance(arguments, tuple) or len(arguments) < 3:
        raise _unknown(path, name)
    shape, dtype = shape_of(arguments[2]), arguments[1]
    meta = spec.get("tensor_meta")
    same = isinstance(meta, Opaque) and meta.args and shape_of(meta.args[0]) == shape
    known = isinstance(dtype, TorchDType) and BY_TORCH_NAME[dtype.name].name == local.dtype
    placements, mesh = spec.get("placements"), _state(spec.get("mesh"))
    if shape is None or not same or not known or not isinstance(placements, tuple) or mesh is None:
        raise _unknown(path, name)
    cuts = tuple(_placement(path, name, placement) for placement in placements)
    found = DTensor(local, shape, cuts, _mesh(path, name, mesh, numbers))
    beyond = any(cut.dim is not None and cut.dim >= len(shape) for cut in cuts)
    if len(cuts) != len(found.mesh.shape) or beyond:
        raise _unknown(path, name)
    return found


def shape_of_dtensor(value: object) -> tuple[int, ...] | None:
    """Return the shape of a DTensor without the ranks that share it; None for any other value."""
    if not isinstance(value, Opaque) or value.name != "_rebuild_from_type_v2" or len(value.args) != 4:
        return None
    _, cls, arguments, _ = value.args
    is_one = isinstance(cls, Opaque) and cls.name == "DTensor" and isinstance(arguments, tuple) and len(arguments) > 2
    return shape_of(arguments[2]) if is_one else None


def _unknown(path: str, name: str) -> LayoutError:
    return LayoutError(path, f"holds {name} as a DTensor of an unknown form", "it is damaged, or of an unknown torch")


def _state(value: object) -> dict[str, Any] | None:
    """Return the attributes of an object."""
    state = value.state if isinstance(value, Opaque) else None
    return state if isinstance(state, dict) else None


def _placement(path: str, name: str, value: object) -> MeshPlacement:
    kind = value.name if isinstance(value, Opaque) else str(value)
    if kind not in _PLACEMENTS:
        raise LayoutError(path, f"holds {name} with the placement {kind}, not a part of its values", WHOLE)
    if kind == "Replicate":
        return MeshPlacement(None)
    state = _state(value) or {}
    dim, factor = state.get("dim"), state.get("split_factor", 0)
    if not isinstance(dim, int) or dim < 0 or not isinstance(factor, int) or (kind == "_StridedShard") != (factor > 0):
        raise _unknown(path, name)
    return MeshPlacement(dim, factor)


def _mesh(path: str, name: str, state: dict[str, Any], numbers: Callable[[TensorRef], list[int]]) -> Mesh:
    names = state.get("mesh_dim_names", state.get("_mesh_dim_names")) or ()
    coordinate = state.get("_coordinate_on_dim")
    table = state.get("mesh", state.get("_rank_map"))
    if not isinstance(table, TensorRef) or not isinstance(coordinate, list | tuple) or not isinstance(names, tuple):
        raise _unknown(path, name)
    ranks = numbers(table)
    device = state.get("device_type", state.get("_device_type"))
    if not isinstance(device, str):
        raise _unknown(path, name)
    if "mesh" in state:
        mesh = Mesh(DeviceMesh(names, table.shape, device, "2.6"), tuple(ranks), tuple(coordinate))
    else:
        axes = _axes(state.get("_layout"))
        own = state.get("_rank")
        if axes is None or own not in ranks or len(axes) != len(coordinate):
            raise _unknown(path, name)
        if not all(c in range(len(axis)) for axis, c in zip(axes, coordinate, strict=True)):
            raise _unknown(path, name)
        base = ranks.index(own) - sum(axis[c] for axis, c in zip(axes, coordinate, strict=True))
        places = [base + sum(index) for index in itertools.product(*axes)]
        if any(not 0 <= place < len(ranks) for place in places):
            raise _unknown(path, name)
        dimensions = DeviceMesh(names, tuple(map(len, axes)), device, "2.13")
        mesh = Mesh(dimensions, tuple(ranks[p] for p in places), tuple(coordinate))
    if len(mesh.coordinate) != len(mesh.shape) or len(names) not in {0, len(mesh.shape)}:
        raise _unknown(path, name)
    inside = all(c in range(n) for c, n in zip(mesh.coordinate, mesh.shape, strict=True))
    if not inside or len(set(mesh.ranks)) != math.prod(mesh.shape):
        raise _unknown(path, name)
    return mesh


def _axes(layout: object) -> list[list[int]] | None:
    """Return the positions along each axis of a layout, in the table of ranks."""
    state = _state(layout) or {}
    if "axes" in state:
        pairs = [(axis.get("shape"), axis.get("stride")) for value in state["axes"] if (axis := _state(value))]
        return [_positions(shape, stride) for shape, stride in pairs] if len(pairs) == len(state["axes"]) else None
    shapes, strides = state.get("shape"), state.get("stride")
    if isinstance(shapes, int):
        shapes, strides = (shapes,), (strides,)
    if not isinstance(shapes, tuple) or not isinstance(strides, tuple) or len(shapes) != len(strides):
        return None
    return [_positions(shape, stride) for shape, stride in zip(shapes, strides, strict=True)]


def _positions(shape: object, stride: object) -> list[int]:
    sizes: Sequence[Any] = shape if isinstance(shape, tuple) else (shape,)
    steps: Sequence[Any] = stride if isinstance(stride, tuple) else (stride,)
    if not all(isinstance(n, int) and 0 <= n < 1 << 24 for n in (*sizes, *steps)) or math.prod(sizes) > 1 << 24:
        return []
    return [sum(i * s for i, s in zip(index, steps, strict=False)) for index in itertools.product(*map(range, sizes))]
