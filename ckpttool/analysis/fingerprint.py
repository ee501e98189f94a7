"""Fingerprint of tensors: quick to compute, and equal for equal bits in equal types.

``digest`` hashes with SHA-256 what values mean, whatever their type; here CRC-32, which is many times as fast, is taken
of the bytes. It tells which of a run's checkpoints this is; it is no defence against who makes others with intent.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.checksums import crc32

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from ckpttool.model.derived.delta import TensorType


class TensorSum:
    """The part of a fingerprint that stands for one tensor.

    Args:
        name: Its name.
        kind: Its type and shape.
    """

    def __init__(self, name: str, kind: TensorType) -> None:
        self._head = f"{name}\0{kind.dtype}\0{','.join(map(str, kind.shape))}"
        self._crc = 0

    def update(self, values: NDArray[Any]) -> None:
        """Add elements, in order."""
        self._crc = crc32(np.ascontiguousarray(values).view(np.uint8).data, self._crc)

    @property
    def line(self) -> bytes:
        """The part."""
        return f"{self._head}\0{self._crc:08x}\n".encode("utf-8", "surrogatepass")


def fingerprint(parts: Iterable[bytes]) -> str:
    """Return the fingerprint of some tensors, in any order."""
    return "crc32:" + hashlib.sha256(b"".join(sorted(parts))).hexdigest()
