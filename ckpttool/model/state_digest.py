"""The digests and numbers of a training state, which a save records and a proof compares with the live state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpttool import digests
from ckpttool.messages import printable

WEIGHTS = "weights"
"""A parameter's weights (the master, or the module's copy if it is newer or the only one), or a buffer's values."""


GATHERED = "gathered"
"""State of live weights that a rank keeps whole beside its partition, as ZeRO-3 does with small parameters."""
NOT_HYPERPARAMETERS = frozenset({"params", "param_names", "name"})
"""Keys of a parameter group that say which parameters it has."""
SHOWN = 60
"""Most characters of a value in a message."""
LONG = 200
"""Characters above which the text of plain data is replaced by its hash."""


class TensorDigest(NamedTuple):
    """The digest of a tensor."""

    dtype: str
    """Its type in safetensors' spelling. Equal values in F32, BF16 and F16 have one digest."""
    shape: tuple[int, ...]
    """Its shape before partitioning."""
    value: int
    """128 bits; see ``ckpttool.digests``."""

    def __str__(self) -> str:
        return f"{self.dtype} {'x'.join(map(str, self.shape)) or '-'} {self.value:032x}"

    @classmethod
    def parse(cls, text: str) -> TensorDigest:
        """Return the digest of ``str()``.

        Raises:
            ValueError: The text is none.
        """
        dtype, shape, value = text.split(" ")
        return cls(dtype, () if shape == "-" else tuple(map(int, shape.split("x"))), int(value, 16))


class Mismatch(NamedTuple):
    """A part of a live state that differs from the saved one."""

    key: str
    """State: "weights", "exp_avg", "step", or the name of a value: "scheduler.last_epoch"."""
    name: str
    """Parameter or buffer; "" for a value of the run."""
    problem: str
    """The difference, as text."""

    def __str__(self) -> str:
        return f"{self.key}{' of ' if self.name else ''}{self.name} {self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDigest:
    """The digests and numbers of a training state, the same for every number of ranks, ZeRO stage and file format."""

    tensors: Mapping[str, Mapping[str, TensorDigest]]
    """Digests by state ("weights", "module", "exp_avg") and name of the parameter or buffer."""
    numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """States that are one number for a parameter, such as "step", by state and name."""
    groups: Sequence[Mapping[str, str]] = ()
    """Hyper-parameters of each optimizer group, as ``canonical`` text."""
    group_of: Mapping[str, int] = field(default_factory=dict)
    """Index of each trained parameter's group."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Other values by name, as ``canonical`` text: counters, scheduler, loss scale, client state."""

    @property
    def count(self) -> int:
        """Number of tensors."""
        return sum(map(len, self.tensors.values()))

    def to_json(self) -> dict[str, Any]:
        """Return the digests as JSON data."""
        return {
            "tensors": {key: {n: str(d) for n, d in found.items()} for key, found in self.tensors.items()},
            "numbers": {key: _packed(found) for key, found in self.numbers.items()},
            "groups": [dict(options) for options in self.groups],
            "group_of": _packed(self.group_of),
            "values": dict(self.values),
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> StateDigest:
        """Return the digests of ``to_json``.

        Raises:
            ValueError: The data is not of that form; also KeyError, TypeError and AttributeError.
        """
        tensors = {
            str(key): {str(name): TensorDigest.parse(text) for name, text in own.items()}
            for key, own in found["tensors"].items()
        }
        return cls(
            tensors=tensors,
            numbers={
                str(key): {n: float(v) for n, v in _unpacked(own).items()} for key, own in found["numbers"].items()
            },
            groups=[{str(k): str(v) for k, v in options.items()} for options in found["groups"]],
            group_of={name: int(group) for name, group in _unpacked(found["group_of"]).items()},
            values={str(name): str(text) for name, text in found["values"].items()},
        )

    def mismatches(self, live: StateDigest) -> list[Mismatch]:
        """Return the differences of a live state; parts that only the live state has are not compared."""
        result = []
        for key, tensors in self.tensors.items():
            there = live.tensors.get(key, {})
            result += [Mismatch(key, name, why) for name, own in tensors.items() if (why := _why(own, there.get(name)))]
        for key, numbers in self.numbers.items():
            held = live.numbers.get(key, {})
            for name, number in numbers.items():
                if name not in held:
                    result.append(Mismatch(key, name, f"is missing, but was saved as {number:g}"))
                elif held[name] != number:
                    result.append(Mismatch(key, name, f"is {held[name]:g}, but was saved as {number:g}"))
        result += self._mismatched_groups(live)
        for name, text in self.values.items():
            found = live.values.get(name)
            if found != text:
                is_now = "is missing" if found is None else f"is {_short(found)}"
                result.append(Mismatch(name, "", f"{is_now}, but was saved as {_short(text)}"))
        return result

    def _mismatched_groups(self, live: StateDigest) -> list[Mismatch]:
        """Compare the hyper-parameters by parameter, because groups may have another order; name each one once."""
        pairs: dict[tuple[int, int], str] = {}
        for name, group in self.group_of.items():
            if name in live.group_of:
                pairs.setdefault((group, live.group_of[name]), name)
        result = []
        for (saved, own), name in pairs.items():
            there = live.groups[own]
            for key, text in self.groups[saved].items():
                if key in there and there[key] != text:
                    problem = f"is {_short(there[key])}, but was saved as {_short(text)}"
                    result.append(Mismatch(key, f"the group of {name}", problem))
        return result


def _short(text: str) -> str:
    return printable(text if len(text) <= SHOWN else text[: SHOWN - 3] + "...")


def _why(saved: TensorDigest, live: TensorDigest | None) -> str:
    """Return how a live tensor differs from the saved one; "" if it does not."""
    if live is None:
        return "is missing"
    one = math.prod(saved.shape) == math.prod(live.shape) == 1  # universal checkpoints have no 0-dim tensors
    same_kind = digests.kind_of(saved.dtype) == digests.kind_of(live.dtype)
    if not same_kind or (saved.shape != live.shape and not one):
        return f"is {live.dtype} {list(live.shape)}, but was saved as {saved.dtype} {list(saved.shape)}"
    types = f": it is {live.dtype}, and was {saved.dtype}" if saved.dtype != live.dtype else ""
    return "" if saved.value == live.value else f"has other values than were saved{types}"


def _packed(numbers: Mapping[str, float]) -> list[list[Any]]:
    """Return numbers by name as JSON data: each number with its names."""
    names: dict[float, list[str]] = {}
    for name, number in numbers.items():
        names.setdefault(number, []).append(name)
    return [[number, own] for number, own in names.items()]


def _unpacked(found: Sequence[Sequence[Any]]) -> dict[str, float]:
    return {str(name): number for number, names in found for name in names}


def canonical(value: Any, tensor: Any = None) -> str:
    """Return plain data as text, or the hash of a long text: equal values have one, whatever the types of containers.

    Args:
        value: The data. Objects of other classes count by their class alone.
        tensor: Function that returns the text of a tensor or an array; None for plain data.
    """
    text = _text(value, tensor)
    if len(text) <= LONG:
        return text
    import hashlib  # importing it takes longer than reading most checkpoints

    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


def leaves(path: str, value: Any, tensor: Any = None) -> dict[str, str]:
    """Return the items of nested dicts and lists as ``canonical`` text, by "path.key.0".

    Args:
        path: Path of the value.
        value: The data.
        tensor: As for ``canonical``.
    """
    if isinstance(value, Mapping):
        pairs = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        pairs = [(str(n), item) for n, item in enumerate(value)]
    else:
        return {path: canonical(value, tensor)}
    return {name: text for key, item in pairs for name, text in leaves(f"{path}.{key}", item, tensor).items()}


def _text(value: Any, tensor: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return repr(int(value))
    if isinstance(value, float):
        return repr(int(value)) if value.is_integer() else repr(float(value))
    if isinstance(value, str | bytes):
        return repr(value)
    if isinstance(value, Mapping):
        pairs = sorted((_text(k, tensor), _text(v, tensor)) for k, v in value.items())
        return "{" + ", ".join(f"{k}: {v}" for k, v in pairs) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_text(item, tensor) for item in value) + "]"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(_text(item, tensor) for item in value)) + "}"
    found = None if tensor is None else tensor(value)
    return found if found is not None else type(value).__name__
