"""The tensors of a safetensors file, or of files of ``torch.save``, as states."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ckpttool.dtypes import itemsize
from ckpttool.errors import LayoutError
from ckpttool.model import State
from ckpttool.model.places import Contiguous, Table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.containers.safetensors import Tensor
    from ckpttool.containers.torch_file import TorchFile
    from ckpttool.containers.values import TensorRef
    from ckpttool.ranges import ByteRange


def states_in(entries: Mapping[str, tuple[Tensor, ByteRange]], file: int) -> dict[str, State]:
    """Return the states of a file by name.

    Args:
        entries: Each tensor, and its byte range.
        file: Index of the file in its checkpoint.
    """
    return {
        name: State(tensor.shape, tensor.dtype, Contiguous(math.prod(tensor.shape), file, where.start))
        for name, (tensor, where) in entries.items()
    }


MAX_STRIDED = 1 << 20
"""Maximum elements of a non-contiguous tensor: each element may need its own extent."""


def whole_tensor(torch: TorchFile, index: int, ref: TensorRef, begin: int = 0) -> State:
    """Locate a whole tensor of one file, with any strides.

    Args:
        torch: The file of ``torch.save``.
        index: Index of the file into the checkpoint's files.
        ref: The tensor.
        begin: The byte of the file at which the file of ``torch.save`` begins.

    Raises:
        LayoutError: The tensor is not contiguous, and too large.
    """
    if ref.contiguous:
        return State(ref.shape, ref.dtype, Contiguous(ref.numel, index, begin + torch.locate(ref).start))
    if ref.numel > MAX_STRIDED:
        problem = f"a tensor of shape {ref.shape} is stored with strides {ref.stride}"
        raise LayoutError(torch.path, problem, "save it contiguous")
    import numpy as np  # hardly any tensor of a checkpoint is stored with strides

    from ckpttool.model.extents import blank_rows

    place = np.zeros(1, dtype=np.int64)
    for size, stride in zip(ref.shape, ref.stride, strict=True):
        place = (place[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    first = np.flatnonzero(np.concatenate([[True], np.diff(place) != 1]))  # start of each contiguous run
    table = blank_rows(len(first))
    table["start"] = first
    table["numel"] = np.diff(np.append(first, len(place)))
    table["file"] = index
    base = begin + torch.storages[ref.storage.key].start
    table["offset"] = base + (ref.offset + place[first]) * itemsize(ref.dtype)
    return State(ref.shape, ref.dtype, Table(table))
