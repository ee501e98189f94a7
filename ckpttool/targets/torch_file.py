"""Plan a file that ``torch.load`` reads, from plain data and ranges of states."""

from __future__ import annotations

import math
import posixpath
from typing import TYPE_CHECKING, Any

from ckpttool.containers import torch_zip
from ckpttool.containers.pickler import pickle
from ckpttool.containers.values import Opaque, StorageRef, TensorRef
from ckpttool.dtypes import DTYPES, itemsize
from ckpttool.model import TensorFloat, TensorInteger
from ckpttool.plan import TargetFile, merge_literals
from ckpttool.plan.builder import Placement

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckpttool.model import State
    from ckpttool.plan.builder import CopyBuilder


class TorchFileBuilder:
    """Plans one file: its storages in the order of the calls, then the structure that refers to them.

    Args:
        name: The file, relative to the output directory.
        copies: Collects the plan's copies.
    """

    def __init__(self, name: str, copies: CopyBuilder) -> None:
        self.name = name
        self._copies = copies
        self._storages: dict[str, tuple[StorageRef, list[Placement]]] = {}
        self._values: dict[str, bytes] = {}

    def whole(self, state: State, dtype: str | None = None) -> TensorRef:
        """Add a tensor with a storage of its own, cast to ``dtype`` if given."""
        dtype = dtype or state.dtype
        storage = self.storage(dtype, state.numel, [Placement(state, dtype, 0)])
        return view(storage, dtype, 0, state.shape)

    def storage(self, dtype: str, numel: int, pieces: Iterable[Placement]) -> StorageRef:
        """Add a storage made of ``pieces``, whose target offsets count from its start; gaps stay zero."""
        typed = DTYPES[dtype].storage
        key = str(len(self._storages))
        nbytes = numel * itemsize(dtype)
        ref = StorageRef(key, typed or "UntypedStorage", dtype if typed else "U8", "cpu", numel if typed else nbytes)
        self._storages[key] = ref, list(pieces)
        return ref

    def scalar(self, data: bytes, dtype: str, shape: tuple[int, ...] = ()) -> TensorRef:
        """Add a tensor of one value, 0-dim unless ``shape`` is (1,)."""
        storage = self.storage(dtype, 1, [])
        self._values[storage.key] = data
        return view(storage, dtype, 0, shape)

    def hyperparameters(self, value: Any) -> Any:
        """Return hyperparameters in their saved form: TensorFloat and TensorInteger become 0-dim tensors."""
        if isinstance(value, TensorFloat | TensorInteger):
            import numpy as np

            from ckpttool.dtypes import numpy_dtype

            return self.scalar(np.array(value).astype(numpy_dtype(value.dtype)).tobytes(), value.dtype)
        if type(value) is dict:
            return {key: self.hyperparameters(v) for key, v in value.items()}
        if type(value) in {list, tuple} and any(
            isinstance(v, TensorFloat | TensorInteger | list | tuple) for v in value
        ):
            return type(value)(self.hyperparameters(v) for v in value)
        return value  # the same object, so that pickle writes it once for all groups

    def build(self, root: Any) -> TargetFile:
        """Return the file with the content ``root``: plain data, Opaque objects, and tensors of this builder."""
        sizes = {key: ref.nbytes for key, (ref, _) in self._storages.items()}
        prefix = posixpath.splitext(posixpath.basename(self.name))[0]
        built = torch_zip.build(pickle(root, path=self.name), sizes, prefix=prefix, path=self.name)
        placed = []
        zeros = []
        literals = list(built.literals)
        for key, (ref, pieces) in self._storages.items():
            start = built.payloads[key].start
            if key in self._values:
                literals.append((start, self._values[key]))
                continue
            filled = 0
            for piece in sorted(pieces, key=lambda p: p.target):
                if piece.target > filled:
                    zeros.append((start + filled, piece.target - filled))
                numel = piece.state.numel - piece.first if piece.numel is None else piece.numel
                filled = piece.target + numel * itemsize(piece.dtype)
                placed.append(Placement(piece.state, piece.dtype, start + piece.target, piece.first, numel))
            if filled < ref.nbytes:
                zeros.append((start + filled, ref.nbytes - filled))
        copies, gathers = self._copies.copies(placed)
        return TargetFile(self.name, built.nbytes, merge_literals(literals), copies, gathers, tuple(zeros))


def view(storage: StorageRef, dtype: str, offset: int, shape: tuple[int, ...]) -> TensorRef:
    """Return a contiguous view of a storage that begins at element ``offset``."""
    strides = tuple(math.prod(n or 1 for n in shape[d + 1 :]) for d in range(len(shape)))
    return TensorRef(storage, dtype, offset, shape, strides)


def plain_file(name: str, data: bytes) -> TargetFile:
    """Return a small file of literal bytes."""
    import numpy as np

    from ckpttool.plan import COPY

    return TargetFile(name, len(data), ((0, data),) if data else (), np.zeros(0, dtype=COPY))


def opaque_object(module: str, name: str, state: dict[str, Any]) -> Opaque:
    """Return a pickled object of a class that is not imported, with a state for ``__setstate__``."""
    made = Opaque(module, name, "new")
    made.stated, made.state = True, state
    return made
