"""A file written by ``torch.save``, in either form: its structure, and the place of every tensor's bytes.

The form before ZIP has five pickles, then each storage's length and bytes. DeepSpeed still writes it with
``checkpoint: {"checkpoint_serialization": false}``.

Source: torch 2.13, torch/serialization.py (``_legacy_save``, ``_legacy_load``).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ckpttool.budget import note_file
from ckpttool.checksums import Record, crc32
from ckpttool.containers import torch_zip
from ckpttool.containers.unpickler import Truncated, Unpickled, unpickle
from ckpttool.dtypes import itemsize
from ckpttool.errors import ChecksumError, ContainerError, TruncatedError
from ckpttool.messages import brief
from ckpttool.ranges import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpttool.checksums import Records
    from ckpttool.containers.values import TensorRef
    from ckpttool.storage import RangeReader


MAGIC = 0x1950A86A20F9469CFC6C
"""Content of the first of the five pickles."""
FIRST_READ = 1 << 16
"""Bytes to read first, then twice as many until the pickles end: their length is not recorded."""

_NUMEL = struct.Struct("<q")
_LEGACY_HINT = "the file is truncated or damaged: restore it from a copy, or use another tag"


def is_legacy(head: bytes) -> bool:
    """Whether a file with these first bytes has the legacy form, in any pickle protocol."""
    return head[:1] == b"\x80" and MAGIC.to_bytes(10, "little") in head[:32]


def parse(reader: RangeReader, *, max_pickle_bytes: int) -> tuple[Any, dict[str, ByteRange]]:
    """Read the structure and the byte range of each storage.

    Returns:
        The value that was saved, and the byte range of each storage, by key, in the order of first use.

    Raises:
        ContainerError: The file is cut off, damaged or big-endian, or its pickles are larger than ``max_pickle_bytes``.
        StorageError: The file cannot be read.
    """
    saved, keys, position = _parse_pickles(reader, max_pickle_bytes)
    ranges: dict[str, ByteRange] = {}
    counts: list[tuple[str, ByteRange, int]] = []
    for key in keys:
        ref = saved.storages.get(key) if isinstance(key, str) else None
        if ref is None or key in ranges:
            raise ContainerError(reader.path, f"its list of storages names {brief(key)} without reason", _LEGACY_HINT)
        start = position + _NUMEL.size
        if start + ref.nbytes > reader.nbytes:
            raise ContainerError(reader.path, f"storage {brief(key)} reaches beyond the end of the file", _LEGACY_HINT)
        counts.append((key, ByteRange(position, start), ref.numel))
        position = start + ref.nbytes
        ranges[key] = ByteRange(start, position)
    if reader.remote:
        counts = counts[-1:]  # its position is right only if all earlier ones have the right lengths
    for (key, _, expected), data in zip(counts, reader.read_many([where for _, where, _ in counts]), strict=True):
        (numel,) = _NUMEL.unpack(data)
        if numel != expected:
            raise ContainerError(
                reader.path, f"storage {brief(key)} holds {numel} elements, but {expected} were saved", _LEGACY_HINT
            )
    missing = saved.storages.keys() - ranges.keys()
    if missing:
        raise ContainerError(reader.path, f"storage {brief(min(missing))} is missing", _LEGACY_HINT)
    return saved.value, {key: ranges[key] for key in saved.storages}


def _parse_pickles(reader: RangeReader, max_pickle_bytes: int) -> tuple[Unpickled, list[Any], int]:
    wanted = min(FIRST_READ, max_pickle_bytes)
    while True:
        data = reader.read(0, min(wanted, reader.nbytes))
        try:
            magic = unpickle(data, path=reader.path)
            version = unpickle(data, path=reader.path, start=magic.end)
            system = unpickle(data, path=reader.path, start=version.end)
            saved = unpickle(data, path=reader.path, start=system.end)
            keys = unpickle(data, path=reader.path, start=saved.end)
        except Truncated:
            if len(data) == reader.nbytes:
                raise TruncatedError(reader.path, "ends in the middle of a pickle", _LEGACY_HINT) from None
            if wanted >= max_pickle_bytes:
                problem = f"its pickle is larger than {max_pickle_bytes:,} bytes"
                raise ContainerError(reader.path, problem, _LEGACY_HINT) from None
            wanted = min(wanted * 4, max_pickle_bytes)
            continue
        if magic.value != MAGIC or version.value != 1001:
            raise ContainerError(reader.path, "has an unknown torch.save protocol", _LEGACY_HINT)
        if not isinstance(system.value, dict) or not isinstance(keys.value, list):
            raise ContainerError(reader.path, "has an unknown torch.save protocol", _LEGACY_HINT)
        if system.value.get("little_endian") is not True:
            raise ContainerError(reader.path, "was written on a big-endian machine", "convert it there first")
        return saved, keys.value, keys.end


MAX_PICKLE_BYTES = 1 << 27
"""Largest pickle: it contains no tensor bytes, and reading one byte of it may take a hundred bytes of memory."""

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
    storages: Mapping[str, ByteRange]
    """Byte range of each storage, by key, in the order of first use."""
    records: Sequence[Record]
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


class _Storages(Mapping[str, ByteRange]):
    """The storages of an archive.

    Args:
        records: The records.
        numbers: Index of each storage's record, by key.
    """

    def __init__(self, records: Records, numbers: dict[str, int]) -> None:
        self._records = records
        self.numbers = numbers

    def of(self, records: Records) -> _Storages:
        """Return the storages of an archive with the same records elsewhere."""
        return _Storages(records, self.numbers)

    def __getitem__(self, key: str) -> ByteRange:
        return self._records[self.numbers[key]].where

    def __iter__(self) -> Iterator[str]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


def read_torch_file(
    reader: RangeReader, known: dict[bytes, Unpickled] | None = None, *, max_pickle_bytes: int = MAX_PICKLE_BYTES
) -> TorchFile:
    """Read the structure of a file written by ``torch.save``; reads no tensor bytes and runs no code from it.

    Args:
        reader: The file.
        known: Pickles already read. The ranks of one save mostly write the same bytes; equal pickles share one
            structure.
        max_pickle_bytes: Largest pickle to read, in bytes.

    Raises:
        ContainerError: The file is something else, is damaged, or is hostile.
        StorageError: The file cannot be read.
    """
    note_file(reader.path, reader.nbytes)
    if reader.nbytes == 0:
        raise TruncatedError(reader.path, "is empty", "restore it from a copy, or use another tag")
    if reader.remote:
        # The end contains the directory; the beginning is read only if there is none.
        try:
            return _read_zip(reader, {} if known is None else known, max_pickle_bytes)
        except ContainerError:
            if reader.read(0, min(reader.nbytes, 4)) == torch_zip.MAGIC:
                raise
    head = reader.read(0, min(reader.nbytes, 512))
    if head.startswith(torch_zip.MAGIC):
        return _read_zip(reader, {} if known is None else known, max_pickle_bytes)
    if is_legacy(head):
        root, storages = parse(reader, max_pickle_bytes=max_pickle_bytes)
        return TorchFile(reader.path, reader.nbytes, "legacy", root, storages, ())
    if not any(head):
        raise TruncatedError(reader.path, "begins with zeros: it was never written", _HINT)
    raise ContainerError(reader.path, "was not written by torch.save", "is this a checkpoint? restore it from a copy")


MAX_TEMPLATE_BYTES = 1 << 14
"""Most bytes around the storage of an archive that is kept as a template."""
MAX_TEMPLATES = 8
"""Most templates of one size that are tried."""


class SimilarFiles:
    """Reads many files that differ in the bytes of one storage alone, such as the chunks of a model's tensors."""

    def __init__(self) -> None:
        self._pickles: dict[bytes, Unpickled] = {}
        self._known: dict[int, list[tuple[torch_zip.Template, TorchFile]]] = {}
        """Files with one storage, by their size."""

    def read(self, reader: RangeReader) -> TorchFile:
        """Read the structure of a file, as ``read_torch_file``.

        Raises:
            ContainerError: As for ``read_torch_file``.
            StorageError: The file cannot be read.
        """
        known = self._known.setdefault(reader.nbytes, [])
        for template, like in known:
            records = template.records_of(reader)
            if records is not None:
                note_file(reader.path, reader.nbytes)
                storages = like.storages.of(records) if isinstance(like.storages, _Storages) else like.storages
                return like._replace(path=reader.path, storages=storages, records=records)
        file = read_torch_file(reader, self._pickles)
        if isinstance(file.storages, _Storages) and len(file.storages) == 1 and len(known) < MAX_TEMPLATES:
            (storage,) = file.storages.numbers.values()
            if reader.nbytes - file.records[storage].where.nbytes <= MAX_TEMPLATE_BYTES:
                known.append((torch_zip.Template(reader, cast("Records", file.records), storage), file))
        return file


def _read_zip(reader: RangeReader, known: dict[bytes, Unpickled], max_pickle_bytes: int) -> TorchFile:
    records = torch_zip.parse(reader)
    numbers = {name: n for n, name in enumerate(records.names)}
    pickles = [records[n] for name, n in numbers.items() if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        problem = f"holds {len(pickles)} data.pkl records, not one"
        raise ContainerError(reader.path, problem, "was it written by torch.save? restore it from a copy")
    where = pickles[0].where
    prefix = pickles[0].name.removesuffix("data.pkl")
    if f"{prefix}constants.pkl" in numbers:
        raise ContainerError(reader.path, "is a TorchScript archive (torch.jit.save)", "save the state dict instead")
    byte_order = numbers.get(f"{prefix}byteorder")
    _check_byte_order(reader, None if byte_order is None else records[byte_order])
    if where.nbytes > max_pickle_bytes:
        raise ContainerError(reader.path, f"its pickle is larger than {max_pickle_bytes:,} bytes", _HINT)
    data = reader.read(where.start, where.end)
    if pickles[0].crc_recorded and crc32(data) != pickles[0].crc32:
        raise ChecksumError(reader.path, "its pickle does not match its checksum", _HINT)
    saved = known.get(data)
    if saved is None:
        try:
            saved = known[data] = unpickle(data, path=reader.path)
        except Truncated:
            raise ContainerError(reader.path, "its pickle ends too early", _HINT) from None
    places = {key: numbers.get(f"{prefix}data/{key}", -1) for key in saved.nbytes}
    if -1 in places.values():
        lacking = next(key for key, n in places.items() if n < 0)
        raise ContainerError(reader.path, f"storage {brief(lacking)} is missing", _HINT)
    storages = _Storages(records, places)
    lengths = records.sizes()
    for (key, nbytes), n in zip(saved.nbytes.items(), places.values(), strict=True):
        if lengths[n] != nbytes:
            problem = f"storage {brief(key)} is {lengths[n]} bytes long, but {nbytes} were saved"
            raise ContainerError(reader.path, problem, _HINT)
    return TorchFile(reader.path, reader.nbytes, "zip", saved.value, storages, records)


def _check_byte_order(reader: RangeReader, record: Record | None) -> None:
    if record is None:
        return  # torch before 2.1, which was little-endian only
    if (record.crc32, record.where.nbytes) == (crc32(b"little"), len(b"little")):
        return  # no need to read it
    order = reader.read(record.where.start, min(record.where.end, record.where.start + 16))
    if order == b"big":
        raise ContainerError(reader.path, "was written on a big-endian machine", "convert it there first")
    if order != b"little":
        raise ContainerError(reader.path, "does not record its byte order", _HINT)
