"""A pickle machine that builds data and nothing else.

It knows every opcode of protocols 0 to 5 that ``torch.save`` and ordinary Python objects use. Plain data becomes plain
data, torch's tensors and storages become references, any other class becomes an inert Opaque. There is no import and no
call in it: a name in a pickle is only ever compared with the names below.

The stream is hostile until proven otherwise, so that time and memory stay in proportion to its length:

* every opcode is charged for the memory it may take, and the sum is bounded;
* what copies or hashes data that a pickle can mention again and again (a call, a key) is charged or bounded by size;
* nesting is bounded, and so is how many keys may share one hash.

Source: CPython, Modules/_pickle.c; torch 2.13, torch/_weights_only_unpickler.py and torch/_utils.py (the rebuilders).
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckpttool.budget import MEMORY, left, take
from ckpttool.containers.values import Opaque, OrderedDict, Size, StorageRef, TensorRef, TorchDType, children
from ckpttool.dtypes import BY_STORAGE_CLASS, BY_TORCH_NAME, itemsize
from ckpttool.errors import ContainerError
from ckpttool.messages import brief

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MAX_DEPTH = 200
"""Containers nested deeper than this are refused: no checkpoint needs it, and it would exhaust the stack of others."""
MAX_MEMORY_BYTES = 3 << 29
"""Pickles that may take more memory than this are refused: one byte of pickle can ask for over two hundred."""
MAX_INT_BYTES = 1024
"""Longer integers are refused: turning them into text takes quadratic time."""
MAX_KEY_VALUES = 256
"""Tuples of more values than this, nested ones included, are refused as keys: each use as a key reads them all."""
MAX_SAME_HASH = 64
"""More keys than this with one hash are refused: a dict of them takes quadratic time. Honest floats reach 33."""
MAX_DIMENSIONS = 64
"""torch's own limit."""
MAX_NAME = 1000
"""Longer names of classes are refused."""

_FOREIGN_HINT = "it was not written by torch.save; do not load it"
_DAMAGED = (IndexError, KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError)
"""What a damaged stream makes plain Python raise: missing operands, bad text, wrong types."""


class _RefusedError(Exception):
    """A stream that is refused, with the reason."""


class Truncated(Exception):  # noqa: N818 - not always an error: the reader may fetch more
    """The bytes end before the pickle does; a longer prefix of the file may help."""


@dataclass(frozen=True, slots=True, eq=False)
class Unpickled:
    """What one pickle holds."""

    value: Any
    """Plain data, Size, TorchDType, TensorRef and Opaque."""
    end: int
    """Position after the pickle."""
    storages: dict[str, StorageRef]
    """Every storage it mentions, by key, in the order of first use."""


def unpickle(data: bytes, *, path: str, start: int = 0) -> Unpickled:
    """Read one pickle into data.

    Args:
        data: Bytes that hold the pickle.
        path: What to call the file in errors.
        start: Where the pickle begins in ``data``.

    Raises:
        Truncated: ``data`` ends before the pickle does.
        ContainerError: The stream is damaged, needs something that data does not, or asks for unreasonable amounts.
    """
    machine = _Machine(data, start)
    allowed = machine.memory_left
    try:
        value = machine.run()
        take(MEMORY, allowed - machine.memory_left, path)
    except struct.error:
        raise Truncated from None  # it is only raised where fewer bytes are left than a number takes
    except _RefusedError as error:
        problem = f"pickle refused at byte {machine.position}: {error}"
        raise ContainerError(path, problem, _FOREIGN_HINT) from None
    except MemoryError:
        problem = "reading its pickle takes more memory than there is"
        raise ContainerError(path, problem, "is it damaged? if not, use a larger machine") from None
    except _DAMAGED as error:
        problem = f"pickle is damaged before byte {machine.position}"
        raise ContainerError(path, problem, "restore the file from a copy") from error
    if isinstance(value, _NESTING) and _height(value, {}, 0) > MAX_DEPTH:
        raise ContainerError(path, f"its pickle nests containers more than {MAX_DEPTH} deep", _FOREIGN_HINT)
    return Unpickled(value, machine.position, machine.storages)


class _Machine:
    __slots__ = (
        "below",
        "data",
        "globals",
        "memo",
        "memory",
        "memory_left",
        "position",
        "same_hash",
        "stack",
        "storages",
    )

    def __init__(self, data: bytes, start: int) -> None:
        self.data = data
        self.position = start
        self.stack: list[Any] = []
        """The values above the topmost mark."""
        self.below: list[list[Any]] = []
        """One list of values for each mark: those below it."""
        self.memo: dict[int, Any] = {}
        self.memory_left = self.memory = left(MEMORY, MAX_MEMORY_BYTES)
        self.globals: dict[tuple[str, str], Opaque | TorchDType] = {}
        self.storages: dict[str, StorageRef] = {}
        self.same_hash: dict[int, set[Any]] = {}
        """Keys whose hash an attacker can choose, by hash."""

    def run(self) -> Any:
        data, end = self.data, len(self.data)
        while self.position < end:
            opcode = data[self.position]
            self.position += 1
            if opcode == _STOP:
                if self.below or len(self.stack) != 1:
                    raise _RefusedError("it does not end with one value")
                return self.stack[0]
            handler, cost = _OPCODES[opcode]
            self.memory_left -= cost
            if self.memory_left < 0:
                self.charge(0)
            handler(self)
        raise Truncated

    def charge(self, nbytes: int) -> None:
        """Take memory from the allowance."""
        self.memory_left -= nbytes
        if self.memory_left < 0:
            raise _RefusedError(f"reading it may take more than {self.memory:,} bytes of memory")

    # ------------------------------------------------------------------------------------------- reading operands

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.data):
            raise Truncated
        chunk = self.data[self.position : end]
        self.position = end
        return chunk

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise Truncated
        chunk = self.data[self.position : end]
        self.position = end + 1
        return chunk

    def number(self, number: struct.Struct) -> int:
        value: int = number.unpack_from(self.data, self.position)[0]
        self.position += number.size
        return value

    # ------------------------------------------------------------------------------------------- stack

    def pop_to_mark(self) -> list[Any]:
        values = self.stack
        if not self.below:
            raise _RefusedError("a mark is missing")
        self.stack = self.below.pop()
        return values

    # ------------------------------------------------------------------------------------------- names and keys

    def find(self, module: str, name: str) -> Opaque | TorchDType:
        """What stands for a class or function: one object for each name, as in Python, so that it can be a key."""
        found = self.globals.get((module, name))
        if found is None:
            for part in (module, name):
                if not 0 < len(part) <= MAX_NAME or not part.isprintable():
                    raise _RefusedError("a class or function without a proper name")
            self.charge(560)
            known = module == "torch" and name in BY_TORCH_NAME
            found = self.globals[module, name] = TorchDType(name) if known else Opaque(module, name)
        return found

    def check_keys(self, keys: Iterable[Any]) -> None:
        """Allow as keys only what hashes and compares safely and cheaply."""
        for key in keys:
            # 100 bytes and more is what an entry of a growing dict takes.
            self.charge(160)
            # Python salts the hash of text, small numbers have each their own, and the others are hashed by identity.
            if key is None or isinstance(key, str | bytes | TorchDType | Opaque):
                continue
            if isinstance(key, int) and -(1 << 60) < key < 1 << 60:
                continue
            values = MAX_KEY_VALUES - _count_values(key, MAX_KEY_VALUES)
            self.charge(400 + 200 * values)  # as much time as opcodes that take so much memory
            same = self.same_hash.setdefault(hash(key), set())
            same.add(key)
            if len(same) > MAX_SAME_HASH:
                raise _RefusedError("keys chosen so that all have one hash")


def _count_values(key: Any, left: int) -> int:
    """Count down the values in a key, as often as they are read."""
    if left <= 0:
        raise _RefusedError(f"a {type(key).__name__} of over {MAX_KEY_VALUES} values as a key")
    left -= 1
    if isinstance(key, tuple | frozenset):
        for item in key:
            left = _count_values(item, left)
    elif isinstance(key, TensorRef):
        left -= 2 * len(key.shape)
    elif key is not None and not isinstance(key, str | bytes | int | float | complex | TorchDType | Opaque):
        raise _RefusedError(f"a {type(key).__name__} as a key")
    return left


# ------------------------------------------------------------------------------------------------- handlers: scalars

_U8, _U16, _U32, _U64 = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")
_I32, _F64 = struct.Struct("<i"), struct.Struct(">d")


def _constant(value: Any) -> Callable[[_Machine], None]:
    def handler(m: _Machine) -> None:
        m.stack.append(value)

    return handler


def _int_text(m: _Machine) -> None:
    text = m.line()
    # This is how protocol 0 writes False and True.
    m.stack.append(text == b"01" if text in {b"00", b"01"} else _parse_int(text))


def _long_text(m: _Machine) -> None:
    m.stack.append(_parse_int(m.line().removesuffix(b"L")))


def _parse_int(text: bytes) -> int:
    if len(text) > MAX_INT_BYTES:
        raise _RefusedError("an integer of unreasonable length")
    return int(text)


def _number(number: struct.Struct) -> Callable[[_Machine], None]:
    def handler(m: _Machine) -> None:
        m.stack.append(number.unpack_from(m.data, m.position)[0])
        m.position += number.size

    return handler


def _long_binary(number: struct.Struct) -> Callable[[_Machine], None]:
    def handler(m: _Machine) -> None:
        count = m.number(number)
        if not 0 <= count <= MAX_INT_BYTES:
            raise _RefusedError("an integer of unreasonable length")
        m.stack.append(int.from_bytes(m.take(count), "little", signed=True))

    return handler


def _float_text(m: _Machine) -> None:
    m.stack.append(float(m.line()))


def _text(number: struct.Struct) -> Callable[[_Machine], None]:
    def handler(m: _Machine) -> None:
        m.stack.append(m.take(m.number(number)).decode("utf-8", "surrogatepass"))

    return handler


def _text_line(m: _Machine) -> None:
    m.stack.append(m.line().decode("raw-unicode-escape"))


def _bytes(number: struct.Struct) -> Callable[[_Machine], None]:
    def handler(m: _Machine) -> None:
        m.stack.append(m.take(m.number(number)))

    return handler


def _bytearray(m: _Machine) -> None:
    m.stack.append(bytearray(m.take(m.number(_U64))))


def _old_string(number: struct.Struct) -> Callable[[_Machine], None]:
    def handler(m: _Machine) -> None:
        count = m.number(number)
        if count < 0:
            raise _RefusedError("a string of negative length")
        m.stack.append(_decode_old(m.take(count)))

    return handler


def _old_string_line(m: _Machine) -> None:
    raw = m.line().strip()
    if len(raw) < 2 or raw[:1] != raw[-1:] or raw[:1] not in {b"'", b'"'}:
        raise _RefusedError("a string without quotes")
    m.stack.append(_decode_old(_ESCAPE.sub(_unescape, raw[1:-1])))


def _decode_old(raw: bytes) -> str:
    """Python 2's str may be text or bytes: take it for text as ``torch.load`` does, and lose nothing if it is not."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|.?)", re.DOTALL)
_ESCAPED = {b"\\": b"\\", b"'": b"'", b'"': b'"', b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def _unescape(match: re.Match[bytes]) -> bytes:
    """One of the escapes that Python 2's ``repr`` writes."""
    what = match[1]
    return bytes.fromhex(what[1:].decode()) if len(what) == 3 else _ESCAPED[what]


# ------------------------------------------------------------------------------------------------- containers


def _mark(m: _Machine) -> None:
    m.below.append(m.stack)
    m.stack = []


def _pop(m: _Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.pop_to_mark()


def _pop_mark(m: _Machine) -> None:
    m.pop_to_mark()


def _dup(m: _Machine) -> None:
    m.stack.append(m.stack[-1])


def _empty(factory: Callable[[], Any]) -> Callable[[_Machine], None]:
    def handler(m: _Machine) -> None:
        m.stack.append(factory())

    return handler


def _tuple(count: int) -> Callable[[_Machine], None]:
    def handler(m: _Machine) -> None:
        values = tuple(m.stack[-count:])
        if len(values) < count:
            raise _RefusedError("a tuple without its values")
        m.stack[-count:] = [values]

    return handler


def _tuple_mark(m: _Machine) -> None:
    values = m.pop_to_mark()
    m.stack.append(tuple(values))


def _list_mark(m: _Machine) -> None:
    values = m.pop_to_mark()
    m.stack.append(values)


def _dict_mark(m: _Machine) -> None:
    values = m.pop_to_mark()
    made: dict[Any, Any] = {}
    _set_items(m, made, values)
    m.stack.append(made)


def _frozenset(m: _Machine) -> None:
    values = m.pop_to_mark()
    m.check_keys(values)
    m.stack.append(frozenset(values))


def _append(m: _Machine) -> None:
    value = m.stack.pop()
    _append_items(m.stack[-1], [value])


def _appends(m: _Machine) -> None:
    values = m.pop_to_mark()
    _append_items(m.stack[-1], values)


def _append_items(target: Any, values: list[Any]) -> None:
    if isinstance(target, list):
        target.extend(values)
    elif isinstance(target, Opaque) and target.how != "global":
        target.appended.extend(values)
    else:
        raise _RefusedError("values appended to what is no list")


def _set_item(m: _Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    _set_items(m, m.stack[-1], [key, value])


def _set_items_mark(m: _Machine) -> None:
    values = m.pop_to_mark()
    _set_items(m, m.stack[-1], values)


def _set_items(m: _Machine, target: Any, values: list[Any]) -> None:
    if len(values) % 2:
        raise _RefusedError("a key without a value")
    pairs = zip(values[::2], values[1::2], strict=True)
    if isinstance(target, dict):
        m.check_keys(values[::2])
        target.update(pairs)
    elif isinstance(target, Opaque) and target.how != "global":
        m.charge(40 * len(values))
        target.items.extend(pairs)
    else:
        raise _RefusedError("items stored into what is no dict")


def _add_items(m: _Machine) -> None:
    values = m.pop_to_mark()
    target = m.stack[-1]
    if not isinstance(target, set):
        raise _RefusedError("items added to what is no set")
    m.check_keys(values)
    target.update(values)


# ------------------------------------------------------------------------------------------------- memo


def _put(m: _Machine) -> None:
    m.memo[_parse_int(m.line())] = m.stack[-1]


def _put_binary(number: struct.Struct) -> Callable[[_Machine], None]:
    def handler(m: _Machine) -> None:
        m.memo[number.unpack_from(m.data, m.position)[0]] = m.stack[-1]
        m.position += number.size

    return handler


def _memoize(m: _Machine) -> None:
    m.memo[len(m.memo)] = m.stack[-1]


def _get(m: _Machine) -> None:
    m.stack.append(m.memo[_parse_int(m.line())])


def _get_binary(number: struct.Struct) -> Callable[[_Machine], None]:
    def handler(m: _Machine) -> None:
        m.stack.append(m.memo[number.unpack_from(m.data, m.position)[0]])
        m.position += number.size

    return handler


# ------------------------------------------------------------------------------------------------- objects


def _global(m: _Machine) -> None:
    module = m.line().decode("utf-8")
    m.stack.append(m.find(module, m.line().decode("utf-8")))


def _stack_global(m: _Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    if not isinstance(module, str) or not isinstance(name, str):
        raise _RefusedError("a class or function without a proper name")
    m.stack.append(m.find(module, name))


def _reduce(m: _Machine) -> None:
    args, function = m.stack.pop(), m.stack.pop()
    if not isinstance(args, tuple) or not isinstance(function, Opaque):
        raise _RefusedError("a call of what is no function")
    value: Any = None
    if function.how != "global":
        value = Opaque(function.module, function.name, "call", args)
        value.function = function
    elif (function.module, function.name) in _TENSOR_REBUILDERS:
        value = _TENSOR_REBUILDERS[function.module, function.name](*args)
    elif (function.module, function.name) in _DATA_REBUILDERS:
        value = _DATA_REBUILDERS[function.module, function.name](m, *args)
    m.stack.append(Opaque(function.module, function.name, "call", args) if value is None else value)


def _new(m: _Machine) -> None:
    args, cls = m.stack.pop(), m.stack.pop()
    m.stack.append(_new_object(cls, args, {}))


def _new_with_keywords(m: _Machine) -> None:
    kwargs, args, cls = m.stack.pop(), m.stack.pop(), m.stack.pop()
    m.stack.append(_new_object(cls, args, kwargs))


def _new_object(cls: Any, args: Any, kwargs: Any) -> OrderedDict | Opaque:
    if (
        not isinstance(args, tuple)
        or not isinstance(kwargs, dict)
        or not isinstance(cls, Opaque)
        or cls.how != "global"
    ):
        raise _RefusedError("an object of what is no class")
    if (cls.module, cls.name) == ("collections", "OrderedDict") and not args and not kwargs:
        return OrderedDict()
    made = Opaque(cls.module, cls.name, "new", args)
    made.kwargs = kwargs
    return made


def _build(m: _Machine) -> None:
    state = m.stack.pop()
    target = m.stack[-1]
    if isinstance(target, OrderedDict) and isinstance(state, dict) and target.attributes is None:
        target.attributes = state
        return
    if not isinstance(target, Opaque) or target.how == "global" or target.stated:
        raise _RefusedError("a state for what can have none")
    target.state = state
    target.stated = True


def _persistent(m: _Machine) -> None:
    pid = m.stack.pop()
    if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module" and isinstance(pid[1], Opaque):
        m.stack.append(pid[1])  # the legacy form's way to save the source of a module's class along with it
        return
    if not isinstance(pid, tuple) or len(pid) not in {5, 6} or pid[0] != "storage":
        raise _RefusedError("a persistent id that is no storage")
    _, cls, key, location, numel = pid[:5]
    if not isinstance(cls, Opaque) or cls.how != "global" or cls.module not in {"torch", "torch.storage", "torch.cuda"}:
        raise _RefusedError("a storage of no known class")
    if not isinstance(key, str) or not isinstance(location, str) or not _is_count(numel):
        raise _RefusedError("a storage whose key, location or size makes no sense")
    if cls.name == "UntypedStorage":
        dtype = "U8"
    elif cls.name in BY_STORAGE_CLASS:
        dtype = BY_STORAGE_CLASS[cls.name].name
    else:
        raise _RefusedError(f"a storage of class {cls.qualified_name}, which is not supported")
    if len(pid) == 6 and pid[5] is not None:
        raise _RefusedError("a view of a storage (torch before 0.4), which is not supported")
    ref = StorageRef(key, cls.name, dtype, location, numel)
    first = m.storages.setdefault(key, ref)
    if first.nbytes != ref.nbytes:
        raise _RefusedError(f"storage {brief(key)} has two sizes")
    m.stack.append(first if first == ref else ref)


# ------------------------------------------------------------------------------------------------- rebuilders
#
# Each answers a REDUCE of the function it is named after, or None to leave the call as it stands in an Opaque.


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or len(values) > MAX_DIMENSIONS or not all(_is_count(v) for v in values):
        raise _RefusedError("a tensor whose sizes or strides make no sense")
    return tuple(values)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, dtype: str, requires_grad: Any) -> TensorRef:
    if not isinstance(storage, StorageRef) or not _is_count(offset):
        raise _RefusedError("a tensor without a storage")
    shape, stride = _counts(shape), _counts(stride)
    if len(shape) != len(stride):
        raise _RefusedError("a tensor with more strides than sizes")
    ref = TensorRef(storage, dtype, offset, shape, stride, requires_grad=bool(requires_grad))
    if ref.numel >= 1 << 62 or ref.span * itemsize(dtype) > storage.nbytes:
        raise _RefusedError(
            f"a tensor of shape {shape} reaches beyond its storage {brief(storage.key)} of {storage.numel} elements"
        )
    return ref


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, stride: Any) -> TensorRef:
    return _tensor(storage, offset, shape, stride, getattr(storage, "dtype", ""), requires_grad=False)


def _rebuild_tensor_v2(
    storage: Any,
    offset: Any,
    shape: Any,
    stride: Any,
    requires_grad: Any = False,
    _hooks: Any = None,
    flags: Any = None,
) -> TensorRef | None:
    if flags:  # conjugated or negated on reading: its bytes are not its values
        return None
    return _tensor(storage, offset, shape, stride, getattr(storage, "dtype", ""), requires_grad)


def _rebuild_tensor_v3(
    storage: Any, offset: Any, shape: Any, stride: Any, requires_grad: Any, _hooks: Any, dtype: Any, flags: Any = None
) -> TensorRef | None:
    if flags or not isinstance(dtype, TorchDType):  # or of a dtype that ckpttool does not know
        return None
    return _tensor(storage, offset, shape, stride, BY_TORCH_NAME[dtype.name].name, requires_grad)


def _rebuild_parameter(data: Any, requires_grad: Any = True, _hooks: Any = None) -> TensorRef | None:
    return _as_parameter(data, requires_grad, None)


def _rebuild_parameter_with_state(data: Any, requires_grad: Any, _hooks: Any, state: Any) -> TensorRef | None:
    return _as_parameter(data, requires_grad, state) if isinstance(state, dict) else None


def _as_parameter(data: Any, requires_grad: Any, attributes: dict[str, Any] | None) -> TensorRef | None:
    if not isinstance(data, TensorRef) or data.attributes is not None:
        return None
    return replace(data, requires_grad=bool(requires_grad), parameter=True, attributes=attributes)


_TENSOR_REBUILDERS: dict[tuple[str, str], Callable[..., TensorRef | None]] = {
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter_with_state,
}


def _rebuild_from_type(function: Any, cls: Any, args: Any, state: Any) -> TensorRef | None:
    if not (isinstance(function, Opaque) and isinstance(cls, Opaque) and isinstance(args, tuple)):
        return None
    rebuild = _TENSOR_REBUILDERS.get((function.module, function.name))
    # Never through itself: hostile nesting of this very call would go as deep as it likes.
    if rebuild is None or rebuild is _rebuild_from_type or (cls.module, cls.name) not in _TENSOR_CLASSES:
        return None
    made = rebuild(*args)
    if made is None or made.attributes is not None or not isinstance(state, dict):
        return None
    return replace(made, parameter=cls.name == "Parameter", attributes=state)


_TENSOR_CLASSES = {("torch", "Tensor"), ("torch.nn.parameter", "Parameter")}
_TENSOR_REBUILDERS["torch._tensor", "_rebuild_from_type_v2"] = _rebuild_from_type


# What follows copies its arguments, which a pickle may name again and again: each copy is charged.


def _rebuild_size(_: _Machine, values: Any = ()) -> Size:
    return Size(_counts(values))


def _rebuild_ordered_dict(m: _Machine, pairs: Any = ()) -> OrderedDict | None:
    # Python 2 passed the content this way; Python 3 stores it item by item.
    if not isinstance(pairs, list | tuple):
        return None
    made = OrderedDict()
    for key, value in pairs:
        m.check_keys([key])
        made[key] = value
    return made


def _rebuild_set(m: _Machine, values: Any = ()) -> set[Any] | None:
    if not isinstance(values, list | tuple):
        return None
    m.check_keys(values)
    return set(values)


def _rebuild_frozenset(m: _Machine, values: Any = ()) -> frozenset[Any] | None:
    made = _rebuild_set(m, values)
    return None if made is None else frozenset(made)


def _rebuild_encoded(m: _Machine, text: Any, encoding: Any = "") -> bytes | None:
    """Protocol 2 writes bytes as latin-1 text to be encoded."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        return None
    m.charge(len(text))
    return text.encode("latin-1")


def _rebuild_bytes(_: _Machine, *args: Any) -> bytes | None:
    return None if args else b""


def _rebuild_bytearray(m: _Machine, value: Any = b"", encoding: Any = "latin-1") -> bytearray | None:
    if not isinstance(value, str | bytes) or encoding != "latin-1":
        return None
    m.charge(2 * len(value))
    return bytearray(value if isinstance(value, bytes) else value.encode("latin-1"))


def _rebuild_complex(_: _Machine, real: Any = 0.0, imaginary: Any = 0.0) -> complex | None:
    return complex(real, imaginary) if isinstance(real, float) and isinstance(imaginary, float) else None


def _rebuild_attribute(m: _Machine, owner: Any = None, name: Any = None, *more: Any) -> Opaque | TorchDType | None:
    """Up to protocol 3 there is no other way to name a class within a class."""
    if not isinstance(owner, Opaque) or owner.how != "global" or not isinstance(name, str) or more:
        return None
    if len(name) > MAX_NAME:
        raise _RefusedError("a class or function without a proper name")
    return m.find(owner.module, f"{owner.name}.{name}")


_DATA_REBUILDERS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): _rebuild_size,
    ("collections", "OrderedDict"): _rebuild_ordered_dict,
    ("_codecs", "encode"): _rebuild_encoded,
}
for _builtins in ("builtins", "__builtin__"):
    _DATA_REBUILDERS |= {
        (_builtins, "set"): _rebuild_set,
        (_builtins, "frozenset"): _rebuild_frozenset,
        (_builtins, "bytes"): _rebuild_bytes,
        (_builtins, "bytearray"): _rebuild_bytearray,
        (_builtins, "complex"): _rebuild_complex,
        (_builtins, "getattr"): _rebuild_attribute,
    }


# ------------------------------------------------------------------------------------------------- depth

_NESTING = (dict, list, tuple, set, frozenset, Opaque, TensorRef)


def _height(value: Any, heights: dict[int, int], depth: int) -> int:
    """The longest path downwards from a container, or any number over MAX_DEPTH; each is looked at once."""
    heights[id(value)] = height = 0  # what a cycle finds
    for child in children(value):
        if isinstance(child, _NESTING):
            below = heights.get(id(child))
            if below is None:
                below = _height(child, heights, depth + 1) if depth < MAX_DEPTH else MAX_DEPTH
            height = max(height, below + 1)
            if height > MAX_DEPTH:
                break
    heights[id(value)] = height
    return height


# ------------------------------------------------------------------------------------------------- the opcodes


def _ignore(number: struct.Struct) -> Callable[[_Machine], None]:
    def handler(m: _Machine) -> None:
        m.number(number)

    return handler


def _unknown(m: _Machine) -> None:
    raise _RefusedError(f"opcode {m.data[m.position - 1]:#04x} has no place in a checkpoint")


_STOP = ord(".")

# Bytes that an opcode may take, on the generous side: the value, its place on the stack (8, and 24 in all while that
# grows) and, for a container, its place in the check of the depth.
_SLOT, _SCALAR, _TEXT, _CONTAINER, _SET, _OBJECT, _MEMO = 24, 60, 100, 220, 380, 500, 140

_OPCODES: list[tuple[Callable[[_Machine], None], int]] = [(_unknown, 0)] * 256
for _opcode, _handler, _cost in (
    (b"\x80", _ignore(_U8), 0),  # PROTO
    (b"\x95", _ignore(_U64), 0),  # FRAME
    (b"N", _constant(None), _SLOT),
    (b"\x88", _constant(True), _SLOT),
    (b"\x89", _constant(False), _SLOT),
    (b"I", _int_text, _SCALAR),
    (b"L", _long_text, _SCALAR),
    (b"J", _number(_I32), _SCALAR),
    (b"K", _number(_U8), _SLOT),
    (b"M", _number(_U16), _SCALAR),
    (b"\x8a", _long_binary(_U8), _SCALAR),
    (b"\x8b", _long_binary(_I32), _SCALAR),
    (b"F", _float_text, _SCALAR),
    (b"G", _number(_F64), _SCALAR),
    (b"V", _text_line, _TEXT),
    (b"X", _text(_U32), _TEXT),
    (b"\x8c", _text(_U8), _TEXT),
    (b"\x8d", _text(_U64), _TEXT),
    (b"B", _bytes(_U32), _SCALAR),
    (b"C", _bytes(_U8), _SCALAR),
    (b"\x8e", _bytes(_U64), _SCALAR),
    (b"\x96", _bytearray, _TEXT),
    (b"S", _old_string_line, _TEXT),
    (b"T", _old_string(_I32), _TEXT),
    (b"U", _old_string(_U8), _TEXT),
    (b"(", _mark, _TEXT),
    (b"0", _pop, 0),
    (b"1", _pop_mark, 0),
    (b"2", _dup, _SLOT),
    (b"]", _empty(list), _CONTAINER),
    (b"}", _empty(dict), _CONTAINER),
    (b"\x8f", _empty(set), _SET),
    (b")", _constant(()), _SLOT),
    (b"\x85", _tuple(1), _CONTAINER),
    (b"\x86", _tuple(2), _CONTAINER),
    (b"\x87", _tuple(3), _CONTAINER),
    (b"t", _tuple_mark, _TEXT),
    (b"l", _list_mark, _CONTAINER),
    (b"d", _dict_mark, _CONTAINER),
    (b"\x91", _frozenset, _SET),
    (b"a", _append, 0),
    (b"e", _appends, 0),
    (b"s", _set_item, 0),
    (b"u", _set_items_mark, 0),
    (b"\x90", _add_items, 0),
    (b"p", _put, _MEMO),
    (b"q", _put_binary(_U8), 0),  # at most 256 of them
    (b"r", _put_binary(_U32), _MEMO),
    (b"\x94", _memoize, _MEMO),
    (b"g", _get, _SLOT),
    (b"h", _get_binary(_U8), _SLOT),
    (b"j", _get_binary(_U32), _SLOT),
    (b"c", _global, _SLOT),
    (b"\x93", _stack_global, _SLOT),
    (b"R", _reduce, _OBJECT),
    (b"\x81", _new, _OBJECT),
    (b"\x92", _new_with_keywords, _OBJECT),
    (b"b", _build, 0),
    (b"Q", _persistent, _OBJECT),
):
    _OPCODES[_opcode[0]] = (_handler, _cost)
