"""State of the pickle machine: stack, memo, operands, and the memory that a pickle may still take.

``unpickler`` has the opcodes that change it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.containers.records import KEY, Records
from ckpttool.containers.values import Opaque, StorageRef, TensorRef, TorchDType
from ckpttool.dtypes import BY_TORCH_NAME

if TYPE_CHECKING:
    import struct
    from collections.abc import Iterable

MAX_KEY_VALUES = 256
"""Most values in a tuple that is used as a key, nested ones included: each use as a key reads them all."""
MAX_SAME_HASH = 64
"""Most keys that may share one hash: a dict of them takes quadratic time. Floats of real checkpoints reach 33."""
_SAFE_KEYS = (str, bytes, TorchDType, Opaque)
"""Types of keys that are quick to hash and compare."""
MAX_NAME = 1000
"""Longest name of a class, in characters."""


class RefusedError(Exception):
    """The pickle is refused, with the reason and a hint."""

    def __init__(self, problem: str, hint: str = "it was not written by torch.save; do not load it") -> None:
        super().__init__(problem)
        self.hint = hint


class Truncated(Exception):  # noqa: N818 - not always an error: the reader may fetch more
    """The bytes end before the pickle does; a longer prefix of the file may help."""


class Machine:
    """The state of one pickle being read.

    Args:
        data: Bytes that contain the pickle.
        start: Offset of the pickle in ``data``.
        memory: Bytes of memory that the pickle may take.
    """

    __slots__ = (
        "below",
        "data",
        "globals",
        "memo",
        "memory",
        "memory_left",
        "position",
        "records",
        "same_hash",
        "stack",
        "storages",
    )

    def __init__(self, data: bytes, start: int, memory: int) -> None:
        self.data = data
        self.position = start
        self.stack: list[Any] = []
        """The values above the topmost mark."""
        self.below: list[list[Any]] = []
        """One list for each mark: the values below it."""
        self.memo: dict[int, Any] = {}
        self.memory_left = self.memory = memory
        self.globals: dict[tuple[str, str], Opaque | TorchDType] = {}
        self.storages: dict[str, StorageRef] = {}
        self.same_hash: dict[int, set[Any]] = {}
        """Keys whose hash an attacker can choose, by hash."""
        self.records: Records | None = Records()
        """Reads objects by patterns; None after an opcode that writes to a place of the memo."""

    def charge(self, nbytes: int) -> None:
        """Charge ``nbytes`` of memory to the pickle; refuse it if the budget is exceeded."""
        self.memory_left -= nbytes
        if self.memory_left < 0:
            problem = f"reading it may take more than {self.memory:,} bytes of memory"
            raise RefusedError(problem, "if you trust the file, load it with the framework that wrote it")

    # ------------------------------------------------------------------------------------------- reading operands

    def take(self, count: int) -> bytes:
        """Read the next ``count`` bytes."""
        end = self.position + count
        if end > len(self.data):
            raise Truncated
        chunk = self.data[self.position : end]
        self.position = end
        return chunk

    def line(self) -> bytes:
        """Read up to the next newline, and past it."""
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise Truncated
        chunk = self.data[self.position : end]
        self.position = end + 1
        return chunk

    def number(self, number: struct.Struct) -> int:
        """Read one integer."""
        value: int = number.unpack_from(self.data, self.position)[0]
        self.position += number.size
        return value

    # ------------------------------------------------------------------------------------------- stack

    def pop_to_mark(self) -> list[Any]:
        """Pop the values above the topmost mark, and the mark."""
        values = self.stack
        if not self.below:
            raise RefusedError("a mark is missing")
        self.stack = self.below.pop()
        return values

    # ------------------------------------------------------------------------------------------- names and keys

    def find(self, module: str, name: str) -> Opaque | TorchDType:
        """Return the object for a class or function: one for each name, so that it can be a key."""
        found = self.globals.get((module, name))
        if found is None:
            for part in (module, name):
                if not 0 < len(part) <= MAX_NAME or not part.isprintable():
                    raise RefusedError("a class or function without a proper name")
            self.charge(560)
            known = module == "torch" and name in BY_TORCH_NAME
            found = self.globals[module, name] = TorchDType(name) if known else Opaque(module, name)
        return found

    def check_keys(self, keys: Iterable[Any]) -> None:
        """Refuse keys that are not safe and cheap to hash and compare."""
        for key in keys:
            self.charge(KEY)
            # Python salts the hash of text; small integers have distinct hashes; the others are hashed by identity.
            if key is None or isinstance(key, _SAFE_KEYS):
                continue
            if isinstance(key, int) and -(1 << 60) < key < 1 << 60:
                continue
            values = MAX_KEY_VALUES - _count_values(key, MAX_KEY_VALUES)
            self.charge(400 + 200 * values)  # hashing takes as much time as opcodes of that cost
            same = self.same_hash.setdefault(hash(key), set())
            same.add(key)
            if len(same) > MAX_SAME_HASH:
                raise RefusedError("too many keys with one hash")


def _count_values(key: Any, left: int) -> int:
    """Subtract from ``left`` the values that hashing a key reads, repetitions included."""
    if left <= 0:
        raise RefusedError(f"a {type(key).__name__} of over {MAX_KEY_VALUES} values as a key")
    left -= 1
    if isinstance(key, tuple | frozenset):
        for item in key:
            left = _count_values(item, left)
    elif isinstance(key, TensorRef):
        left -= 2 * len(key.shape)
    elif key is not None and not isinstance(key, str | bytes | int | float | complex | TorchDType | Opaque):
        raise RefusedError(f"a {type(key).__name__} as a key")
    return left
