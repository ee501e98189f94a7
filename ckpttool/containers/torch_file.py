"""A file written by ``torch.save``, in whichever form: its structure, and where every tensor's bytes lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.containers import torch_legacy, torch_zip
from ckpttool.containers.unpickler import Truncated, unpickle
from ckpttool.containers.values import StorageRef, TensorRef, walk
from ckpttool.dtypes import itemsize
from ckpttool.errors import ContainerError
from ckpttool.ranges import ByteRange

if TYPE_CHECKING:
    from ckpttool.storage import RangeReader

MAX_PICKLE_BYTES = 1 << 27
"""A structure larger than this is refused: it holds no tensor bytes, and each byte of it may take a hundred to read."""

_HINT = "the file is truncated or damaged: restore it from a copy, or use another tag"


@dataclass(frozen=True, slots=True, eq=False)
class TorchFile:
    """The structure of one file and the place of its storages."""

    path: str
    """What error messages call the file."""
    nbytes: int
    """Size of the file."""
    form: str
    """"zip" or "legacy"."""
    root: Any
    """What was saved: plain data, TensorRef and Opaque. Shared by all who ask: not to be changed."""
    storages: dict[str, ByteRange]
    """Where the bytes of each storage lie, by key."""
    records: tuple[torch_zip.Record, ...]
    """Every record with its CRC-32; empty for the legacy form, which has none."""

    def locate(self, tensor: TensorRef) -> ByteRange:
        """Where the bytes of a contiguous tensor lie.

        Raises:
            ContainerError: The tensor is not contiguous, so that its bytes are not one range.
        """
        if not tensor.contiguous:
            raise ContainerError(
                self.path,
                f"a tensor of shape {tensor.shape} is stored with strides {tensor.stride}",
                "save it contiguous; DeepSpeed does",
            )
        size = itemsize(tensor.dtype)
        start = self.storages[tensor.storage.key].start + tensor.offset * size
        return ByteRange(start, start + tensor.numel * size)


def read_torch_file(reader: RangeReader) -> TorchFile:
    """Read the structure of a file written by ``torch.save``; no tensor bytes are read and nothing in it is run.

    Raises:
        ContainerError: The file is something else, is damaged, or is hostile.
        StorageError: The file cannot be read.
    """
    if reader.nbytes == 0:
        raise ContainerError(reader.path, "is empty", "restore it from a copy, or use another tag")
    head = reader.read(0, min(reader.nbytes, 512))
    if head.startswith(torch_zip.MAGIC):
        return _read_zip(reader)
    if head.startswith(torch_legacy.MAGIC):
        root, storages = torch_legacy.parse(reader, max_pickle_bytes=MAX_PICKLE_BYTES)
        return TorchFile(reader.path, reader.nbytes, "legacy", root, storages, ())
    if not any(head):
        raise ContainerError(reader.path, "begins with zeros: it was never written", _HINT)
    raise ContainerError(reader.path, "was not written by torch.save", "is this a checkpoint? restore it from a copy")


def _read_zip(reader: RangeReader) -> TorchFile:
    records = torch_zip.parse(reader)
    pickles = [r for name, r in records.items() if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ContainerError(
            reader.path, f"holds {len(pickles)} data.pkl records, not one", "was it written by torch.save (not TorchScript)?"
        )
    where = pickles[0].where
    prefix = pickles[0].name.removesuffix("data.pkl")
    if where.nbytes > MAX_PICKLE_BYTES:
        raise ContainerError(reader.path, f"its pickle is larger than {MAX_PICKLE_BYTES:,} bytes", _HINT)
    order = records.get(prefix + "byteorder")
    if order is not None and reader.read(order.where.start, min(order.where.end, order.where.start + 16)) != b"little":
        raise ContainerError(reader.path, "was written on a big-endian machine", "convert it there first")
    try:
        root, _ = unpickle(reader.read(where.start, where.end), path=reader.path)
    except Truncated:
        raise ContainerError(reader.path, "its pickle ends too early", _HINT) from None
    storages: dict[str, ByteRange] = {}
    for value in walk(root):
        if isinstance(value, StorageRef):
            record = records.get(f"{prefix}data/{value.key}")
            if record is None:
                raise ContainerError(reader.path, f"storage {value.key!r} is missing", _HINT)
            if record.where.nbytes != value.nbytes:
                raise ContainerError(
                    reader.path,
                    f"storage {value.key!r} is {record.where.nbytes} bytes long, but {value.nbytes} were saved",
                    _HINT,
                )
            storages[value.key] = record.where
    return TorchFile(reader.path, reader.nbytes, "zip", root, storages, tuple(records.values()))
