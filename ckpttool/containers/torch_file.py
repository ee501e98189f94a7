"""A file written by ``torch.save``, in either form: its structure, and the place of every tensor's bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.budget import note_file
from ckpttool.checksums import Record, crc32
from ckpttool.containers import torch_legacy, torch_zip
from ckpttool.containers.unpickler import Truncated, unpickle
from ckpttool.dtypes import itemsize
from ckpttool.errors import ChecksumError, ContainerError, TruncatedError
from ckpttool.messages import brief
from ckpttool.ranges import ByteRange

if TYPE_CHECKING:
    from ckpttool.containers.unpickler import Unpickled
    from ckpttool.containers.values import TensorRef
    from ckpttool.storage import RangeReader

MAX_PICKLE_BYTES = 1 << 27
"""Largest pickle: it holds no tensor bytes, and reading one byte of it may take a hundred bytes of memory."""

_HINT = "the file is truncated or damaged: restore it from a copy, or use another tag"


class TorchFile(NamedTuple):
    """The structure of one file and the place of its storages."""

    path: str
    """Its path, for errors."""
    nbytes: int
    """Size of the file."""
    form: str
    """"zip" or "legacy"."""
    root: Any
    """The saved value: plain data, TensorRef and Opaque. Callers share it and must not change it."""
    storages: dict[str, ByteRange]
    """Byte range of each storage, by key, in the order of first use."""
    records: tuple[Record, ...]
    """Every record with its CRC-32; empty for the legacy form, which has none."""

    def locate(self, tensor: TensorRef) -> ByteRange:
        """Byte range of a contiguous tensor.

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
        start = self.storages[tensor.storage.key].start
        if tensor.numel:  # an empty view may begin beyond the end of its storage
            start += tensor.offset * size
        return ByteRange(start, start + tensor.numel * size)


def read_torch_file(reader: RangeReader, known: dict[bytes, Unpickled] | None = None) -> TorchFile:
    """Read the structure of a file written by ``torch.save``; reads no tensor bytes and runs no code from it.

    Args:
        reader: The file.
        known: Pickles already read. The ranks of one save write mostly the same bytes, and the structure of equal
            pickles is one object.

    Raises:
        ContainerError: The file is something else, is damaged, or is hostile.
        StorageError: The file cannot be read.
    """
    note_file(reader.path, reader.nbytes)
    if reader.nbytes == 0:
        raise TruncatedError(reader.path, "is empty", "restore it from a copy, or use another tag")
    if reader.remote:
        # The end holds the directory; the beginning is read only if there is none.
        try:
            return _read_zip(reader, {} if known is None else known)
        except ContainerError:
            if reader.read(0, min(reader.nbytes, 4)) == torch_zip.MAGIC:
                raise
    head = reader.read(0, min(reader.nbytes, 512))
    if head.startswith(torch_zip.MAGIC):
        return _read_zip(reader, {} if known is None else known)
    if torch_legacy.is_legacy(head):
        root, storages = torch_legacy.parse(reader, max_pickle_bytes=MAX_PICKLE_BYTES)
        return TorchFile(reader.path, reader.nbytes, "legacy", root, storages, ())
    if not any(head):
        raise TruncatedError(reader.path, "begins with zeros: it was never written", _HINT)
    raise ContainerError(reader.path, "was not written by torch.save", "is this a checkpoint? restore it from a copy")


def _read_zip(reader: RangeReader, known: dict[bytes, Unpickled]) -> TorchFile:
    records = torch_zip.parse(reader)
    pickles = [r for name, r in records.items() if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        problem = f"holds {len(pickles)} data.pkl records, not one"
        raise ContainerError(reader.path, problem, "was it written by torch.save? restore it from a copy")
    where = pickles[0].where
    prefix = pickles[0].name.removesuffix("data.pkl")
    if f"{prefix}constants.pkl" in records:
        raise ContainerError(reader.path, "is a TorchScript archive (torch.jit.save)", "save the state dict instead")
    _check_byte_order(reader, records.get(f"{prefix}byteorder"))
    if where.nbytes > MAX_PICKLE_BYTES:
        raise ContainerError(reader.path, f"its pickle is larger than {MAX_PICKLE_BYTES:,} bytes", _HINT)
    data = reader.read(where.start, where.end)
    if pickles[0].crc_recorded and crc32(data) != pickles[0].crc32:
        raise ChecksumError(reader.path, "its pickle does not match its checksum", _HINT)
    saved = known.get(data)
    if saved is None:
        try:
            saved = known[data] = unpickle(data, path=reader.path)
        except Truncated:
            raise ContainerError(reader.path, "its pickle ends too early", _HINT) from None
    storages: dict[str, ByteRange] = {}
    for key, ref in saved.storages.items():
        record = records.get(f"{prefix}data/{key}")
        if record is None:
            raise ContainerError(reader.path, f"storage {brief(key)} is missing", _HINT)
        if record.where.nbytes != ref.nbytes:
            problem = f"storage {brief(key)} is {record.where.nbytes} bytes long, but {ref.nbytes} were saved"
            raise ContainerError(reader.path, problem, _HINT)
        storages[key] = record.where
    return TorchFile(reader.path, reader.nbytes, "zip", saved.value, storages, tuple(records.values()))


def _check_byte_order(reader: RangeReader, record: Record | None) -> None:
    if record is None:
        return  # torch before 2.1, which was little-endian only
    if (record.crc32, record.where.nbytes) == (crc32(b"little"), len(b"little")):
        return  # no need to read it
    order = reader.read(record.where.start, min(record.where.end, record.where.start + 16))
    if order == b"big":
        raise ContainerError(reader.path, "was written on a big-endian machine", "convert it there first")
    if order != b"little":
        raise ContainerError(reader.path, "does not say its byte order", _HINT)
