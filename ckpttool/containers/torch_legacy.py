"""The form of ``torch.save`` before ZIP: five pickles, then each storage's length and bytes.

DeepSpeed still writes it with ``checkpoint: {"checkpoint_serialization": false}``.

Source: torch 2.13, torch/serialization.py (``_legacy_save``, ``_legacy_load``).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from ckpttool.containers.unpickler import Truncated, unpickle
from ckpttool.containers.values import StorageRef, walk
from ckpttool.errors import ContainerError
from ckpttool.ranges import ByteRange

if TYPE_CHECKING:
    from ckpttool.storage import RangeReader

MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e"
"""``pickle.dumps(0x1950a86a20f9469cfc6c, 2)``."""
FIRST_READ = 1 << 16
"""The pickles have no length of their own: read this much first, then twice as much until they end."""

_HINT = "the file is truncated or damaged: restore it from a copy, or use another tag"


def parse(reader: RangeReader, *, max_pickle_bytes: int) -> tuple[Any, dict[str, ByteRange]]:
    """Read the structure, and where the bytes of each storage lie.

    Returns:
        The value that was saved, and the byte range of each storage key.

    Raises:
        ContainerError: The file is cut off, damaged or big-endian, or its pickles are larger than ``max_pickle_bytes``.
        StorageError: The file cannot be read.
    """
    root, keys, position = _parse_pickles(reader, max_pickle_bytes)
    sizes: dict[str, int] = {}
    for value in walk(root):
        if isinstance(value, StorageRef):
            if sizes.setdefault(value.key, value.nbytes) != value.nbytes:
                raise ContainerError(reader.path, f"storage {value.key!r} has two sizes", _HINT)
    ranges: dict[str, ByteRange] = {}
    for key in keys:
        if not isinstance(key, str) or key not in sizes or key in ranges:
            raise ContainerError(reader.path, f"its list of storages names {key!r} without reason", _HINT)
        if position + 8 + sizes[key] > reader.nbytes:
            raise ContainerError(reader.path, f"storage {key!r} reaches beyond the end of the file", _HINT)
        (numel,) = struct.unpack("<q", reader.read(position, position + 8))
        start = position + 8
        # The element size comes from the storage's class; the count written before the bytes must agree.
        if numel <= 0 and sizes[key] > 0 or (numel and sizes[key] % numel):
            raise ContainerError(reader.path, f"storage {key!r} holds {numel} elements, not what was saved", _HINT)
        ranges[key] = ByteRange(start, start + sizes[key])
        position = start + sizes[key]
    missing = sizes.keys() - ranges.keys()
    if missing:
        raise ContainerError(reader.path, f"storage {min(missing)!r} is missing", _HINT)
    return root, ranges


def _parse_pickles(reader: RangeReader, max_pickle_bytes: int) -> tuple[Any, list[Any], int]:
    wanted = FIRST_READ
    while True:
        data = reader.read(0, min(wanted, reader.nbytes))
        try:
            _, at = unpickle(data, path=reader.path)  # the magic number, compared by the caller
            version, at = unpickle(data, path=reader.path, start=at)
            system, at = unpickle(data, path=reader.path, start=at)
            root, at = unpickle(data, path=reader.path, start=at)
            keys, at = unpickle(data, path=reader.path, start=at)
        except Truncated:
            if len(data) == reader.nbytes:
                raise ContainerError(reader.path, "ends in the middle of a pickle", _HINT) from None
            if wanted >= max_pickle_bytes:
                raise ContainerError(reader.path, f"its pickle is larger than {max_pickle_bytes:,} bytes", _HINT) from None
            wanted = min(wanted * 4, max_pickle_bytes)
            continue
        if version != 1001 or not isinstance(system, dict) or not isinstance(keys, list):
            raise ContainerError(reader.path, "is of an unknown torch.save protocol", _HINT)
        if system.get("little_endian") is not True:
            raise ContainerError(reader.path, "was written on a big-endian machine", "convert it there first")
        return root, keys, at
