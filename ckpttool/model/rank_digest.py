"""The digests that one rank sends to the first, and their merger: one sort of all parts, for any number of ranks."""

from __future__ import annotations

import base64
import json
import math
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckpttool import digests
from ckpttool.model.state_digest import Mismatch, StateDigest, TensorDigest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

FIRST_ALONE = frozenset({"client_state"})
"""Kinds of values that only the first rank sends."""
BOX = 1 << 63
"""Set in the place of a part that is not one run of elements; the other bits identify it."""


class Part(NamedTuple):
    """A tensor; a rank has a part of it."""

    key: str
    """State: "weights", "module", "exp_avg"."""
    name: str
    """Parameter or buffer."""
    dtype: str
    """Type in safetensors' spelling."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    is_buffer: bool = False
    """True for a buffer: each rank may have its own values."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RankFacts:
    """The state of one rank beside its tensors."""

    numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """``StateDigest.numbers`` of its parameters."""
    groups: Sequence[Mapping[str, str]] = ()
    """``StateDigest.groups``."""
    group_of: Mapping[str, int] = field(default_factory=dict)
    """``StateDigest.group_of``."""
    values: Mapping[str, str] = field(default_factory=dict)
    """``StateDigest.values`` that all ranks have in common."""
    own: Mapping[str, str] = field(default_factory=dict)
    """Values of this rank alone."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of tied parameters."""
    unproven: Mapping[str, str] = field(default_factory=dict)
    """States that are not digested, such as "momentum_buffer", and why."""
    partitioned: bool = False
    """True if the optimizer steps on partitions of flat buffers, false if on parameters."""
    frozen: Sequence[str] = ()
    """Parameters that need no gradient."""
    trains: bool = False
    """True with an optimizer, false for a model alone."""
    others: Sequence[str] = ()
    """Names in the module's state dict that are neither parameters nor buffers."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RankDigest(RankFacts):
    """The digests of one rank."""

    parts: Sequence[Part]
    """The tensors; it has a part of each."""
    rows: NDArray[np.uint64]
    """For each part: its first element in C order (or ``BOX`` and an identifier), its elements, and the lanes of its
    digest; shape (parts, 4)."""

    def to_json(self) -> dict[str, str]:
        """Return the digests as JSON data; most of it is the same text on many ranks."""
        facts = {name: getattr(self, name) for name in RankFacts.__dataclass_fields__ if name != "own"}
        facts["groups"] = [dict(options) for options in self.groups]
        return {
            "parts": _packed(self.parts),
            "facts": _packed(facts),
            "own": _packed(dict(self.own)),
            "rows": base64.b64encode(zlib.compress(self.rows.tobytes(), 1)).decode(),
        }

    @classmethod
    def from_json(cls, found: Mapping[str, str], parsed: dict[str, Any]) -> RankDigest:
        """Return the digests of ``to_json``.

        Args:
            found: The data.
            parsed: Texts that were parsed before, for other ranks.
        """
        parts = parsed.get(found["parts"])
        if parts is None:
            parts = [
                Part(k, n, dtype, tuple(shape), buffer) for k, n, dtype, shape, buffer in _unpacked(found["parts"])
            ]
            parsed[found["parts"]] = parts
        facts = parsed.setdefault(found["facts"], None) or _unpacked(found["facts"])
        parsed[found["facts"]] = facts
        rows = np.frombuffer(zlib.decompress(base64.b64decode(found["rows"])), dtype=np.uint64).reshape(-1, 4)
        return cls(parts=parts, rows=rows, own=_unpacked(found["own"]), **facts)


def _packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(json.dumps(value).encode(), 1)).decode()


def _unpacked(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text)))


class Merged(NamedTuple):
    """The state of all ranks."""

    state: StateDigest
    """Its digests and numbers, of the first rank where ranks differ."""
    mismatches: list[Mismatch]
    """Its own contradictions."""
    unproven: dict[str, str]
    """States that belong to partitions instead of parameters, which are left out, and why."""
    buffers: dict[str, dict[int, int]]
    """Digest on each rank of the buffers that differ between ranks, or that some ranks lack."""


def merge(ranks: Sequence[RankDigest]) -> Merged:
    """Merge the digests of all ranks."""
    tensors, mismatches, buffers = _merge_parts(ranks)
    numbers: dict[str, dict[str, float]] = {}
    first, values = ranks[0], dict(ranks[0].values)
    unproven = {key: why for own in ranks for key, why in own.unproven.items()}
    there = {name: text for name, text in first.values.items() if name.partition(".")[0] not in FIRST_ALONE}
    for rank, own in enumerate(ranks):
        values |= {f"{name} of rank {rank}": text for name, text in own.own.items()}
        for key, found in own.numbers.items():
            held = numbers.setdefault(key, {})
            odd = [(name, number) for name, number in found.items() if held.setdefault(name, number) != number]
            if odd and own.partitioned and key != "step":
                unproven[key] = "it is a number of each partition"
                continue
            mismatches += [Mismatch(key, n, f"is {v:g} on rank {rank}, but {held[n]:g} before it") for n, v in odd]
        for mine, options in zip(own.groups, first.groups, strict=False):
            different = sorted(k for k in mine.keys() & options.keys() if mine[k] != options[k])
            if own.partitioned:
                unproven |= dict.fromkeys(different, "it is a hyper-parameter of each partition")
            else:
                mismatches += [Mismatch(key, "", f"differs between ranks 0 and {rank}") for key in different]
        if rank and own.values != there:
            names = sorted(n for n in there.keys() | own.values.keys() if own.values.get(n) != there.get(n))
            mismatches += [Mismatch(name, "", f"differs between ranks 0 and {rank}") for name in names]
    state = StateDigest(
        tensors=tensors,
        numbers={key: found for key, found in numbers.items() if key not in unproven},
        groups=[{k: text for k, text in options.items() if k not in unproven} for options in first.groups],
        group_of={name: group for own in ranks for name, group in own.group_of.items()},
        values=values,
    )
    return Merged(state, mismatches, unproven, buffers)


def _merge_parts(
    ranks: Sequence[RankDigest],
) -> tuple[dict[str, dict[str, TensorDigest]], list[Mismatch], dict[str, dict[int, int]]]:
    """Add the digests of the parts of each tensor; parts that several ranks have must be equal, and count once.

    Ranks may have their own values of a buffer, such as the statistics of a batch norm: the first rank's count.
    """
    numbers: dict[Part, int] = {}
    indexes: dict[int, NDArray[np.uint64]] = {}
    for own in ranks:
        if id(own.parts) not in indexes:
            found = [numbers.setdefault(part, len(numbers)) for part in own.parts]
            indexes[id(own.parts)] = np.array(found, dtype=np.uint64)
    rows = np.concatenate([own.rows for own in ranks])
    tensor = np.concatenate([indexes[id(own.parts)] for own in ranks])
    rank = np.repeat(np.arange(len(ranks)), [len(own.rows) for own in ranks])
    order = np.lexsort((rank, rows[:, 1], rows[:, 0], tensor))
    rows, tensor, rank = rows[order], tensor[order], rank[order]
    parts = list(numbers)
    new = np.ones(len(rows), dtype=bool)
    new[1:] = (tensor[1:] != tensor[:-1]) | (rows[1:, :2] != rows[:-1, :2]).any(axis=1)
    firsts = np.flatnonzero(new)
    group = np.cumsum(new) - 1
    mismatches = []
    held = np.bincount(tensor.astype(np.intp), minlength=len(parts))
    odd = {n for n, part in enumerate(parts) if part.is_buffer and held[n] < len(ranks)}
    for index in np.flatnonzero((rows[:, 2:] != rows[firsts[group], 2:]).any(axis=1)).tolist():
        part = parts[int(tensor[index])]
        if part.is_buffer:
            odd.add(int(tensor[index]))
            continue
        problem = f"differs between ranks {rank[firsts[group[index]]]} and {rank[index]}, which have the same part"
        mismatches.append(Mismatch(part.key, part.name, problem))
    buffers = {
        parts[n].name: {int(rank[at]): digests.joined(rows[at, 2:]) for at in np.flatnonzero(tensor == n)} for n in odd
    }
    tensors: dict[str, dict[str, TensorDigest]] = {}
    unique, owners = rows[firsts], tensor[firsts]
    edges = np.searchsorted(owners, np.arange(len(parts), dtype=np.uint64))
    sums = np.add.reduceat(unique[:, 1:], edges, axis=0) if len(unique) else unique[:, 1:]
    for part, (covered, low, high) in zip(parts, sums.tolist(), strict=True):
        total = math.prod(part.shape)
        if covered != total:
            problem = f"has parts of {covered:,} elements on all ranks, of {total:,}"
            mismatches.append(Mismatch(part.key, part.name, problem))
        if part.name in tensors.setdefault(part.key, {}):
            mismatches.append(Mismatch(part.key, part.name, "has another type or shape on another rank"))
        one = TensorDigest(part.dtype, part.shape, digests.joined(np.array([low, high], dtype=np.uint64)))
        tensors[part.key].setdefault(part.name, one)
    return tensors, mismatches, buffers
