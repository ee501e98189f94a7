"""A pickle machine that builds data and nothing else.

It knows every opcode of protocols 0 to 5 that ``torch.save`` and ordinary Python objects use. Plain data becomes plain
data, torch's tensors and storages become references, any other class becomes an inert Opaque. The machine imports and
calls nothing: it only compares names in the pickle with the names in ``torch_rebuild``.

Every pickle is treated as hostile. Time and memory are in proportion to its length:

* each opcode is charged for the memory it may take, and the sum is bounded;
* operations that copy or hash the same data repeatedly (a call, a key) are charged or bounded by size;
* nesting and the number of keys with one hash are bounded.

Source: CPython, Modules/_pickle.c; torch 2.13, torch/_weights_only_unpickler.py.
"""

from __future__ import annotations

import contextlib
import gc
import re
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.budget import MEMORY, left, spend
from ckpttool.containers.pickle_machine import Machine, RefusedError, Truncated
from ckpttool.containers.records import BEGIN, CONTAINER, MEMO, OBJECT, SCALAR, SET, SLOT, TEXT
from ckpttool.containers.torch_rebuild import DATA_REBUILDERS, TENSOR_REBUILDERS, rebuild_storage
from ckpttool.containers.values import NOTHING, Opaque, OrderedDict, TensorRef, children
from ckpttool.errors import ContainerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ckpttool.containers.values import StorageRef


MAX_INT_BYTES = 1024
"""Longest integer, in bytes: turning a longer one into text takes quadratic time."""


_STOP, _MEMOIZE, _BINGET, _LONG_BINGET, _BININT1, _TUPLE1, _EMPTY_TUPLE = b".\x94hjK\x85)"


def execute(m: Machine) -> Any:
    """Execute the opcodes of a pickle up to its STOP and return its value.

    Raises:
        RefusedError: The pickle needs something that data does not, or takes too much memory.
        Truncated: The bytes end before the pickle does.
    """
    data, end, memo, stack = m.data, len(m.data), m.memo, m.stack
    position, memory = m.position, m.memory_left
    try:
        while position < end:
            opcode = data[position]
            position += 1
            handler, cost = OPCODES[opcode]
            memory -= cost
            if memory < 0:
                m.memory_left = memory
                m.charge(0)
            # Most opcodes of a large pickle are these: a call of a function takes longer than they do.
            if opcode == _MEMOIZE:
                memo[len(memo)] = stack[-1]
            elif opcode == _LONG_BINGET:
                stack.append(memo[_U32.unpack_from(data, position)[0]])
                position += 4
            elif opcode == _BINGET:
                stack.append(memo[_U8.unpack_from(data, position)[0]])
                position += 1
            elif opcode == _BININT1:
                stack.append(_U8.unpack_from(data, position)[0])
                position += 1
            elif opcode == _TUPLE1:
                stack[-1] = (stack[-1],)
            elif opcode == _EMPTY_TUPLE and m.records is not None and data.startswith(BEGIN, position):
                m.position, m.memory_left = position, memory
                if m.records.read(m):
                    position, memory = m.position, m.memory_left
                else:
                    stack.append(())
            elif opcode == _STOP:
                if m.below or len(stack) != 1:
                    raise RefusedError("it does not end with one value")
                m.memory_left = memory
                return stack[0]
            else:
                m.position, m.memory_left = position, memory
                handler(m)
                position, memory, stack = m.position, m.memory_left, m.stack
    finally:
        m.position = max(position, m.position)  # errors name it
    raise Truncated


# ------------------------------------------------------------------------------------------------- handlers: scalars

_U8, _U16, _U32, _U64 = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")
_I32, _F64 = struct.Struct("<i"), struct.Struct(">d")


def _constant(value: Any) -> Callable[[Machine], None]:
    def handler(m: Machine) -> None:
        m.stack.append(value)

    return handler


def _int_text(m: Machine) -> None:
    text = m.line()
    # This is how protocol 0 writes False and True.
    m.stack.append(text == b"01" if text in {b"00", b"01"} else _parse_int(text))


def _long_text(m: Machine) -> None:
    m.stack.append(_parse_int(m.line().removesuffix(b"L")))


def _parse_int(text: bytes) -> int:
    if len(text) > MAX_INT_BYTES:
        raise RefusedError("an integer of unreasonable length")
    return int(text)


def _read_struct(number: struct.Struct) -> Callable[[Machine], None]:
    def handler(m: Machine) -> None:
        m.stack.append(number.unpack_from(m.data, m.position)[0])
        m.position += number.size

    return handler


def _long_binary(number: struct.Struct) -> Callable[[Machine], None]:
    def handler(m: Machine) -> None:
        count = m.number(number)
        if not 0 <= count <= MAX_INT_BYTES:
            raise RefusedError("an integer of unreasonable length")
        m.stack.append(int.from_bytes(m.take(count), "little", signed=True))

    return handler


def _float_text(m: Machine) -> None:
    m.stack.append(float(m.line()))


def _text(number: struct.Struct) -> Callable[[Machine], None]:
    def handler(m: Machine) -> None:
        m.stack.append(m.take(m.number(number)).decode("utf-8", "surrogatepass"))

    return handler


def _text_line(m: Machine) -> None:
    m.stack.append(m.line().decode("raw-unicode-escape"))


def _bytes(number: struct.Struct) -> Callable[[Machine], None]:
    def handler(m: Machine) -> None:
        m.stack.append(m.take(m.number(number)))

    return handler


def _bytearray(m: Machine) -> None:
    m.stack.append(bytearray(m.take(m.number(_U64))))


def _old_string(number: struct.Struct) -> Callable[[Machine], None]:
    def handler(m: Machine) -> None:
        count = m.number(number)
        if count < 0:
            raise RefusedError("a string of negative length")
        m.stack.append(_decode_old(m.take(count)))

    return handler


def _old_string_line(m: Machine) -> None:
    raw = m.line().strip()
    if len(raw) < 2 or raw[:1] != raw[-1:] or raw[:1] not in {b"'", b'"'}:
        raise RefusedError("a string without quotes")
    m.stack.append(_decode_old(re.sub(_ESCAPE, _unescape, raw[1:-1])))


def _decode_old(raw: bytes) -> str:
    """Python 2's str may be text or bytes: read it as text as ``torch.load`` does, without loss if it is bytes."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


_ESCAPE = rb"(?s)\\(x[0-9a-fA-F]{2}|.?)"
_ESCAPED = {b"\\": b"\\", b"'": b"'", b'"': b'"', b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def _unescape(match: re.Match[bytes]) -> bytes:
    """One of the escapes that Python 2's ``repr`` writes."""
    what = match[1]
    return bytes.fromhex(what[1:].decode()) if len(what) == 3 else _ESCAPED[what]


# ------------------------------------------------------------------------------------------------- containers


def _mark(m: Machine) -> None:
    m.below.append(m.stack)
    m.stack = []


def _pop(m: Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.pop_to_mark()


def _pop_mark(m: Machine) -> None:
    m.pop_to_mark()


def _dup(m: Machine) -> None:
    m.stack.append(m.stack[-1])


def _empty(factory: Callable[[], Any]) -> Callable[[Machine], None]:
    def handler(m: Machine) -> None:
        m.stack.append(factory())

    return handler


def _tuple(count: int) -> Callable[[Machine], None]:
    def handler(m: Machine) -> None:
        values = tuple(m.stack[-count:])
        if len(values) < count:
            raise RefusedError("a tuple without its values")
        m.stack[-count:] = [values]

    return handler


def _tuple_mark(m: Machine) -> None:
    values = m.pop_to_mark()
    m.stack.append(tuple(values))


def _list_mark(m: Machine) -> None:
    values = m.pop_to_mark()
    m.stack.append(values)


def _dict_mark(m: Machine) -> None:
    values = m.pop_to_mark()
    made: dict[Any, Any] = {}
    _set_items(m, made, values)
    m.stack.append(made)


def _frozenset(m: Machine) -> None:
    values = m.pop_to_mark()
    m.check_keys(values)
    m.stack.append(frozenset(values))


def _append(m: Machine) -> None:
    value = m.stack.pop()
    _append_items(m.stack[-1], [value])


def _appends(m: Machine) -> None:
    values = m.pop_to_mark()
    _append_items(m.stack[-1], values)


def _append_items(target: Any, values: list[Any]) -> None:
    if isinstance(target, list):
        target.extend(values)
    elif isinstance(target, Opaque) and target.how != "global":
        target.appended = _grown(target.appended, values)
    else:
        raise RefusedError("values appended to something other than a list")


def _grown(known: Sequence[Any], more: Iterable[Any]) -> list[Any]:
    """Return the list of an Opaque with further values; most never have one."""
    values = known if isinstance(known, list) else []
    values.extend(more)
    return values


def _set_item(m: Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    _set_items(m, m.stack[-1], [key, value])


def _set_items_mark(m: Machine) -> None:
    values = m.pop_to_mark()
    _set_items(m, m.stack[-1], values)


def _set_items(m: Machine, target: Any, values: list[Any]) -> None:
    if len(values) % 2:
        raise RefusedError("a key without a value")
    pairs = zip(values[::2], values[1::2], strict=True)
    if isinstance(target, dict):
        m.check_keys(values[::2])
        target.update(pairs)
    elif isinstance(target, Opaque) and target.how != "global":
        m.charge(40 * len(values))
        target.items = _grown(target.items, pairs)
    else:
        raise RefusedError("items stored into something other than a dict")


def _add_items(m: Machine) -> None:
    values = m.pop_to_mark()
    target = m.stack[-1]
    if not isinstance(target, set):
        raise RefusedError("items added to something other than a set")
    m.check_keys(values)
    target.update(values)


# ------------------------------------------------------------------------------------------------- memo


def _put(m: Machine) -> None:
    m.records = None
    m.memo[_parse_int(m.line())] = m.stack[-1]


def _put_binary(number: struct.Struct) -> Callable[[Machine], None]:
    def handler(m: Machine) -> None:
        m.records = None
        m.memo[number.unpack_from(m.data, m.position)[0]] = m.stack[-1]
        m.position += number.size

    return handler


def _memoize(m: Machine) -> None:
    m.memo[len(m.memo)] = m.stack[-1]


def _get(m: Machine) -> None:
    m.stack.append(m.memo[_parse_int(m.line())])


def _get_binary(number: struct.Struct) -> Callable[[Machine], None]:
    def handler(m: Machine) -> None:
        m.stack.append(m.memo[number.unpack_from(m.data, m.position)[0]])
        m.position += number.size

    return handler


# ------------------------------------------------------------------------------------------------- objects


def _global(m: Machine) -> None:
    module = m.line().decode("utf-8")
    m.stack.append(m.find(module, m.line().decode("utf-8")))


def _stack_global(m: Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    if not isinstance(module, str) or not isinstance(name, str):
        raise RefusedError("a class or function without a proper name")
    m.stack.append(m.find(module, name))


def _reduce(m: Machine) -> None:
    args, function = m.stack.pop(), m.stack.pop()
    if not isinstance(args, tuple) or not isinstance(function, Opaque):
        raise RefusedError("a call of something other than a function")
    value: Any = None
    if function.how != "global":
        value = Opaque(function.module, function.name, "call", args)
        value.function = function
    elif (function.module, function.name) in TENSOR_REBUILDERS:
        value = TENSOR_REBUILDERS[function.module, function.name](*args)
    elif (function.module, function.name) in DATA_REBUILDERS:
        value = DATA_REBUILDERS[function.module, function.name](m, *args)
    m.stack.append(Opaque(function.module, function.name, "call", args) if value is None else value)


def _new(m: Machine) -> None:
    args, cls = m.stack.pop(), m.stack.pop()
    m.stack.append(_new_object(cls, args, NOTHING))


def _new_with_keywords(m: Machine) -> None:
    kwargs, args, cls = m.stack.pop(), m.stack.pop(), m.stack.pop()
    m.stack.append(_new_object(cls, args, kwargs))


def _new_object(cls: Any, args: Any, kwargs: Any) -> OrderedDict | Opaque:
    if (
        not isinstance(args, tuple)
        or not (kwargs is NOTHING or isinstance(kwargs, dict))
        or not isinstance(cls, Opaque)
        or cls.how != "global"
    ):
        raise RefusedError("an object of something other than a class")
    if (cls.module, cls.name) == ("collections", "OrderedDict") and not args and not kwargs:
        return OrderedDict()
    made = Opaque(cls.module, cls.name, "new", args)
    made.kwargs = kwargs or NOTHING
    return made


def _build(m: Machine) -> None:
    state = m.stack.pop()
    target = m.stack[-1]
    if isinstance(target, OrderedDict) and isinstance(state, dict) and target.attributes is None:
        target.attributes = state
        return
    if not isinstance(target, Opaque) or target.how == "global" or target.stated:
        raise RefusedError("a state for an object that cannot have one")
    target.state = state
    target.stated = True


def _persistent(m: Machine) -> None:
    m.stack.append(rebuild_storage(m, m.stack.pop()))


# ------------------------------------------------------------------------------------------------- the opcodes


def _ignore(number: struct.Struct) -> Callable[[Machine], None]:
    def handler(m: Machine) -> None:
        m.number(number)

    return handler


def unknown(m: Machine) -> None:
    """Refuse an opcode that no checkpoint needs."""
    raise RefusedError(f"opcode {m.data[m.position - 1]:#04x} has no place in a checkpoint")


OPCODES: list[tuple[Callable[[Machine], None], int]] = [(unknown, 0)] * 256
for _opcode, _handler, _cost in (
    (b"\x80", _ignore(_U8), 0),  # PROTO
    (b"\x95", _ignore(_U64), 0),  # FRAME
    (b"N", _constant(None), SLOT),
    (b"\x88", _constant(True), SLOT),
    (b"\x89", _constant(False), SLOT),
    (b"I", _int_text, SCALAR),
    (b"L", _long_text, SCALAR),
    (b"J", _read_struct(_I32), SCALAR),
    (b"K", _read_struct(_U8), SLOT),
    (b"M", _read_struct(_U16), SCALAR),
    (b"\x8a", _long_binary(_U8), SCALAR),
    (b"\x8b", _long_binary(_I32), SCALAR),
    (b"F", _float_text, SCALAR),
    (b"G", _read_struct(_F64), SCALAR),
    (b"V", _text_line, TEXT),
    (b"X", _text(_U32), TEXT),
    (b"\x8c", _text(_U8), TEXT),
    (b"\x8d", _text(_U64), TEXT),
    (b"B", _bytes(_U32), SCALAR),
    (b"C", _bytes(_U8), SCALAR),
    (b"\x8e", _bytes(_U64), SCALAR),
    (b"\x96", _bytearray, TEXT),
    (b"S", _old_string_line, TEXT),
    (b"T", _old_string(_I32), TEXT),
    (b"U", _old_string(_U8), TEXT),
    (b"(", _mark, TEXT),
    (b"0", _pop, 0),
    (b"1", _pop_mark, 0),
    (b"2", _dup, SLOT),
    (b"]", _empty(list), CONTAINER),
    (b"}", _empty(dict), CONTAINER),
    (b"\x8f", _empty(set), SET),
    (b")", _constant(()), SLOT),
    (b"\x85", _tuple(1), CONTAINER),
    (b"\x86", _tuple(2), CONTAINER),
    (b"\x87", _tuple(3), CONTAINER),
    (b"t", _tuple_mark, TEXT),
    (b"l", _list_mark, CONTAINER),
    (b"d", _dict_mark, CONTAINER),
    (b"\x91", _frozenset, SET),
    (b"a", _append, 0),
    (b"e", _appends, 0),
    (b"s", _set_item, 0),
    (b"u", _set_items_mark, 0),
    (b"\x90", _add_items, 0),
    (b"p", _put, MEMO),
    (b"q", _put_binary(_U8), 0),  # at most 256 of them
    (b"r", _put_binary(_U32), MEMO),
    (b"\x94", _memoize, MEMO),
    (b"g", _get, SLOT),
    (b"h", _get_binary(_U8), SLOT),
    (b"j", _get_binary(_U32), SLOT),
    (b"c", _global, SLOT),
    (b"\x93", _stack_global, SLOT),
    (b"R", _reduce, OBJECT),
    (b"\x81", _new, OBJECT),
    (b"\x92", _new_with_keywords, OBJECT),
    (b"b", _build, 0),
    (b"Q", _persistent, OBJECT),
):
    OPCODES[_opcode[0]] = (_handler, _cost)


__all__ = ["MAX_DEPTH", "MAX_MEMORY_BYTES", "Truncated", "Unpickled", "unpickle"]

MAX_DEPTH = 200
"""Deepest nesting of containers: no checkpoint needs more, and more would exhaust the stack of other readers."""
LARGE = 1 << 20
"""Bytes of a pickle that is large: a larger one is read without collections of cycles."""
MAX_MEMORY_BYTES = 3 << 29
"""Most memory that one pickle may take: one byte of pickle can take over two hundred."""

_FOREIGN_HINT = "it was not written by torch.save; do not load it"
_DAMAGED = (IndexError, KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError)
"""Exceptions of Python while the machine reads a damaged stream: missing operands, bad text, wrong types."""


class Unpickled(NamedTuple):
    """The content of one pickle."""

    value: Any
    """Plain data, Size, TorchDType, TensorRef and Opaque."""
    end: int
    """Position after the pickle."""
    storages: dict[str, StorageRef]
    """Every storage it mentions, by key, in the order of first use."""
    nbytes: dict[str, int]
    """Size of each storage in bytes."""


def unpickle(data: bytes, *, path: str, start: int = 0, max_memory_bytes: int | None = None) -> Unpickled:
    """Read one pickle into data.

    Args:
        data: Bytes that contain the pickle.
        path: Name of the file in errors.
        start: Offset of the pickle in ``data``.
        max_memory_bytes: Most memory that it may take; None for MAX_MEMORY_BYTES.

    Raises:
        Truncated: ``data`` ends before the pickle does.
        ContainerError: The stream is damaged, needs something that data does not, or asks for unreasonable amounts.
    """
    allowed = left(MEMORY, MAX_MEMORY_BYTES if max_memory_bytes is None else max_memory_bytes)
    machine = Machine(data, start, allowed)
    try:
        with _without_collections(len(data) - start):
            value = execute(machine)
        spend(MEMORY, allowed - machine.memory_left, path)
    except struct.error:
        raise Truncated from None  # only raised where fewer bytes are left than a number takes
    except RefusedError as error:
        problem = f"pickle refused at byte {machine.position}: {error}"
        raise ContainerError(path, problem, error.hint) from None
    except MemoryError:
        problem = "reading its pickle takes more memory than there is"
        raise ContainerError(path, problem, "is it damaged? if not, use a larger machine") from None
    except _DAMAGED as error:
        problem = f"pickle is damaged before byte {machine.position}"
        raise ContainerError(path, problem, "restore the file from a copy") from error
    heights = {} if machine.records is None else machine.records.heights
    if isinstance(value, _NESTING) and _height(value, heights, 0) > MAX_DEPTH:
        raise ContainerError(path, f"its pickle nests containers more than {MAX_DEPTH} deep", _FOREIGN_HINT)
    storages = machine.storages
    return Unpickled(value, machine.position, storages, {key: ref.nbytes for key, ref in storages.items()})


@contextlib.contextmanager
def _without_collections(nbytes: int) -> Iterator[None]:
    """Disable Python's collector of cycles while a large pickle is read: each collection visits all objects so far."""
    pauses = nbytes > LARGE and gc.isenabled()
    if pauses:
        gc.disable()
    try:
        yield
    finally:
        if pauses:
            gc.enable()


_NESTING = (dict, list, tuple, set, frozenset, Opaque, TensorRef)


def _height(value: Any, heights: dict[int, int], depth: int) -> int:
    """The longest path downwards from a container, or any number over MAX_DEPTH; each container is visited once."""
    heights[id(value)] = height = 0  # read again by a cycle
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
