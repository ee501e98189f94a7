"""Compare ``torch.load`` with our reader, which uses no torch: structure, types and every byte."""

from __future__ import annotations

import collections
import copyreg
import enum
from typing import Any

import numpy as np
import torch

from ckpttool.containers.torch_file import TorchFile, read_torch_file
from ckpttool.containers.values import Opaque, OrderedDict, Size, TensorRef, TorchDType
from ckpttool.dtypes import DTYPES
from ckpttool.storage import LocalReader


def read(path: str) -> TorchFile:
    with LocalReader(path) as reader:
        return read_torch_file(reader)


def load(path: str, **options: Any) -> Any:
    return torch.load(path, map_location="cpu", **{"weights_only": False, **options})


def assert_reads_as_torch_loads(path: str) -> None:
    with open(path, "rb") as file:
        data = file.read()
    _Comparison(read(path), data).same(load(path), read(path).root, "root")


def assert_torch_equal(a: Any, b: Any) -> None:
    """Two things that torch loaded are the same, down to types, sharing of storages and bits."""
    _same_loaded(a, b, "root", {})


def bits(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor in C order, whatever the dtype."""
    return stored(tensor.detach().clone(memory_format=torch.contiguous_format))


def stored(tensor: torch.Tensor) -> bytes:
    """The whole storage that a tensor lies in; ``bytes(storage)`` would take it element by element."""
    data: bytes = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tobytes()
    return data


class _Comparison:
    def __init__(self, file: TorchFile, data: bytes) -> None:
        self.file = file
        self.data = data
        self.seen: set[int] = set()

    def same(self, theirs: Any, ours: Any, at: str) -> None:
        if id(theirs) in self.seen and isinstance(theirs, dict | list):
            return  # a cycle, or compared before
        self.seen.add(id(theirs))
        if isinstance(theirs, torch.Tensor):
            self.same_tensor(theirs, ours, at)
        elif isinstance(theirs, torch.Size):
            assert (type(ours), ours) == (Size, tuple(theirs)), at
        elif isinstance(theirs, torch.dtype):
            assert ours == TorchDType(str(theirs).removeprefix("torch.")), at
        elif isinstance(theirs, torch.device):
            assert (ours.qualified_name, torch.device(*ours.args)) == ("torch.device", theirs), at
        elif type(theirs) in {dict, collections.OrderedDict}:
            assert type(ours) in {dict, OrderedDict}, at
            assert isinstance(ours, OrderedDict) == isinstance(theirs, collections.OrderedDict), at
            self.same(list(theirs), list(ours), f"keys of {at}")
            for (key, a), b in zip(theirs.items(), ours.values(), strict=True):
                self.same(a, b, f"{at}[{key!r}]")
            if isinstance(ours, OrderedDict) and vars(theirs):
                self.same(vars(theirs), ours.attributes, f"attributes of {at}")
        elif type(theirs) in {list, tuple}:
            assert (type(ours), len(ours)) == (type(theirs), len(theirs)), at
            for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
                self.same(a, b, f"{at}[{i}]")
        elif type(theirs) in {type(None), bool, int, float, complex, str, bytes, bytearray, set, frozenset}:
            assert (type(ours), repr(ours)) == (type(theirs), repr(theirs)) or ours == theirs, at
        elif isinstance(theirs, np.generic):
            assert (ours.qualified_name, ours.args[1]) == ("numpy._core.multiarray.scalar", theirs.tobytes()), at
        elif isinstance(theirs, np.ndarray):
            assert ours.qualified_name == "numpy._core.multiarray._reconstruct", at
            assert (ours.state[1], ours.state[4]) == (theirs.shape, theirs.tobytes()), at
        else:
            self.same_object(theirs, ours, at)

    def same_object(self, theirs: Any, ours: Any, at: str) -> None:
        assert isinstance(ours, Opaque), at
        if isinstance(theirs, type):
            assert ours.how == "global", at
            assert (ours.module, ours.name) == (
                theirs.__module__.replace("builtins", ours.module),
                theirs.__qualname__,
            ), at
        elif isinstance(theirs, enum.Enum):
            kind = type(theirs).__qualname__
            if ours.how == "global":  # some Pythons pickle members by name
                assert ours.name == f"{kind}.{theirs.name}", at
            else:
                assert (ours.name, ours.args) == (kind, (theirs.value,)), at
        else:
            assert (ours.module, ours.name) == (type(theirs).__module__, type(theirs).__qualname__), at
            self.same(vars(theirs), ours.state, f"state of {at}")

    def same_tensor(self, theirs: torch.Tensor, ours: Any, at: str) -> None:
        assert isinstance(ours, TensorRef), at
        dtype = f"torch.{DTYPES[ours.dtype].torch}"
        assert (dtype, ours.shape, ours.stride) == (str(theirs.dtype), tuple(theirs.shape), theirs.stride()), at
        assert (ours.offset, ours.requires_grad) == (theirs.storage_offset(), theirs.requires_grad), at
        assert ours.parameter == isinstance(theirs, torch.nn.Parameter), at
        assert ours.contiguous == theirs.is_contiguous(), at
        record = self.file.storages[ours.storage.key]
        assert self.data[record.start : record.end] == stored(theirs), at
        if ours.contiguous:
            where = self.file.locate(ours)
            assert self.data[where.start : where.end] == bits(theirs), at
        self.same(theirs.__dict__, ours.attributes or {}, f"attributes of {at}")


def _same_loaded(a: Any, b: Any, at: str, storages: dict[int, int]) -> None:
    assert type(a) is type(b), at
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.stride(), a.storage_offset()) == (
            b.dtype,
            b.shape,
            b.stride(),
            b.storage_offset(),
        ), at
        assert a.requires_grad == b.requires_grad, at
        # Compared by storage, so that what was shared is still shared, and with whom.
        theirs = b.untyped_storage().data_ptr()
        assert storages.setdefault(a.untyped_storage().data_ptr(), theirs) == theirs, at
        assert stored(a) == stored(b), at
        _same_loaded(a.__dict__, b.__dict__, f"attributes of {at}", storages)
    elif isinstance(a, dict):
        assert list(map(repr, a)) == list(map(repr, b)), at
        for (key, x), y in zip(a.items(), b.values(), strict=True):
            _same_loaded(x, y, f"{at}[{key!r}]", storages)
        if hasattr(a, "__dict__"):
            _same_loaded(vars(a), vars(b), f"attributes of {at}", storages)
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), at
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            _same_loaded(x, y, f"{at}[{i}]", storages)
    elif hasattr(a, "__dict__") and not isinstance(a, type | enum.Enum):
        _same_loaded(vars(a), vars(b), f"state of {at}", storages)
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), at
    elif copyreg._slotnames(type(a)):  # type: ignore[attr-defined]
        _same_loaded(a.__getstate__()[1], b.__getstate__()[1], f"slots of {at}", storages)
    else:
        assert a == b or repr(a) == repr(b), at
