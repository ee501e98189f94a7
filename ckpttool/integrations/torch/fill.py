"""Read ranges of a file straight into tensors: those on the CPU get the bytes, others pass through a small buffer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from ckpttool.integrations.torch.memory import empty

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.execution.virtual_file import RangeFile

BUFFER_BYTES = 1 << 24
"""Most bytes of the buffer, unless a row of a tensor has more."""


class Part(NamedTuple):
    """A tensor to fill from one range of a file."""

    start: int
    """First byte of the range."""
    dtype: torch.dtype
    """Type of the values in the file; they are cast to the tensor's."""
    tensor: torch.Tensor
    """The tensor, of any layout and on any device."""
    row: tuple[int, ...] | None = None
    """Shape of each row in the file, if the tensor has some of its columns; else None."""
    columns: tuple[slice, ...] = ()
    """The columns that it has, in each dimension of a row."""

    @property
    def direct(self) -> bool:
        """Whether the file has the bytes of the tensor in its type and order, so that no buffer is needed."""
        on_cpu = self.tensor.device.type == "cpu" and self.tensor.is_contiguous()
        return on_cpu and self.row is None and self.tensor.dtype == self.dtype


def fill(file: RangeFile, parts: Sequence[Part], memory: int) -> None:
    """Fill tensors from a file.

    Args:
        file: The file.
        parts: The tensors; no two of them overlap.
        memory: Most bytes of the buffer.

    Raises:
        StorageError: Reading failed, or a source changed meanwhile; some tensors have their new values.
    """
    parts = [part for part in parts if part.tensor.numel()]
    direct = [part for part in parts if part.direct]
    file.scatter((part.start, memoryview(_bytes_of(part.tensor).numpy())) for part in direct)
    for part in direct:
        part.tensor.view(-1)[:0].zero_()  # so that autograd notes the change, as of any other
    for part in parts:
        if not part.direct:
            _fill_rows(file, part, min(memory, BUFFER_BYTES))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _fill_rows(file: RangeFile, part: Part, nbytes: int) -> None:
    """Fill a tensor through a buffer, some rows at a time; of a contiguous one, some elements."""
    into = part.tensor.detach()
    if part.row is None and into.is_contiguous():
        into = into.view(-1)
    row = tuple(into.shape[1:]) if part.row is None else part.row
    width = math.prod(row) * part.dtype.itemsize
    step = min(max(1, nbytes // width), into.shape[0])
    buffer = empty(step * width)
    columns = (slice(None), *part.columns)
    for first in range(0, into.shape[0], step):
        found = buffer[: min(step, into.shape[0] - first) * width]
        file.seek(part.start + first * width)
        file.readinto(memoryview(found.numpy()))
        rows = found.view(part.dtype).view(-1, *row)
        into[first : first + step].copy_(rows[columns])
