"""Objects of one dataclass after another, each read by one match of a pattern instead of by its opcodes.

The metadata of a large distributed checkpoint has hundreds of thousands of them. They differ only in their values: an
integer, a text, a ``torch.Size``, or a value that was read before.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, NamedTuple, Protocol

from ckpttool.containers.values import Opaque, Size

SLOT, SCALAR, TEXT, CONTAINER, SET, OBJECT, MEMO, KEY = 24, 60, 100, 220, 380, 500, 140, 160
"""Bytes of memory that an opcode may take, rounded up: the value, its place on the stack (8, and 24 in all while that
grows) and, for a container, its place in the check of the depth; KEY is an entry of a growing dict."""

BEGIN = b"\x81\x94}\x94("
"""An object without arguments (NEWOBJ), and the start of its attributes; follows EMPTY_TUPLE."""
_END = b"ub"
"""The end of its attributes (SETITEMS, BUILD)."""
_INTEGER = rb"(?:K.|M..|J....)"
_GET = rb"(?:h.|j....)"
_TEXT = rb"\x8c.[\x20-\x7e]{0,255}\x94"
_SIZE = _GET + rb"(?:\)|" + _INTEGER + rb"{1,3}[\x85-\x87]\x94|\(" + _INTEGER + rb"{4,64}t\x94)\x85\x94R\x94"
_VALUE = b"(" + b"|".join([_SIZE, _INTEGER, _GET, _TEXT, b"N"]) + b")"
_ATTRIBUTE = re.compile(b"(" + _GET + b")" + _VALUE, re.DOTALL)
_INTEGERS = re.compile(_INTEGER, re.DOTALL)
_K, _M, _J, _N, _SHORT_TEXT, _H, _EMPTY_TUPLE, _MARK = b"KMJN\x8ch)("
_LONGEST_GET = 5
"""Bytes of the longest reference to a value; a size is longer."""

ATTEMPTS, MOST_PATTERNS = 8, 64
"""Patterns that are tried for one class (the first object of a class has other opcodes), and for one pickle: to make
one takes as long as thousands of opcodes."""
MOST_ATTRIBUTES = 32


class Pattern(NamedTuple):
    """The pattern of the objects of one class."""

    regex: re.Pattern[bytes]
    """Matches an object after BEGIN; one group for each value."""
    names: tuple[str, ...]
    """Names of the attributes."""
    memory: int
    """Memory that is charged for an object without its values."""


class Machine(Protocol):
    """The state of a machine that executes the opcodes of a pickle."""

    data: bytes
    """The pickle."""
    position: int
    """Byte of the next opcode."""
    stack: list[Any]
    memo: dict[int, Any]

    def charge(self, memory: int) -> None:
        """Count bytes of memory."""


class Records:
    """Reads the objects of one pickle by patterns.

    Only MEMOIZE may write to the memo of the machine, as in protocol 4 and later.
    """

    __slots__ = ("_made", "_patterns", "_sizes", "_tried", "heights")

    def __init__(self) -> None:
        self._patterns: dict[Opaque, Pattern] = {}
        self._tried: Counter[Opaque] = Counter()
        self._made = 0
        self._sizes: dict[bytes, tuple[list[Any], int]] = {}
        """Values and memory of each size, by its opcodes."""
        self.heights: dict[int, int] = {}
        """How many containers are nested in each object, by its identity."""

    def read(self, machine: Machine) -> bool:
        """Read the object whose class is on the stack, after EMPTY_TUPLE; return False if the opcodes must be used."""
        cls = machine.stack[-1] if machine.stack else None
        if type(cls) is not Opaque or cls.how != "global":
            return False
        start = machine.position + len(BEGIN)
        pattern = self._patterns.get(cls)
        found = None if pattern is None else pattern.regex.match(machine.data, start)
        if found is None:
            pattern = self._learned(machine, cls, start)
            found = None if pattern is None else pattern.regex.match(machine.data, start)
        return pattern is not None and found is not None and self._build(machine, cls, pattern, found)

    def _learned(self, machine: Machine, cls: Opaque, start: int) -> Pattern | None:
        """Return the pattern of an object; None if an attribute is of another kind, or too many were made."""
        if self._tried[cls] == ATTEMPTS or self._made == MOST_PATTERNS:
            return None
        self._tried[cls] += 1
        data, memo = machine.data, machine.memo
        at, regex = start, b""
        names: list[str] = []
        while (found := _ATTRIBUTE.match(data, at)) and len(names) < MOST_ATTRIBUTES:
            name = memo.get(_number(found[1]))
            if not isinstance(name, str):
                return None
            names.append(name)
            regex += re.escape(found[1]) + _VALUE
            at = found.end()
        if not names or not data.startswith(_END, at):
            return None
        self._made += 1
        memory = OBJECT + MEMO + CONTAINER + MEMO + TEXT + (SLOT + KEY) * len(names)
        self._patterns[cls] = Pattern(re.compile(regex + _END, re.DOTALL), tuple(names), memory)
        return self._patterns[cls]

    def _build(self, machine: Machine, cls: Opaque, pattern: Pattern, found: re.Match[bytes]) -> bool:
        """Put the object on the stack, its values into the memo; change nothing and return False if one is unusual."""
        memo, memory, height = machine.memo, pattern.memory, 1
        values: list[Any] = []
        memoized: list[Any] = []
        value: Any
        for raw in found.groups():
            kind = raw[0]
            if kind in _NUMBERS:
                value = _number(raw)
                memory += SCALAR
            elif kind == _SHORT_TEXT:
                if raw[1] != len(raw) - 3:
                    return False
                value = raw[2:-1].decode("ascii")
                memoized.append(value)
                memory += TEXT + MEMO
            elif kind == _N:
                value = None
                memory += SLOT
            elif len(raw) > _LONGEST_GET:
                known = self._sizes.get(raw) or self._size(machine, raw)
                if known is None:
                    return False
                memoized += known[0]
                value = known[0][-1]
                memory += known[1]
                height = 2
            else:
                value = memo.get(_number(raw))
                if type(value) is Size:
                    height = 2
                elif type(value) is not str and type(value) is not int:
                    return False
                memory += SLOT
            values.append(value)
        machine.charge(memory)
        made = Opaque(cls.module, cls.name, "new")
        made.state = dict(zip(pattern.names, values, strict=True))
        made.stated = True
        self.heights[id(made)] = height
        for at, one in enumerate((made, made.state, *memoized), len(memo)):
            memo[at] = one
        machine.stack[-1] = made
        machine.position = found.end()
        return True

    def _size(self, machine: Machine, raw: bytes) -> tuple[list[Any], int] | None:
        """Return the values that the opcodes of a size put into the memo, the size last, and the memory charged."""
        begin = 2 if raw[0] == _H else _LONGEST_GET
        cls = machine.memo.get(_number(raw[:begin]))
        if type(cls) is not Opaque or (cls.how, cls.module, cls.name) != ("global", "torch", "Size"):
            return None
        marked = raw[begin] == _MARK
        numbers = tuple(_number(one) for one in _INTEGERS.findall(raw, begin + marked))
        if any(n < 0 for n in numbers) or not (marked or raw[begin] == _EMPTY_TUPLE or raw[-6] == 0x84 + len(numbers)):
            return None
        memory = SLOT + SCALAR * len(numbers) + 2 * CONTAINER + 3 * MEMO + OBJECT + 2 * TEXT * marked
        inner = [numbers] if numbers else []
        self._sizes[raw] = [*inner, (numbers,), Size(numbers)], memory
        return self._sizes[raw]


_NUMBERS = frozenset((_K, _M, _J))


def _number(raw: bytes) -> int:
    """Return the number of an opcode: an integer, or a place in the memo."""
    return int.from_bytes(raw[1:], "little", signed=raw[0] == _J)
