"""A pickle machine that builds data and nothing else.

It knows every opcode of protocols 0 to 5 that ``torch.save`` and ordinary Python objects use. Plain data becomes plain
data, torch's tensors and storages become references, any other class becomes an inert Opaque. The machine imports and
calls nothing: it only compares names in the pickle with the names in ``torch_rebuild``.

Every pickle is treated as hostile. Time and memory stay in proportion to its length:

* each opcode is charged for the memory it may take, and the sum is bounded;
* operations that copy or hash the same data repeatedly (a call, a key) are charged or bounded by size;
* nesting and the number of keys with one hash are bounded.

Source: CPython, Modules/_pickle.c; torch 2.13, torch/_weights_only_unpickler.py.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.budget import MEMORY, left, spend
from ckpttool.containers.pickle_machine import Machine, RefusedError, Truncated
from ckpttool.containers.pickle_opcodes import run
from ckpttool.containers.values import Opaque, TensorRef, children
from ckpttool.errors import ContainerError

if TYPE_CHECKING:
    from ckpttool.containers.values import StorageRef

__all__ = ["MAX_DEPTH", "MAX_MEMORY_BYTES", "Truncated", "Unpickled", "unpickle"]

MAX_DEPTH = 200
"""Deepest nesting of containers: no checkpoint needs more, and more would exhaust the stack of other readers."""
MAX_MEMORY_BYTES = 3 << 29
"""Most memory that one pickle may take: one byte of pickle can ask for over two hundred."""

_FOREIGN_HINT = "it was not written by torch.save; do not load it"
_DAMAGED = (IndexError, KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError)
"""What Python raises while the machine reads a damaged stream: missing operands, bad text, wrong types."""


class Unpickled(NamedTuple):
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
    allowed = left(MEMORY, MAX_MEMORY_BYTES)
    machine = Machine(data, start, allowed)
    try:
        value = run(machine)
        spend(MEMORY, allowed - machine.memory_left, path)
    except struct.error:
        raise Truncated from None  # it is only raised where fewer bytes are left than a number takes
    except RefusedError as error:
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
