"""Objects that are read by a pattern are those that their opcodes make, also where the bytes are damaged."""

from __future__ import annotations

import contextlib
import gc
import pickle
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ckpttool.containers.pickle_machine import Machine, RefusedError, Truncated
from ckpttool.containers.records import ATTEMPTS, MOST_PATTERNS
from ckpttool.containers.unpickler import MAX_DEPTH, execute, unpickle
from ckpttool.errors import ContainerError
from tests.property.test_containers_laws import described


@dataclass
class Part:
    a: Any
    b: Any = None
    c: Any = None


@dataclass
class Other:
    x: Any
    y: Any


TEXTS = ["", "a name", "x" * 255, "x" * 256, "naïve", "\n", "ub", "K"]
NUMBERS = [0, 1, 255, 256, 65535, 65536, -1, 2**31 - 1, 2**31, -(2**40)]
OPCODES = b"hjKMJN\x8c\x94\x85\x86\x87()}ub.\x81R"
SIZES = [torch.Size(given) for given in ([], [3], [4, 300], [70000, 1, 2], [1, 2, 3, 4], [0], [2] * 9, [2**40, 1])]


def _drawn(seed: int) -> list[Any]:
    """Objects of a few classes, with values that are shared, nested or unusual."""
    random_ = random.Random(seed)  # noqa: S311 - repeatable
    shared = ["shared text", torch.Size([5, 6]), (1, 2), [3], None, True, 7, 0.5]
    inner = Other(1, "inner")

    def value() -> Any:
        kind = random_.randrange(20)
        if kind < 6:
            return random_.choice(NUMBERS)
        if kind < 10:
            return random_.choice(TEXTS) + str(random_.randrange(3))
        if kind < 15:
            return random_.choice(SIZES)
        if kind < 19:
            return random_.choice(shared)
        return random_.choice([inner, [inner], {"a": 1}, {2: inner}, b"bytes", 1.5, Part])

    def flat() -> Any:
        return torch.Size([random_.randrange(70000) for _ in range(random_.randrange(4))])

    found: list[Any] = []
    for n in range(60):
        kind = random_.randrange(8)
        made = Part(flat(), f"name {n}", n) if kind < 4 else Part(value(), value(), value()) if kind < 6 else None
        found.append(made or Other(value(), flat()))
        if kind == 0:
            del found[-1].c  # an object without one of the attributes
    return [found, dict(enumerate(found)), {f"t{n}": found[n] for n in range(9)}]


def _read(data: bytes, *, patterns: bool) -> tuple[Any, Any]:
    """Return the value or the kind of the error, and the values in the memo."""
    machine = Machine(data, 0, 1 << 30)
    if not patterns:
        machine.records = None
    try:
        value = described(execute(machine))
    except (RefusedError, Truncated) as error:
        return type(error).__name__, str(error)
    except Exception as error:
        return type(error).__name__, None
    return value, [described(one) for one in machine.memo.values()]


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_patterns_read_what_the_opcodes_make(protocol: int) -> None:
    for seed in range(12):
        data = pickle.dumps(_drawn(seed), protocol=protocol)
        assert _read(data, patterns=True) == _read(data, patterns=False), seed


def test_damaged_bytes_are_read_or_refused_as_by_the_opcodes() -> None:
    data = pickle.dumps(_drawn(3)[0][:16], protocol=4)
    random_ = random.Random(5)  # noqa: S311 - repeatable
    assert len(data) > 600
    for at in range(len(data)):
        new = data[at] ^ (1 << random_.randrange(8)) if at % 2 else random_.choice(OPCODES)
        damaged = data[:at] + bytes([new]) + data[at + 1 :]
        assert _read(damaged, patterns=True) == _read(damaged, patterns=False), at
        assert at % 4 or _read(data[:at], patterns=True) == _read(data[:at], patterns=False), at


def test_most_objects_are_read_by_a_pattern() -> None:
    parts = [Part(torch.Size([n, 8]), f"name {n}", n % 7) for n in range(4000)]
    data = pickle.dumps(parts, protocol=4)
    machine = Machine(data, 0, 1 << 30)
    execute(machine)
    assert machine.records is not None
    assert len(machine.records.heights) > 3970


def test_objects_in_a_pattern_are_charged_as_by_the_opcodes() -> None:
    parts = [Part(torch.Size([n, 8]), f"name {n}", n % 7) for n in range(2000)]
    data = pickle.dumps(parts, protocol=4)
    left = []
    for patterns in (True, False):
        machine = Machine(data, 0, 1 << 30)
        machine.records = machine.records if patterns else None
        execute(machine)
        left.append(machine.memory_left)
    charged, expected = ((1 << 30) - one for one in left)
    assert expected <= charged <= 1.1 * expected
    with pytest.raises(ContainerError, match="may take more than"):
        unpickle(data, path="x", max_memory_bytes=expected // 2)


def _classes(count: int, objects: int) -> bytes:
    """Objects of many classes, whose attribute is named in the memo."""
    rows = b"".join(
        b"\x8c\x01m\x94\x8c" + bytes([len(f"c{n}")]) + f"c{n}".encode() + b"\x94\x93" + b")\x81\x94}\x94(h\x00K\x01ub"
        for n in range(count)
        for _ in range(objects)
    )
    return b"\x80\x04](\x8c\x04name\x94" + rows + b"e."


def test_patterns_of_one_pickle_are_few() -> None:
    machine = Machine(_classes(300, 2), 0, 1 << 30)
    assert len(execute(machine)) == 601
    assert machine.records is not None
    assert len(machine.records._patterns) == MOST_PATTERNS


def test_a_class_with_ever_other_attributes_has_few_patterns() -> None:
    names = [f"n{n}" for n in range(50)]
    parts = []
    for n in range(400):
        part = Part.__new__(Part)
        part.__dict__.update({names[n % 50]: n, names[(n + 1 + n // 50) % 50]: n})
        parts.append(part)
    data = pickle.dumps([names, parts], protocol=4)
    machine = Machine(data, 0, 1 << 30)
    execute(machine)
    assert machine.records is not None
    assert machine.records._made <= ATTEMPTS
    assert _read(data, patterns=True) == _read(data, patterns=False)


def test_the_patterns_do_not_keep_the_machine_and_its_memo() -> None:
    machine = Machine(pickle.dumps([Part(n, "text", 2) for n in range(20)], protocol=4), 0, 1 << 30)
    execute(machine)
    assert machine.records is not None
    assert len(machine.records.heights) > 10
    assert not any(one is machine or one is machine.memo for one in gc.get_referents(machine.records))


def test_a_negative_size_is_refused() -> None:
    data = pickle.dumps([Part(torch.Size([70_000 + n, 2]), "name", n) for n in range(20)], protocol=4)
    at = data.rindex(b"J") + 1
    damaged = data[: at + 3] + b"\xff" + data[at + 4 :]
    assert _read(damaged, patterns=True) == _read(damaged, patterns=False)
    assert _read(damaged, patterns=True)[0] == "RefusedError"


@pytest.mark.parametrize("size", [torch.Size([3]), 7], ids=["with a size", "without"])
def test_an_object_counts_as_deep_as_it_is(size: Any) -> None:
    below = 2 if size != 7 else 1
    for depth, refused in ((MAX_DEPTH - below, False), (MAX_DEPTH - below + 1, True)):
        value: Any = Part(size, "text", 2)
        for _ in range(depth):
            value = [value]
        data = pickle.dumps([[Part(size, "text", n) for n in range(20)], *value], protocol=4)
        with pytest.raises(ContainerError, match="nests containers") if refused else contextlib.nullcontext():
            unpickle(data, path="x")


def test_depth_below_an_object_is_still_bounded() -> None:
    value: Any = Part(1, "text", 2)
    for _ in range(MAX_DEPTH + 1):
        value = [value]
    data = pickle.dumps([[Part(n, "text", 2) for n in range(20)], value], protocol=4)
    with pytest.raises(ContainerError, match="nests containers"):
        unpickle(data, path="x")


def test_places_of_the_memo_that_are_overwritten_are_not_taken_for_those_of_a_pattern() -> None:
    whole = pickle.dumps([Part(torch.Size([n, 8]), f"name {n}", n) for n in range(30)], protocol=4)
    machine = Machine(whole, 0, 1 << 30)
    execute(machine)
    names = [place for place, value in machine.memo.items() if value == "a"]
    end = whole.index(b"name 20\x94") - 40
    cut = whole.index(b"ub", end) + 2  # between two objects
    for place in (names[0], 0):
        damaged = whole[:cut] + b"\x8c\x05other" + b"q" + bytes([place]) + b"0" + whole[cut:]
        assert _read(damaged, patterns=True) == _read(damaged, patterns=False)
        assert _read(damaged, patterns=True) != _read(whole, patterns=False)
