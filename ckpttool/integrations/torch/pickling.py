"""Pickle a value as ``torch.save`` does, without copying the bytes of its tensors.

Source: torch 2.13, torch/serialization.py (``_save``: content of a persistent id) and torch/_tensor.py
(``Tensor.__reduce_ex__``).
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

GAP_BYTES = 4096
"""Maximum bytes between two used parts of a storage that are written as one part."""


class StorageBytes:
    """A run of bytes of a torch storage, on any device.

    Args:
        storage: ``torch.UntypedStorage``; kept alive.
        start: First byte.
        end: One past the last.
    """

    def __init__(self, storage: Any, start: int, end: int) -> None:
        self._storage = storage
        self._start = start
        self.nbytes = end - start
        self.on_host = storage.device.type == "cpu"
        """Whether the bytes are in host memory."""

    @property
    def address(self) -> int:
        """Address of the first byte, on its device."""
        return int(self._storage.data_ptr()) + self._start

    @property
    def tensor(self) -> Any:
        """Return the bytes as a 1-d ``torch.uint8`` tensor that shares their memory."""
        whole = torch.empty(0, dtype=torch.uint8, device=self._storage.device).set_(self._storage)
        return whole[self._start : self._start + self.nbytes]

    def read(self, start: int, end: int) -> memoryview:
        """Return the bytes [start, end) of the run."""
        return memoryview(self.tensor[start:end].cpu().numpy())


@dataclass(frozen=True, slots=True)
class Pickled:
    """The content of a file of ``torch.save``."""

    structure: bytes
    """``data.pkl``."""
    storages: dict[str, StorageBytes]
    """Bytes of each storage, by its key in the structure."""


def describe(value: Any) -> Pickled:
    """Return the structure of a value and the storages of its tensors; nothing is copied.

    Tensors that share memory keep sharing it, as with ``torch.save``. If tensors use less than half of a storage (a few
    views of a large buffer, say), only the used bytes are written.

    Raises:
        pickle.PicklingError: A value cannot be pickled; AttributeError and TypeError have the same meaning.
    """
    whole = _Whole()
    structure = _pickle(value, whole)
    if whole.are_mostly_used():
        return Pickled(structure, whole.storages)
    parts = _Parts(whole)
    return Pickled(_pickle(value, parts), parts.storages)


def _pickle(value: Any, storages: _Whole) -> bytes:
    out = io.BytesIO()
    _Pickler(out, storages).dump(value)
    return out.getvalue()


@dataclass(frozen=True, slots=True)
class _Run:
    """The elements [start, end) of a storage, written as a storage of their own."""

    storage: Any
    dtype: Any
    start: int
    end: int


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO, storages: _Whole) -> None:
        super().__init__(out, protocol=2)
        self._storages = storages

    def reducer_override(self, value: Any) -> Any:
        """Replace tensors of mostly unused storages: only used bytes are written."""
        if type(value) is not torch.Tensor or not _is_plain(value):
            return NotImplemented
        storage, offset = value.untyped_storage(), value.storage_offset()
        run = self._storages.run(storage, value.dtype, offset, offset + _span(value))
        arguments: Any = (
            run,
            offset - run.start,
            tuple(value.size()),
            value.stride(),
            value.requires_grad,
            OrderedDict(),
        )
        state = torch._utils._get_obj_state(value)
        if not state:
            return torch._utils._rebuild_tensor_v2, arguments
        rebuilt = (torch._utils._rebuild_tensor_v2, torch.Tensor, arguments, state)
        return torch._tensor._rebuild_from_type_v2, rebuilt

    def persistent_id(self, value: Any) -> Any:
        """Return the persistent id of a storage: its bytes are outside the pickle."""
        if isinstance(value, _Run):
            kind, width = getattr(torch, torch.storage._dtype_to_storage_type_map()[value.dtype]), value.dtype.itemsize
            key = self._storages.key(value.storage, value.start * width, value.end * width)
            return ("storage", kind, key, torch.serialization.location_tag(value.storage), value.end - value.start)
        if isinstance(value, torch.storage.TypedStorage):
            storage = value._untyped_storage
            kind, numel = getattr(torch, value._pickle_storage_type()), value._size()
        elif isinstance(value, torch.UntypedStorage):
            storage, kind, numel = value, torch.UntypedStorage, value.nbytes()
        else:
            return None
        key = self._storages.whole_key(storage)
        return ("storage", kind, key, torch.serialization.location_tag(storage), numel)


def _is_plain(tensor: Any) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor._backward_hooks)
        and tensor.dtype in torch.storage._dtype_to_storage_type_map()
    )


def _span(tensor: Any) -> int:
    """Return the elements of the storage from the first used by a tensor to the last."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    return 1 + sum(int(size - 1) * int(stride) for size, stride in steps)


class _Whole:
    """Gives each storage a key, and records its used bytes."""

    def __init__(self) -> None:
        self.storages: dict[str, StorageBytes] = {}
        """Storages to write, by key; keeping them alive keeps their ids unique."""
        self.used: dict[int, list[tuple[int, int, Any]]] = {}
        """By storage: (first byte, one past the last, storage) of each tensor."""
        self.themselves: set[int] = set()
        """Storages saved as objects of their own, not for a tensor."""
        self._keys: dict[tuple[int, int, int], str] = {}

    def run(self, storage: Any, dtype: Any, start: int, end: int) -> _Run:
        width = dtype.itemsize
        self.used.setdefault(storage._cdata, []).append((start * width, end * width, storage))
        return _Run(storage, dtype, 0, storage.nbytes() // width)

    def whole_key(self, storage: Any) -> str:
        self.themselves.add(storage._cdata)
        return self.key(storage, 0, storage.nbytes())

    def key(self, storage: Any, start: int, end: int) -> str:
        found = self._keys.setdefault((storage._cdata, start, end), str(len(self._keys)))
        if found not in self.storages:
            self.storages[found] = StorageBytes(storage, start, end)
        return found

    def are_mostly_used(self) -> bool:
        return all(identity in self.themselves or _is_mostly_used(used) for identity, used in self.used.items())


class _Parts(_Whole):
    """Gives each run of used bytes a key, for storages that are not mostly used."""

    def __init__(self, whole: _Whole) -> None:
        super().__init__()
        self._seen = whole
        self._whole = whole.themselves | {identity for identity, used in whole.used.items() if _is_mostly_used(used)}
        self._runs = {identity: list(_merged(used)) for identity, used in whole.used.items()}

    def run(self, storage: Any, dtype: Any, start: int, end: int) -> _Run:
        if storage._cdata in self._whole:
            return super().run(storage, dtype, start, end)
        width = dtype.itemsize
        for first, last in self._runs.get(storage._cdata, ()):
            if first <= start * width and end * width <= last and first % width == 0 and last % width == 0:
                return _Run(storage, dtype, first // width, last // width)
        return _Run(storage, dtype, start, end)  # another dtype uses it too, at unaligned offsets


def _is_mostly_used(used: list[tuple[int, int, Any]]) -> bool:
    return bool(2 * sum(b - a for a, b in _merged(used)) >= used[0][2].nbytes())


def _merged(used: Iterable[tuple[int, int, Any]]) -> Iterable[tuple[int, int]]:
    ordered = sorted((a, b) for a, b, _ in used)
    if not ordered:
        return
    start, end = ordered[0]
    for a, b in itertools.islice(ordered, 1, None):
        if a > end + GAP_BYTES:
            yield start, end
            start, end = a, b
        else:
            end = max(end, b)
    yield start, end
