"""The header of a safetensors file, parsed and built.

Source: safetensors 0.8, README.md ("Format") and safetensors/src/tensor.rs (``Metadata::validate``).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.budget import MEMORY, note_file, spend
from ckpttool.dtypes import DTYPES, itemsize
from ckpttool.errors import ContainerError, TruncatedError
from ckpttool.messages import brief
from ckpttool.ranges import ByteRange, exact_cover_problem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.storage import RangeReader

MAX_DIMENSIONS = 64
"""torch's own limit."""
MEMORY_OF_JSON = 24
"""Bytes of memory that a byte of JSON may take."""
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

_HINT = "the file is damaged or was not written by safetensors"
_RESTORE = "restore it from a copy"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of the header."""

    name: str
    """Its name."""
    dtype: str
    """Element type."""
    shape: tuple[int, ...]
    """Sizes; () is a scalar."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * itemsize(self.dtype)


def parse(reader: RangeReader) -> tuple[dict[str, tuple[Tensor, ByteRange]], dict[str, str]]:
    """Read the header.

    Returns:
        Each tensor and its byte range (counted from the start of the file) by name, and the metadata.

    Raises:
        ContainerError: The file is cut off, or its header does not describe it exactly.
    """
    size = reader.nbytes
    note_file(reader.path, size)
    length = int.from_bytes(reader.read(0, 8), "little") if size >= 8 else 0
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise TruncatedError(reader.path, "its safetensors header is cut off", _HINT)
    spend(MEMORY, MEMORY_OF_JSON * length, reader.path)
    try:
        header = json.loads(reader.read(8, 8 + length), object_pairs_hook=_no_duplicates)
        metadata = _metadata(header.pop("__metadata__", {}))
        entries = {str(name): _entry(str(name), value, 8 + length) for name, value in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ContainerError(reader.path, f"its safetensors header is broken ({error})", _HINT) from error
    if any(where.end > size for _, where in entries.values()):
        raise TruncatedError(reader.path, f"is cut off: only its first {size:,} bytes are there", _RESTORE)
    starts = [where.start - 8 - length for _, where in entries.values()]
    gap = exact_cover_problem(starts, [where.nbytes for _, where in entries.values()], size - 8 - length)
    if gap is not None:
        raise ContainerError(reader.path, f"its header leaves a {gap.kind} at bytes {gap.start} to {gap.end}", _HINT)
    return entries, metadata


def build(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Lay out a file.

    Wider types come first, as the library itself writes them, so that every tensor is aligned to its type.

    Returns:
        The header's bytes, and the byte range of each tensor, counted from the start of the file.
    """
    ordered = sorted(tensors, key=lambda t: -itemsize(t.dtype))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    begin: dict[str, int] = {}
    for t in ordered:
        begin[t.name] = position
        header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [position, position + t.nbytes]}
        position += t.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    data = len(text).to_bytes(8, "little") + text
    return data, {name: len(data) + at for name, at in begin.items()}


def _metadata(value: Any) -> dict[str, str]:
    """Keep the strings of the metadata: the format allows no other values, which some writers add."""
    if not isinstance(value, dict):
        return {}
    return {name: text for name, text in value.items() if isinstance(text, str)}


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _entry(name: str, value: Any, base: int) -> tuple[Tensor, ByteRange]:
    dtype, shape, (start, end) = value["dtype"], value["shape"], value["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"dtype {brief(dtype, 200)} of {brief(name, 200)} is not known")
    if len(shape) > MAX_DIMENSIONS:  # their product takes quadratic time
        raise ValueError(f"{brief(name, 200)} has {len(shape):,} dimensions")
    numbers = [*shape, start, end]
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 62 for n in numbers):
        raise ValueError(f"sizes of {brief(name, 200)} make no sense")
    tensor = Tensor(name, dtype, tuple(shape))
    if end - start != tensor.nbytes:
        raise ValueError(f"{brief(name, 200)} takes {end - start} bytes, not {tensor.nbytes}")
    return tensor, ByteRange(base + start, base + end)
