"""A pickle machine that builds data and nothing else.

It knows every opcode of protocols 0 to 5 that ``torch.save`` and ordinary Python objects use. Plain data becomes plain
data, torch's tensors and storages become references, any other class becomes an inert Opaque. There is no import and no
call in it: a name in a pickle is only ever compared with the names below.

Source: CPython, Modules/_pickle.c; torch 2.13, torch/_weights_only_unpickler.py and torch/_utils.py (the rebuilders).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from ckpttool.containers.values import Opaque, OrderedDict, Size, StorageRef, TensorRef, TorchDType, children
from ckpttool.dtypes import BY_STORAGE_CLASS, BY_TORCH_NAME, itemsize
from ckpttool.errors import ContainerError

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_DEPTH = 200
"""Containers nested deeper than this are refused: no checkpoint needs it, and it would exhaust the stack of others."""
MAX_CONTAINERS = 20_000_000
"""More containers than this in one pickle are refused: one byte of pickle can ask for a hundred bytes of memory."""
MAX_INT_BYTES = 1024
"""Longer integers are refused: turning them into text takes quadratic time."""
MAX_HASHED_INT = 1 << 60
"""Larger integers as keys are refused: many can be made to share a hash, and then a dict takes quadratic time."""
MAX_DIMENSIONS = 64
"""torch's own limit."""

_MARK = object()

_DAMAGED = (struct.error, IndexError, KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError)
"""What a damaged stream makes plain Python raise: missing operands, bad text, wrong types."""


class _Bad(Exception):
    """A stream that is refused, with the reason."""


class Truncated(Exception):
    """The bytes end before the pickle does; a longer prefix of the file may help."""


def unpickle(data: bytes, *, path: str, start: int = 0) -> tuple[Any, int]:
    """Read one pickle into data.

    Args:
        data: Bytes that hold the pickle.
        path: What to call the file in errors.
        start: Where the pickle begins in ``data``.

    Returns:
        The value, and the position after the pickle.

    Raises:
        Truncated: ``data`` ends before the pickle does.
        ContainerError: The stream is damaged, needs something that data does not, or asks for unreasonable amounts.
    """
    machine = _Machine(data, start)
    try:
        value = machine.run()
        _check_depth(value)
    except _Bad as error:
        problem = f"pickle refused at byte {machine.position}: {error}"
        raise ContainerError(path, problem, "it was not written by torch.save; do not load it") from None
    except _DAMAGED as error:
        problem = f"pickle is damaged at byte {machine.position} ({error})"
        raise ContainerError(path, problem, "restore the file from a copy") from error
    return value, machine.position


class _Machine:
    def __init__(self, data: bytes, start: int) -> None:
        self.data = data
        self.position = start
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.containers = 0
        self.strings: dict[str, str] = {}

    def run(self) -> Any:
        data, dispatch = self.data, _DISPATCH
        while True:
            if self.position >= len(data):
                raise Truncated
            opcode = data[self.position]
            self.position += 1
            handler = dispatch.get(opcode)
            if handler is None:
                raise _Bad(f"opcode {opcode:#04x} has no place in a checkpoint")
            if handler is _stop:
                break
            handler(self)
        if len(self.stack) != 1:
            raise _Bad("it does not end with one value")
        return self.stack[0]

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

    def number(self, fmt: str, size: int) -> int:
        value: int = struct.unpack(fmt, self.take(size))[0]
        return value

    def name(self) -> str:
        """One of the two lines of a GLOBAL."""
        return self.line().decode("utf-8")

    # ------------------------------------------------------------------------------------------- stack

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def push_new(self, value: Any) -> None:
        """Push a container, counted."""
        self.containers += 1
        if self.containers > MAX_CONTAINERS:
            raise _Bad(f"more than {MAX_CONTAINERS:,} containers")
        self.stack.append(value)

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise _Bad("a mark where a value should be")
        return value

    def pop_to_mark(self) -> list[Any]:
        stack = self.stack
        at = len(stack) - 1
        while at >= 0 and stack[at] is not _MARK:
            at -= 1
        if at < 0:
            raise _Bad("a mark is missing")
        values = stack[at + 1 :]
        del stack[at:]
        return values


# ------------------------------------------------------------------------------------------------- handlers: scalars


def _stop(_: _Machine) -> None:
    raise AssertionError


def _none(m: _Machine) -> None:
    m.push(None)


def _true(m: _Machine) -> None:
    m.push(True)


def _false(m: _Machine) -> None:
    m.push(False)


def _int_text(m: _Machine) -> None:
    text = m.line()
    if text in {b"00", b"01"}:
        m.push(text == b"01")
    else:
        m.push(_parse_int(text))


def _long_text(m: _Machine) -> None:
    m.push(_parse_int(m.line().removesuffix(b"L")))


def _parse_int(text: bytes) -> int:
    if len(text) > MAX_INT_BYTES:
        raise _Bad("an integer of unreasonable length")
    return int(text)


def _long_binary(fmt: str, size: int) -> Callable[[_Machine], None]:
    def handler(m: _Machine) -> None:
        count = m.number(fmt, size)
        if not 0 <= count <= MAX_INT_BYTES:
            raise _Bad("an integer of unreasonable length")
        m.push(int.from_bytes(m.take(count), "little", signed=True))

    return handler


def _int_binary(fmt: str, size: int) -> Callable[[_Machine], None]:
    def handler(m: _Machine) -> None:
        m.push(m.number(fmt, size))

    return handler


def _float_text(m: _Machine) -> None:
    m.push(float(m.line()))


def _float_binary(m: _Machine) -> None:
    m.push(struct.unpack(">d", m.take(8))[0])


def _text(fmt: str, size: int) -> Callable[[_Machine], None]:
    def handler(m: _Machine) -> None:
        text = m.take(m.number(fmt, size)).decode("utf-8", "surrogatepass")
        m.push(m.strings.setdefault(text, text))

    return handler


def _text_line(m: _Machine) -> None:
    m.push(m.line().decode("raw-unicode-escape"))


def _bytes(fmt: str, size: int) -> Callable[[_Machine], None]:
    def handler(m: _Machine) -> None:
        m.push(m.take(m.number(fmt, size)))

    return handler


def _bytearray(m: _Machine) -> None:
    m.push(bytearray(m.take(m.number("<Q", 8))))


def _old_string(fmt: str, size: int) -> Callable[[_Machine], None]:
    """Python 2's str, and what torch uses for short keys."""

    def handler(m: _Machine) -> None:
        count = m.number(fmt, size)
        if count < 0:
            raise _Bad("a string of negative length")
        m.push(m.take(count).decode("latin-1"))

    return handler


def _old_string_line(m: _Machine) -> None:
    raw = m.line()
    if len(raw) < 2 or raw[:1] != raw[-1:] or raw[:1] not in {b"'", b'"'}:
        raise _Bad("a string without quotes")
    m.push(raw[1:-1].decode("unicode_escape"))


# ------------------------------------------------------------------------------------------------- containers


def _mark(m: _Machine) -> None:
    m.stack.append(_MARK)


def _pop(m: _Machine) -> None:
    m.stack.pop()


def _pop_mark(m: _Machine) -> None:
    m.pop_to_mark()


def _dup(m: _Machine) -> None:
    m.push(m.stack[-1])


def _empty(factory: Callable[[], Any]) -> Callable[[_Machine], None]:
    def handler(m: _Machine) -> None:
        m.push_new(factory())

    return handler


def _tuple(count: int) -> Callable[[_Machine], None]:
    def handler(m: _Machine) -> None:
        values = [m.pop() for _ in range(count)]
        m.push_new(tuple(reversed(values)))

    return handler


def _tuple_mark(m: _Machine) -> None:
    m.push_new(tuple(m.pop_to_mark()))


def _list_mark(m: _Machine) -> None:
    m.push_new(m.pop_to_mark())


def _dict_mark(m: _Machine) -> None:
    values = m.pop_to_mark()
    m.push_new({})
    _set_items(m.stack[-1], values)


def _frozenset(m: _Machine) -> None:
    values = m.pop_to_mark()
    for v in values:
        _check_key(v)
    m.push_new(frozenset(values))


def _append(m: _Machine) -> None:
    value = m.pop()
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
        raise _Bad("values appended to what is no list")


def _set_item(m: _Machine) -> None:
    value, key = m.pop(), m.pop()
    _set_items(m.stack[-1], [key, value])


def _set_items_mark(m: _Machine) -> None:
    values = m.pop_to_mark()
    _set_items(m.stack[-1], values)


def _set_items(target: Any, values: list[Any]) -> None:
    if len(values) % 2:
        raise _Bad("a key without a value")
    pairs = list(zip(values[::2], values[1::2], strict=True))
    if isinstance(target, dict):
        for key, value in pairs:
            _check_key(key)
            target[key] = value
    elif isinstance(target, Opaque) and target.how != "global":
        target.items.extend(pairs)
    else:
        raise _Bad("items stored into what is no dict")


def _add_items(m: _Machine) -> None:
    values = m.pop_to_mark()
    target = m.stack[-1]
    if not isinstance(target, set):
        raise _Bad("items added to what is no set")
    for v in values:
        _check_key(v)
    target.update(values)


def _check_key(key: Any, depth: int = 0) -> None:
    """Allow as a key only what hashes safely and cheaply."""
    if key is None or isinstance(key, str | bytes | float | complex | TorchDType | Opaque):
        return
    if isinstance(key, int) and abs(key) < MAX_HASHED_INT:
        return
    if isinstance(key, tuple) and depth < 4:
        for item in key:
            _check_key(item, depth + 1)
        return
    raise _Bad(f"a {type(key).__name__} as a key")


# ------------------------------------------------------------------------------------------------- memo


def _put(m: _Machine) -> None:
    m.memo[_parse_int(m.line())] = m.stack[-1]


def _put_binary(fmt: str, size: int) -> Callable[[_Machine], None]:
    def handler(m: _Machine) -> None:
        m.memo[m.number(fmt, size)] = m.stack[-1]

    return handler


def _memoize(m: _Machine) -> None:
    m.memo[len(m.memo)] = m.stack[-1]


def _get(m: _Machine) -> None:
    m.push(m.memo[_parse_int(m.line())])


def _get_binary(fmt: str, size: int) -> Callable[[_Machine], None]:
    def handler(m: _Machine) -> None:
        m.push(m.memo[m.number(fmt, size)])

    return handler


# ------------------------------------------------------------------------------------------------- objects


def _global(m: _Machine) -> None:
    module = m.name()
    m.push(_find(module, m.name()))


def _stack_global(m: _Machine) -> None:
    name, module = m.pop(), m.pop()
    if not isinstance(module, str) or not isinstance(name, str):
        raise _Bad("a global whose name is no text")
    m.push(_find(module, name))


def _find(module: str, name: str) -> Any:
    if module == "torch" and name in BY_TORCH_NAME:
        return TorchDType(name)
    return Opaque(module, name)


def _reduce(m: _Machine) -> None:
    args, function = m.pop(), m.pop()
    if not isinstance(args, tuple) or not isinstance(function, Opaque) or function.how != "global":
        raise _Bad("a call of what is no function")
    rebuild = _REBUILDERS.get((function.module, function.name))
    value = rebuild(*args) if rebuild else None
    m.push_new(Opaque(function.module, function.name, "call", args) if value is None else value)


def _new(m: _Machine) -> None:
    args, cls = m.pop(), m.pop()
    _push_new_object(m, cls, args, {})


def _new_with_keywords(m: _Machine) -> None:
    kwargs, args, cls = m.pop(), m.pop(), m.pop()
    _push_new_object(m, cls, args, kwargs)


def _push_new_object(m: _Machine, cls: Any, args: Any, kwargs: Any) -> None:
    if not isinstance(args, tuple) or not isinstance(kwargs, dict) or not isinstance(cls, Opaque) or cls.how != "global":
        raise _Bad("an object of what is no class")
    if (cls.module, cls.name) == ("collections", "OrderedDict") and not args and not kwargs:
        m.push_new(OrderedDict())
        return
    made = Opaque(cls.module, cls.name, "new", args)
    made.kwargs = kwargs
    m.push_new(made)


def _build(m: _Machine) -> None:
    state = m.pop()
    target = m.stack[-1]
    if isinstance(target, OrderedDict) and isinstance(state, dict) and target.attributes is None:
        target.attributes = state
        return
    if not isinstance(target, Opaque) or target.how == "global" or target.stated:
        raise _Bad("a state for what can have none")
    target.state = state
    target.stated = True


def _persistent(m: _Machine) -> None:
    pid = m.pop()
    if not isinstance(pid, tuple) or len(pid) not in {5, 6} or pid[0] != "storage":
        raise _Bad("a persistent id that is no storage")
    _, cls, key, location, numel = pid[:5]
    if not isinstance(cls, Opaque) or cls.how != "global" or cls.module not in {"torch", "torch.storage", "torch.cuda"}:
        raise _Bad("a storage of no known class")
    if not isinstance(key, str) or not isinstance(location, str) or not _is_count(numel):
        raise _Bad("a storage whose key, location or size makes no sense")
    if cls.name == "UntypedStorage":
        dtype = "U8"
    elif cls.name in BY_STORAGE_CLASS:
        dtype = BY_STORAGE_CLASS[cls.name].name
    else:
        raise _Bad(f"a storage of class {cls.qualified_name}, which is not supported")
    if len(pid) == 6 and pid[5] is not None:
        raise _Bad("a view of a storage (torch before 0.4), which is not supported")
    m.push(StorageRef(key, cls.name, dtype, location, numel))


# ------------------------------------------------------------------------------------------------- rebuilders
#
# Each answers a REDUCE of the function it is named after, or None to leave the call as it stands in an Opaque.


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or len(values) > MAX_DIMENSIONS or not all(_is_count(v) for v in values):
        raise _Bad("a tensor whose sizes or strides make no sense")
    return tuple(values)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, dtype: str, requires_grad: Any) -> TensorRef:
    if not isinstance(storage, StorageRef) or not _is_count(offset):
        raise _Bad("a tensor without a storage")
    shape, stride = _counts(shape), _counts(stride)
    if len(shape) != len(stride):
        raise _Bad("a tensor with more strides than sizes")
    ref = TensorRef(storage, dtype, offset, shape, stride, requires_grad=bool(requires_grad))
    if ref.numel >= 1 << 62 or ref.span * itemsize(dtype) > storage.nbytes:
        raise _Bad(f"a tensor of shape {tuple(shape)} reaches beyond its storage {storage.key!r} of {storage.numel} elements")
    return ref


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, stride: Any) -> TensorRef:
    return _rebuild_tensor_v2(storage, offset, shape, stride)


def _rebuild_tensor_v2(
    storage: Any, offset: Any, shape: Any, stride: Any, requires_grad: Any = False, *_: Any
) -> TensorRef:
    return _tensor(storage, offset, shape, stride, getattr(storage, "dtype", ""), requires_grad)


def _rebuild_tensor_v3(
    storage: Any, offset: Any, shape: Any, stride: Any, requires_grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> TensorRef:
    if not isinstance(dtype, TorchDType):
        raise _Bad("a tensor without a dtype")
    return _tensor(storage, offset, shape, stride, BY_TORCH_NAME[dtype.name].name, requires_grad)


def _rebuild_parameter(data: Any, requires_grad: Any = True, *_: Any) -> TensorRef:
    if not isinstance(data, TensorRef):
        raise _Bad("a parameter without a tensor")
    return TensorRef(
        data.storage, data.dtype, data.offset, data.shape, data.stride, bool(requires_grad), True, data.attributes
    )


def _rebuild_from_type(function: Any, cls: Any, args: Any, state: Any) -> TensorRef | None:
    if not (isinstance(function, Opaque) and isinstance(cls, Opaque) and isinstance(args, tuple)):
        return None
    rebuild = _REBUILDERS.get((function.module, function.name))
    if rebuild is None or (cls.module, cls.name) not in {("torch", "Tensor"), ("torch.nn.parameter", "Parameter")}:
        return None
    made = rebuild(*args)
    if not isinstance(made, TensorRef) or not isinstance(state, dict):
        return None
    return TensorRef(
        made.storage, made.dtype, made.offset, made.shape, made.stride, made.requires_grad, cls.name == "Parameter", state
    )


def _rebuild_size(values: Any = ()) -> Size:
    return Size(_counts(tuple(values) if isinstance(values, list) else values))


def _rebuild_ordered_dict(pairs: Any = ()) -> OrderedDict:
    made = OrderedDict()
    for pair in pairs:
        key, value = pair
        _set_items(made, [key, value])
    return made


def _rebuild_set(values: Any = ()) -> set[Any]:
    for v in values:
        _check_key(v)
    return set(values)


def _rebuild_frozenset(values: Any = ()) -> frozenset[Any]:
    return frozenset(_rebuild_set(values))


def _rebuild_encoded(text: Any, encoding: Any = "") -> bytes | None:
    """Protocol 2 writes bytes as latin-1 text to be encoded."""
    return text.encode("latin-1") if isinstance(text, str) and encoding in {"latin1", "latin-1"} else None


def _rebuild_bytes(*args: Any) -> bytes | None:
    return None if args else b""


def _rebuild_complex(real: Any = 0.0, imaginary: Any = 0.0) -> complex | None:
    return complex(real, imaginary) if isinstance(real, float) and isinstance(imaginary, float) else None


_REBUILDERS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    ("torch", "Size"): _rebuild_size,
    ("collections", "OrderedDict"): _rebuild_ordered_dict,
    ("_codecs", "encode"): _rebuild_encoded,
}
for _builtins in ("builtins", "__builtin__"):
    _REBUILDERS |= {
        (_builtins, "set"): _rebuild_set,
        (_builtins, "frozenset"): _rebuild_frozenset,
        (_builtins, "bytes"): _rebuild_bytes,
        (_builtins, "complex"): _rebuild_complex,
    }


def _check_depth(root: Any) -> None:
    """Refuse deep nesting, level by level, so that depth cannot hurt this check either."""
    seen: set[int] = set()
    level: list[Any] = [root]
    for _ in range(MAX_DEPTH):
        following: list[Any] = []
        for value in level:
            if isinstance(value, dict | list | tuple | set | frozenset | Opaque) and id(value) not in seen:
                seen.add(id(value))
                following.extend(children(value))
        if not following:
            return
        level = following
    raise _Bad(f"containers nested more than {MAX_DEPTH} deep")


def _ignore(fmt: str, size: int) -> Callable[[_Machine], None]:
    def handler(m: _Machine) -> None:
        m.number(fmt, size)

    return handler


_DISPATCH: dict[int, Callable[[_Machine], None]] = {
    ord(opcode): handler
    for opcode, handler in {
        ".": _stop,
        "\x80": _ignore("<B", 1),  # PROTO
        "\x95": _ignore("<Q", 8),  # FRAME
        "N": _none,
        "\x88": _true,
        "\x89": _false,
        "I": _int_text,
        "L": _long_text,
        "J": _int_binary("<i", 4),
        "K": _int_binary("<B", 1),
        "M": _int_binary("<H", 2),
        "\x8a": _long_binary("<B", 1),
        "\x8b": _long_binary("<i", 4),
        "F": _float_text,
        "G": _float_binary,
        "V": _text_line,
        "X": _text("<I", 4),
        "\x8c": _text("<B", 1),
        "\x8d": _text("<Q", 8),
        "B": _bytes("<I", 4),
        "C": _bytes("<B", 1),
        "\x8e": _bytes("<Q", 8),
        "\x96": _bytearray,
        "S": _old_string_line,
        "T": _old_string("<i", 4),
        "U": _old_string("<B", 1),
        "(": _mark,
        "0": _pop,
        "1": _pop_mark,
        "2": _dup,
        "]": _empty(list),
        "}": _empty(dict),
        "\x8f": _empty(set),
        ")": _empty(tuple),
        "\x85": _tuple(1),
        "\x86": _tuple(2),
        "\x87": _tuple(3),
        "t": _tuple_mark,
        "l": _list_mark,
        "d": _dict_mark,
        "\x91": _frozenset,
        "a": _append,
        "e": _appends,
        "s": _set_item,
        "u": _set_items_mark,
        "\x90": _add_items,
        "p": _put,
        "q": _put_binary("<B", 1),
        "r": _put_binary("<I", 4),
        "\x94": _memoize,
        "g": _get,
        "h": _get_binary("<B", 1),
        "j": _get_binary("<I", 4),
        "c": _global,
        "\x93": _stack_global,
        "R": _reduce,
        "\x81": _new,
        "\x92": _new_with_keywords,
        "b": _build,
        "Q": _persistent,
    }.items()
}
