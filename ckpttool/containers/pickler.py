"""The way back: data with tensor references and Opaque objects to a pickle, importing none of the classes it names.

Only opcodes that ``torch.load(weights_only=True)`` accepts are written (protocol 2), and objects that were shared stay
shared.

Source: torch 2.13, torch/_weights_only_unpickler.py (the opcodes it knows) and torch/serialization.py (``persistent_id``).
"""

from __future__ import annotations

import struct
from collections import OrderedDict as PlainOrderedDict
from typing import Any

from ckpttool.containers.unpickler import MAX_DEPTH
from ckpttool.containers.values import Opaque, OrderedDict, Size, StorageRef, TensorRef, TorchDType
from ckpttool.dtypes import BY_STORAGE_CLASS, DTYPES
from ckpttool.errors import PlanError


def pickle(value: Any, *, path: str) -> bytes:
    """Write a value as torch would.

    Args:
        value: Plain data, Size, TorchDType, StorageRef, TensorRef and Opaque, nested at will.
        path: What to call the file in errors.

    Raises:
        PlanError: It holds something else, is nested too deeply, or holds itself through a tuple.
    """
    writer = _Writer(path)
    writer.out += b"\x80\x02"
    writer.save(value, 0)
    writer.out += b"."
    return bytes(writer.out)


class _Writer:
    def __init__(self, path: str) -> None:
        self.path = path
        self.out = bytearray()
        self.memo: dict[object, int] = {}
        self.keep: list[Any] = []
        """Keeps what the memo knows by identity alive, so that no identity is used twice."""

    def save(self, value: Any, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise PlanError(self.path, f"its structure is nested more than {MAX_DEPTH} deep", "it cannot be written")
        if value is None:
            self.out += b"N"
        elif isinstance(value, bool):
            self.out += b"\x88" if value else b"\x89"
        elif isinstance(value, int):
            self.integer(value)
        elif isinstance(value, float):
            self.out += b"G" + struct.pack(">d", value)
        elif isinstance(value, str):
            self.text(value)
        elif isinstance(value, bytes):
            self.encoded_bytes(value)
        elif isinstance(value, TorchDType):
            self.name("torch", value.name)
        elif isinstance(value, StorageRef):
            self.storage(value)
        else:
            self.shared(value, depth)

    def shared(self, value: Any, depth: int) -> None:
        """Values that may be met again: write them once, then refer to them."""
        if self.recall(id(value)):
            return
        self.keep.append(value)
        if isinstance(value, TensorRef):
            self.tensor(value, depth)
        elif isinstance(value, Size):
            self.call("torch", "Size", (tuple(value),), depth)
        elif isinstance(value, tuple):
            self.tuple(value, depth)
            return
        elif isinstance(value, list):
            self.out += b"]"
            self.remember(id(value))
            self.append_all(value, depth)
            return
        elif isinstance(value, PlainOrderedDict):
            self.call("collections", "OrderedDict", (), depth)
            self.remember(id(value))
            self.set_all(list(value.items()), depth)
            if isinstance(value, OrderedDict) and value.attributes is not None:
                self.save(value.attributes, depth + 1)
                self.out += b"b"
            return
        elif isinstance(value, dict):
            self.out += b"}"
            self.remember(id(value))
            self.set_all(list(value.items()), depth)
            return
        elif isinstance(value, set | frozenset):
            # Sets have no order of their own: a fixed one makes the same content the same bytes.
            self.call("__builtin__", type(value).__name__, (sorted(value, key=repr),), depth)
        elif isinstance(value, complex):
            self.call("__builtin__", "complex", (value.real, value.imag), depth)
        elif isinstance(value, bytearray):
            self.call("__builtin__", "bytearray", (bytes(value),), depth)
        elif isinstance(value, Opaque):
            self.opaque(value, depth)
            return
        else:
            raise PlanError(self.path, f"a {type(value).__name__} cannot be written into it", "this is a bug in ckpttool")
        self.remember(id(value))

    # ------------------------------------------------------------------------------------------- memo

    def recall(self, key: object) -> bool:
        index = self.memo.get(key)
        if index is None:
            return False
        self.out += b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)
        return True

    def remember(self, key: object) -> None:
        index = len(self.memo)
        self.memo[key] = index
        self.out += b"q" + bytes([index]) if index < 256 else b"r" + struct.pack("<I", index)

    # ------------------------------------------------------------------------------------------- plain values

    def integer(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self.out += b"K" + bytes([value])
        elif 0 <= value < 1 << 16:
            self.out += b"M" + struct.pack("<H", value)
        elif -(1 << 31) <= value < 1 << 31:
            self.out += b"J" + struct.pack("<i", value)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            if len(data) > 255:
                raise PlanError(self.path, "holds an integer of over 255 bytes", "it cannot be written")
            self.out += b"\x8a" + bytes([len(data)]) + data

    def text(self, value: str) -> None:
        if self.recall(value):
            return
        data = value.encode("utf-8", "surrogatepass")
        self.out += b"X" + struct.pack("<I", len(data)) + data
        self.remember(value)

    def encoded_bytes(self, value: bytes) -> None:
        # Protocol 2 has no bytes; this is how Python's own pickler writes them there.
        self.name("_codecs", "encode")
        self.text(value.decode("latin-1"))
        self.text("latin1")
        self.out += b"\x86R"

    def name(self, module: str, name: str) -> None:
        key = (module, name)
        if self.recall(key):
            return
        if "\n" in module or "\n" in name:
            raise PlanError(self.path, "holds a class whose name has two lines", "it cannot be written")
        self.out += b"c" + module.encode() + b"\n" + name.encode() + b"\n"
        self.remember(key)

    def tuple(self, value: tuple[Any, ...], depth: int) -> None:
        if len(value) > 3:
            self.out += b"("
        for item in value:
            self.save(item, depth + 1)
        self.out += {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(value), b"t")
        if value:
            self.remember(id(value))

    def append_all(self, values: list[Any], depth: int) -> None:
        if values:
            self.out += b"("
            for value in values:
                self.save(value, depth + 1)
            self.out += b"e"

    def set_all(self, pairs: list[tuple[Any, Any]], depth: int) -> None:
        if pairs:
            self.out += b"("
            for key, value in pairs:
                self.save(key, depth + 1)
                self.save(value, depth + 1)
            self.out += b"u"

    def call(self, module: str, name: str, args: tuple[Any, ...], depth: int) -> None:
        self.name(module, name)
        self.keep.append(args)
        self.tuple(args, depth)
        self.out += b"R"

    # ------------------------------------------------------------------------------------------- tensors and objects

    def storage(self, ref: StorageRef) -> None:
        self.out += b"("
        self.text("storage")
        self.name("torch.storage" if ref.storage_class == "UntypedStorage" else "torch", ref.storage_class)
        self.text(ref.key)
        self.text(ref.location)
        self.integer(ref.numel)
        self.out += b"tQ"

    def tensor(self, ref: TensorRef, depth: int) -> None:
        args: tuple[Any, ...] = (ref.storage, ref.offset, tuple(ref.shape), tuple(ref.stride))
        hooks = PlainOrderedDict[Any, Any]()
        if ref.storage.dtype == ref.dtype and ref.dtype in {d.name for d in BY_STORAGE_CLASS.values()}:
            rebuild, args = "_rebuild_tensor_v2", (*args, ref.requires_grad, hooks)
        else:
            dtype = TorchDType(DTYPES[ref.dtype].torch)
            rebuild, args = "_rebuild_tensor_v3", (*args, ref.requires_grad, hooks, dtype)
        if ref.attributes is not None:
            module, cls = ("torch.nn.parameter", "Parameter") if ref.parameter else ("torch", "Tensor")
            parts = (Opaque("torch._utils", rebuild), Opaque(module, cls), args, ref.attributes)
            self.call("torch._tensor", "_rebuild_from_type_v2", parts, depth)
        elif ref.parameter:
            self.name("torch._utils", "_rebuild_parameter")
            self.call("torch._utils", rebuild, args, depth)
            self.save(ref.requires_grad, depth)
            self.save(hooks, depth)
            self.out += b"\x87R"
        else:
            self.call("torch._utils", rebuild, args, depth)

    def opaque(self, value: Opaque, depth: int) -> None:
        self.name(value.module, value.name)
        if value.how == "global":
            return
        if value.kwargs:
            raise PlanError(
                self.path, f"{value.qualified_name} was saved with keyword arguments", "protocol 2 cannot write it"
            )
        self.tuple(value.args, depth)
        self.out += b"R" if value.how == "call" else b"\x81"
        self.remember(id(value))
        self.append_all(value.appended, depth)
        self.set_all(value.items, depth)
        if value.stated:
            self.save(value.state, depth + 1)
            self.out += b"b"
