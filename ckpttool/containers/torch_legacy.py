"""The form of ``torch.save`` before ZIP: five pickles, then each storage's length and bytes.

DeepSpeed still writes it with ``checkpoint: {"checkpoint_serialization": false}``.

Source: torch 2.13, torch/serialization.py (``_legacy_save``, ``_legacy_load``).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from ckpttool.containers.unpickler import Truncated, Unpickled, unpickle
from ckpttool.errors import ContainerError, TruncatedError
from ckpttool.messages import brief
from ckpttool.ranges import ByteRange

if TYPE_CHECKING:
    from ckpttool.storage import RangeReader

MAGIC = 0x1950A86A20F9469CFC6C
"""Content of the first of the five pickles."""
FIRST_READ = 1 << 16
"""Bytes to read first, then twice as many until the pickles end: their length is not recorded."""

_NUMEL = struct.Struct("<q")
_HINT = "the file is truncated or damaged: restore it from a copy, or use another tag"


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
            raise ContainerError(reader.path, f"its list of storages names {brief(key)} without reason", _HINT)
        start = position + _NUMEL.size
        if start + ref.nbytes > reader.nbytes:
            raise ContainerError(reader.path, f"storage {brief(key)} reaches beyond the end of the file", _HINT)
        counts.append((key, ByteRange(position, start), ref.numel))
        position = start + ref.nbytes
        ranges[key] = ByteRange(start, position)
    if reader.remote:
        counts = counts[-1:]  # it is where it should be only if all before it have the lengths that they should
    for (key, _, expected), data in zip(counts, reader.read_many([where for _, where, _ in counts]), strict=True):
        (numel,) = _NUMEL.unpack(data)
        if numel != expected:
            raise ContainerError(
                reader.path, f"storage {brief(key)} holds {numel} elements, but {expected} were saved", _HINT
            )
    missing = saved.storages.keys() - ranges.keys()
    if missing:
        raise ContainerError(reader.path, f"storage {brief(min(missing))} is missing", _HINT)
    return saved.value, {key: ranges[key] for key in saved.storages}


def _parse_pickles(reader: RangeReader, max_pickle_bytes: int) -> tuple[Unpickled, list[Any], int]:
    wanted = FIRST_READ
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
                raise TruncatedError(reader.path, "ends in the middle of a pickle", _HINT) from None
            if wanted >= max_pickle_bytes:
                problem = f"its pickle is larger than {max_pickle_bytes:,} bytes"
                raise ContainerError(reader.path, problem, _HINT) from None
            wanted = min(wanted * 4, max_pickle_bytes)
            continue
        if magic.value != MAGIC or version.value != 1001:
            raise ContainerError(reader.path, "has an unknown torch.save protocol", _HINT)
        if not isinstance(system.value, dict) or not isinstance(keys.value, list):
            raise ContainerError(reader.path, "has an unknown torch.save protocol", _HINT)
        if system.value.get("little_endian") is not True:
            raise ContainerError(reader.path, "was written on a big-endian machine", "convert it there first")
        return saved, keys.value, keys.end
