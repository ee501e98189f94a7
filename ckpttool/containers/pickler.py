"""Write a pickle from data with tensor references and Opaque objects, without importing the classes that it names.

Shared objects and cycles are preserved, and the same data gives the same bytes. Where the data allows, only opcodes
that ``torch.load(weights_only=True)`` accepts are written (protocol 2).

Source: CPython, Lib/pickle.py (protocol 2, and how it closes cycles through tuples); torch 2.13,
torch/_weights_only_unpickler.py (the opcodes it knows) and torch/serialization.py (``persistent_id``).
"""

from __future__ import annotations

import struct
from collections import OrderedDict as PlainOrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.containers.unpickler import MAX_DEPTH
from ckpttool.containers.values import Opaque, OrderedDict, Size, StorageRef, TensorRef, TorchDType
from ckpttool.dtypes import BY_STORAGE_CLASS, DTYPES
from ckpttool.errors import PlanError
from ckpttool.messages import brief

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_TYPED_STORAGES = {d.name for d in BY_STORAGE_CLASS.values()}
_POP, _POP_MARK = b"0", b"1"


def pickle(value: Any, *, path: str) -> bytes:
    """Pickle a value in torch's form.

    Args:
        value: Plain data, Size, TorchDType, StorageRef, TensorRef and Opaque, nested at will.
        path: Name of the file in errors.

    Raises:
        PlanError: The value contains something else or is nested too deeply.
    """
    writer = _PickleWriter(path)
    writer.out += b"\x80\x02"
    writer.save(value, 0)
    writer.out += b"."
    return bytes(writer.out)


class _PickleWriter:
    def __init__(self, path: str) -> None:
        self.path = path
        self.out = bytearray()
        self.memo: dict[object, int] = {}
        """Memo number of strings, numbers and names by value, of other values by identity."""
        self.keep: list[Any] = []
        """References to the values in the memo, so that no identity is reused."""

    def save(self, value: Any, depth: int) -> None:
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
        elif isinstance(value, TorchDType):
            self.name("torch", value.name)
        elif isinstance(value, StorageRef):
            self.storage(value)
        elif isinstance(value, Opaque) and value.how == "global":
            self.name(value.module, value.name)
        elif not self.recall(id(value)):
            # The parts of a tensor or a class are a few levels deeper here than in the source.
            if depth > MAX_DEPTH + 8:
                raise PlanError(
                    self.path, f"its structure is nested more than {MAX_DEPTH} deep", "it cannot be written"
                )
            self.keep.append(value)
            self.shared(value, depth)

    def shared(self, value: Any, depth: int) -> None:
        """Write a value that may occur again once, then refer to it."""
        if isinstance(value, TensorRef):
            self.tensor(value, depth)
        elif isinstance(value, bytes):
            # Protocol 2 has no opcode for bytes; Python's own pickler writes them in this form.
            self.call(value, "_codecs", "encode", (value.decode("latin-1"), "latin1"), depth)
        elif isinstance(value, Size):
            self.call(value, "torch", "Size", (tuple(value),), depth)
        elif isinstance(value, tuple):
            self.fixed(value, depth)
        elif isinstance(value, list):
            self.out += b"]"
            self.remember(id(value))
            self.append_all(value, depth)
        elif isinstance(value, PlainOrderedDict):
            self.call(value, "collections", "OrderedDict", (), depth)
            self.set_all(value.items(), depth)
            if isinstance(value, OrderedDict) and value.attributes is not None:
                self.save(value.attributes, depth + 1)
                self.out += b"b"
        elif isinstance(value, dict):
            self.out += b"}"
            self.remember(id(value))
            self.set_all(value.items(), depth)
        elif isinstance(value, set | frozenset):
            self.call(value, "__builtin__", type(value).__name__, (sorted(value, key=_order),), depth)
        elif isinstance(value, complex):
            self.call(value, "__builtin__", "complex", (value.real, value.imag), depth)
        elif isinstance(value, bytearray):
            self.call(value, "__builtin__", "bytearray", (value.decode("latin-1"), "latin-1"), depth)
        elif isinstance(value, Opaque):
            self.opaque(value, depth)
        else:
            raise PlanError(
                self.path, f"a {type(value).__name__} cannot be written into it", "this is a bug in ckpttool"
            )

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

    def remember_made(self, value: Any) -> None:
        """Memoize the value just built; if one of its items refers back to it, use the memo's value."""
        if id(value) in self.memo:
            self.out += _POP
            self.recall(id(value))
        else:
            self.remember(id(value))

    # ------------------------------------------------------------------------------------------- plain values

    def integer(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self.out += b"K" + bytes([value])
        elif 0 <= value < 1 << 16:
            self.out += b"M" + struct.pack("<H", value)
        elif -(1 << 31) <= value < 1 << 31:
            self.out += b"J" + struct.pack("<i", value)
        elif not self.recall(("integer", value)):
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.out += b"\x8a" + bytes([len(data)]) if len(data) < 256 else b"\x8b" + struct.pack("<i", len(data))
            self.out += data
            self.remember(("integer", value))

    def text(self, value: str) -> None:
        if not self.recall(value):
            data = value.encode("utf-8", "surrogatepass")
            self.out += b"X" + struct.pack("<I", len(data)) + data
            self.remember(value)

    def name(self, module: str, name: str) -> None:
        key = ("name", module, name)
        if self.recall(key):
            return
        if not module or not name or not module.isprintable() or not name.isprintable():
            raise PlanError(self.path, f"holds a class named {brief(module)}, {brief(name)}", "it cannot be written")
        owner, _, attribute = name.rpartition(".")
        if owner:  # protocol 2 names a nested class only in this way
            self.name("__builtin__", "getattr")
            self.name(module, owner)
            self.text(attribute)
            self.out += b"\x86R"
        else:
            self.out += b"c" + module.encode() + b"\n" + name.encode() + b"\n"
        self.remember(key)

    def fixed(self, value: tuple[Any, ...], depth: int) -> None:
        if not value:
            self.out += b")"
            return
        if len(value) > 3:
            self.out += b"("
        for item in value:
            self.save(item, depth + 1)
        if id(value) in self.memo:  # one of its items refers back to it
            self.out += _POP_MARK if len(value) > 3 else _POP * len(value)
            self.recall(id(value))
        else:
            self.out += {1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(value), b"t")
            self.remember(id(value))

    def append_all(self, values: Sequence[Any], depth: int) -> None:
        if values:
            self.out += b"("
            for value in values:
                self.save(value, depth + 1)
            self.out += b"e"

    def set_all(self, pairs: Iterable[tuple[Any, Any]], depth: int) -> None:
        start = len(self.out)
        self.out += b"("
        for key, value in pairs:
            self.save(key, depth + 1)
            self.save(value, depth + 1)
        if len(self.out) == start + 1:
            del self.out[start:]
        else:
            self.out += b"u"

    def call(self, value: Any, module: str, name: str, args: tuple[Any, ...], depth: int) -> None:
        """Write the call that makes ``value``."""
        self.name(module, name)
        self.save(args, depth + 1)
        self.out += b"R"
        self.remember_made(value)

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
        hooks = PlainOrderedDict[Any, Any]()
        args: tuple[Any, ...]
        args = (ref.storage, ref.offset, tuple(ref.shape), tuple(ref.stride), ref.requires_grad, hooks)
        rebuild = "_rebuild_tensor_v2"
        if ref.storage.dtype != ref.dtype or ref.dtype not in _TYPED_STORAGES:
            rebuild, args = "_rebuild_tensor_v3", (*args, TorchDType(DTYPES[ref.dtype].torch))
        if ref.parameter:
            data = replace(ref, requires_grad=False, parameter=False, attributes=None)
            state = () if ref.attributes is None else (ref.attributes,)
            name = "_rebuild_parameter_with_state" if state else "_rebuild_parameter"
            self.call(ref, "torch._utils", name, (data, ref.requires_grad, hooks, *state), depth)
        elif ref.attributes is not None:
            parts = (Opaque("torch._utils", rebuild), Opaque("torch", "Tensor"), args, ref.attributes)
            self.call(ref, "torch._tensor", "_rebuild_from_type_v2", parts, depth)
        else:
            self.call(ref, "torch._utils", rebuild, args, depth)

    def opaque(self, value: Opaque, depth: int) -> None:
        if value.kwargs:
            raise PlanError(
                self.path, f"{value.qualified_name} was saved with keyword arguments", "protocol 2 cannot write it"
            )
        if value.function is not None:
            self.save(value.function, depth + 1)
        else:
            self.name(value.module, value.name)
        self.save(value.args, depth + 1)
        self.out += b"R" if value.how == "call" else b"\x81"
        self.remember_made(value)
        self.append_all(value.appended, depth)
        self.set_all(value.items, depth)
        if value.stated:
            self.save(value.state, depth + 1)
            self.out += b"b"


def _order(item: Any) -> tuple[Any, ...]:
    """Sort the items of a set, so that the same content gives the same bytes."""
    if isinstance(item, Opaque):
        return ("", item.serial)
    if isinstance(item, tuple):
        return (type(item).__name__, *map(_order, item))
    if isinstance(item, frozenset):
        return (type(item).__name__, *sorted(map(_order, item)))
    return (type(item).__name__, repr(item))
