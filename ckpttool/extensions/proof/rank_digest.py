"""The digests that one rank sends to the first, and their merger: one sort of all parts, for any number of ranks."""

from __future__ import annotations

import base64
import itertools
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from ckpttool import digests
from ckpttool.extensions.proof.state_digest import GATHERED, VALUE, StateDigest, items_of_state, once
from ckpttool.model import MODULE
from ckpttool.model.items import OPTION, STATE, STEP, WEIGHTS, Fact, Item, Mismatch, TensorDigest, told

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from numpy.typing import NDArray

T = TypeVar("T")
CLIENT_STATE = "client_state"
"""Kind of the values that the user passes to a save; the first rank's are saved."""
NO_SUM = 1 << 32
"""Stands for the checksum of a part that has none."""
COPY = 1 << 33
"""Set beside the checksum of a part that another rank digests."""
SHOWN = 20
"""Most ranks that a message lists."""
BOX = 1 << 63
"""Set in the place of a part that is not one run of elements; the other bits identify it."""


class WholeTensor(NamedTuple):
    """A tensor of the run; a rank has a part of it."""

    key: str
    """State: "weights", "module", "exp_avg"."""
    name: str
    """Parameter or buffer."""
    dtype: str
    """Type in safetensors' spelling."""
    shape: tuple[int, ...]
    """Its shape."""
    is_buffer: bool = False
    """True for a buffer: each rank may have its own values."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RankFacts:
    """The state of one rank beside its tensors; the first fields are as in ``StateDigest``."""

    numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    types: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    groups: Sequence[Mapping[str, str]] = ()
    group_of: Mapping[str, int] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    """``StateDigest.values`` that all ranks have in common."""
    own: Mapping[str, str] = field(default_factory=dict)
    """Values of this rank alone."""
    unproven: Mapping[str, str] = field(default_factory=dict)
    """States that are not digested, such as "momentum_buffer", and why."""
    partitioned: bool = False
    """True if the optimizer steps on partitions of flat buffers, false if on parameters."""
    frozen: Sequence[str] = ()
    """Parameters that need no gradient."""
    ungrouped: Sequence[str] = ()
    """Parameters that need a gradient and are in no group of the optimizer."""
    trains: bool = False
    """True with an optimizer, false for a model alone."""
    others: Sequence[str] = ()
    """Names in the module's state dict that are neither parameters nor buffers."""
    pending: str = ""
    """Gradients that the next step adds to, as text; "" if there are none."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RankDigest(RankFacts):
    """The digests of one rank."""

    tensors: Sequence[WholeTensor]
    """The tensor of each of its parts; several parts may be of one."""
    rows: NDArray[np.uint64]
    """For each part: its first element in C order (or ``BOX`` and an identifier), its elements, the lanes of its
    digest, and the CRC-32 of its bytes, with ``COPY`` if another rank digests it, or ``NO_SUM``: replicas are then
    compared by their digests; shape (parts, 5)."""

    def to_json(self) -> dict[str, str]:
        """Return the digests as JSON data; most of it is the same text on many ranks."""
        return {name: _packed(getattr(self, name)) for name in self.__dataclass_fields__}

    @classmethod
    def of_ranks(cls, messages: Sequence[Mapping[str, str]]) -> list[RankDigest]:
        """Return the digests of all ranks from their ``to_json``; those that sent the same text share the objects."""
        found = {one: _unpacked(*one) for one in dict.fromkeys(one for message in messages for one in message.items())}
        return [cls(**{name: found[name, text] for name, text in message.items()}) for message in messages]


def _packed(value: Any) -> str:
    is_array = isinstance(value, np.ndarray)
    data = value.tobytes() if is_array else json.dumps(value).encode()
    return base64.b64encode(zlib.compress(data, 1 if is_array else 6)).decode()


def _unpacked(name: str, text: str) -> Any:
    data = zlib.decompress(base64.b64decode(text))
    if name == "rows":
        return np.frombuffer(data, dtype=np.uint64).reshape(-1, 5)
    if name == "tensors":
        return [
            WholeTensor(key, name, dtype, tuple(shape), is_buffer)
            for key, name, dtype, shape, is_buffer in json.loads(data)
        ]
    return json.loads(data)


class Merged(NamedTuple):
    """The state of all ranks."""

    state: StateDigest
    """Its digests and numbers, of the first rank where ranks differ."""
    mismatches: list[Mismatch]
    """Contradictions of the ranks in their tensors."""
    apart: Apart
    """Items that differ between ranks: numbers, hyper-parameters, values and buffers."""
    unproven: dict[str, str]
    """States that belong to partitions instead of parameters, which are left out, and why."""
    holders: dict[str, list[int]]
    """Ranks that have each parameter; the shard of some may be empty."""
    other_forms: dict[str, list[int]]
    """Ranks that have a state which is not partitioned like the weights."""
    spread: list[str]
    """Weights that some ranks lack, as in a pipeline; without the experts of DeepSpeed."""

    @property
    def contradictions(self) -> list[Mismatch]:
        """All differences between ranks that should have one state."""
        allowed, differing = self.unproven.keys(), self.state.differing or ()
        problems = []
        for item, held in self.apart.items():
            if item.key not in allowed and (item.name or item.key) not in differing:
                first, *others = sorted(held.items(), key=lambda one: one[1][0])
                values = [f"{told(fact)}{on_ranks(ranks)}" for fact, ranks in (*others, first)]
                problems.append((item, f"is {', but '.join(values)}", False))
        return [*self.mismatches, *once(problems)]


Apart = Mapping[Item, Mapping[Fact | None, Sequence[int]]]
"""For each item the ranks that have each value; None for ranks that lack it."""


def on_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text for a message; "" for none."""
    listed = ", ".join(map(str, ranks[:SHOWN])) + (", ..." if len(ranks) > SHOWN else "")
    return f" on rank{'s' * (len(ranks) > 1)} {listed}" if ranks else ""


def merge(ranks: Sequence[RankDigest], *, whole: bool = True) -> Merged:
    """Merge the digests of all ranks.

    Args:
        ranks: The digests.
        whole: Whether each rank lists all of its parts; a save leaves out replicas, which it writes once.
    """
    tensors, mismatches, buffers, holders, spread = _merge_parts(ranks, whole=whole)
    unproven = {key: why for own in ranks for key, why in own.unproven.items()}
    as_values = {key for key, why in unproven.items() if why == OF_OTHER_FORM}
    for key in as_values - tensors.keys():  # all ranks have it as values
        del unproven[key]
    tensors = {key: own for key, own in tensors.items() if key not in as_values}
    mismatches = [one for one in mismatches if one.key not in as_values]
    numbers, groups, values, ties = (
        _distinct(ranks, names) for names in (("numbers", "types"), OF_GROUPS, ("values",), ("aliases",))
    )
    must_have = {**holders, "": range(len(ranks))}
    apart = {item: own for facts in (numbers, groups, ties, values) for item, own in _apart(facts, must_have).items()}
    of_ranks = {item.key for item in apart if item.kind == VALUE and item.key.startswith(EXTRA)}
    apart = {item: own for item, own in apart.items() if item.kind != VALUE or item.key not in of_ranks}
    if any(own.partitioned for own in ranks):
        odd = [item for item, found in apart.items() if item.kind in OF_PARTITIONS and None not in found]
        unproven |= {item.key: OF_PARTITIONS[item.kind] for item in odd if item.key != STEP}
    keys = [key for key in dict.fromkeys(key for one, _ in numbers for key in one.numbers) if key not in unproven]
    options: dict[tuple[tuple[str, str], ...], int] = {}
    group_of: dict[str, int] = {}
    for facts, _ in groups:
        plain = [tuple(sorted((k, text) for k, text in one.items() if k not in unproven)) for one in facts.groups]
        numbered = [options.setdefault(one, len(options)) for one in plain]
        group_of = _united([group_of, {name: numbered[group] for name, group in facts.group_of.items()}])
    differing = [i for i in (*buffers, *apart) if i in buffers or (i.kind == VALUE and _is_client(i.key))]
    state = StateDigest(
        tensors=tensors,
        numbers={key: _united([one.numbers.get(key, {}) for one, _ in numbers]) for key in keys},
        types={key: _united([one.types.get(key, {}) for one, _ in numbers]) for key in keys},
        groups=[dict(one) for one in options],
        group_of=group_of,
        aliases=ranks[0].aliases,
        frozen=frozenset(name for facts, _ in groups for name in facts.frozen or () if name in group_of),
        values={name: text for name, text in ranks[0].values.items() if name not in of_ranks}
        | {
            f"{name} of rank {rank}": text
            for rank, own in enumerate(ranks)
            for name, text in (*own.own.items(), *((n, own.values[n]) for n in sorted(of_ranks & own.values.keys())))
        },
        differing=frozenset(item.name or item.key for item in differing),
    )
    other = {key: [r for r, own in enumerate(ranks) if own.unproven.get(key) == OF_OTHER_FORM] for key in as_values}
    return Merged(state, mismatches, {**buffers, **apart}, unproven, holders, other, spread)


EXPERT = re.compile(r"(\.deepspeed_experts\.)\d+")
"""Part of the names of experts, with its number: ranks of DeepSpeed divide them among them."""
UNLIKE = "is not the same gathered and partitioned"
"""The problem of weights that a rank has gathered."""
OF_OTHER_FORM = "it is not partitioned like the weights"
"""Why tensors of an optimizer are values of the ranks that have them so; other ranks may have them partitioned."""
MOMENTUM = "momentum_buffer"
"""The state of Muon: its partitions have no padding, so that their form depends on the number of ranks."""
EXTRA = "extra."
"""Start of the names of values of objects beside model and optimizer; ranks may have their own."""
OF_GROUPS = ("groups", "group_of", "frozen")
"""Facts of the groups of an optimizer."""
OF_PARTITIONS = {STATE: "it is a number of each partition", OPTION: "it is a hyper-parameter of each partition"}
"""Why a number or a hyper-parameter of an optimizer that steps on partitions is left out."""


def _is_client(name: str) -> bool:
    """Return whether a value is the user's: a save keeps the first rank's."""
    return name.partition(".")[0].partition("[")[0] == CLIENT_STATE


def _united(held: Sequence[Mapping[str, T]]) -> dict[str, T]:
    """Return the entries of all mappings; of several with one name, the first one."""
    return {name: one for own in reversed(held) for name, one in own.items()}


def _distinct(ranks: Sequence[RankDigest], names: Sequence[str]) -> list[tuple[StateDigest, list[int]]]:
    """Return facts, by their names, with the ranks that have them: ranks that sent the same text share the objects."""
    found: dict[tuple[int, ...], tuple[StateDigest, list[int]]] = {}
    for rank, own in enumerate(ranks):
        facts = {name: getattr(own, name) for name in names}
        known = found.setdefault(tuple(map(id, facts.values())), (StateDigest(tensors={}, **facts), []))
        known[1].append(rank)
    return list(found.values())


def _apart(
    distinct: Sequence[tuple[StateDigest, Sequence[int]]], holders: Mapping[str, Iterable[int]]
) -> dict[Item, dict[Fact | None, Sequence[int]]]:
    """Return the items that are not the same on all ranks that must have them, each with the ranks of each value."""
    if len(distinct) == 1:
        return {}
    found: dict[Item, dict[Fact | None, list[int]]] = {}
    for facts, ranks in distinct:
        for item, fact in items_of_state(facts).items():
            found.setdefault(item, {}).setdefault(fact, []).extend(ranks)
    result: dict[Item, dict[Fact | None, Sequence[int]]] = {}
    for item, by_fact in found.items():
        there = {rank for ranks in by_fact.values() for rank in ranks}
        if lacking := [rank for rank in holders.get(item.name, ()) if rank not in there]:
            by_fact[None] = lacking
        if len(by_fact) > 1:
            result[item] = {fact: sorted(ranks) for fact, ranks in by_fact.items()}
    return result


def _merge_parts(
    ranks: Sequence[RankDigest], *, whole: bool
) -> tuple[dict[str, dict[str, TensorDigest]], list[Mismatch], Apart, dict[str, list[int]], list[str]]:
    """Merge the tensors of all ranks.

    Returns:
        The tensors; contradictions; the buffers that differ between ranks, or that some lack; the ranks that have each
        parameter; and weights that some ranks lack.
    """
    table = _table(ranks)
    mismatches, buffers = _compare_replicas(table, len(ranks))
    tensors, retyped, uncovered = _add_parts(table)
    weights = _weights(table.tensors)
    mismatches += retyped
    spread: list[str] = []
    if whole:
        lost, spread = _unheld(table, ranks)
        mismatches += [*_unlike_weights(table, weights, {one.name for one in retyped}), *lost]
    located = {one[:2] for one in mismatches}
    mismatches += [one for one in uncovered if one[:2] not in located]
    for name, gathered in tensors.pop(GATHERED, {}).items():
        key = MODULE if name in tensors.get(MODULE, {}) else WEIGHTS
        if tensors[key][name].value != gathered.value:
            mismatches.append(Mismatch(key, name, UNLIKE))
    holders = {name: table.ranks_of[number] for name, number in weights.items()}
    return tensors, mismatches, buffers, holders, spread


class _Table(NamedTuple):
    """The parts of all ranks, sorted: the parts of a tensor are together, and in it replicas, the digested ones first.

    Ranks 0 and 1 have the first half of A, which has 8 elements, and rank 2 the second; all of B is on ranks 0 and 2::

        part  tensor  rank  first  elements  digest  original
          0     A      0      0       4        a0       0
          1     A      1      0       4        a0       0     a replica: it must equal part 0
          2     A      2      4       4        a4       2
          3     B      0      0       3        b0       3
          4     B      2      0       3        b0       3     a replica: it must equal part 3

    A has 4 + 4 = 8 elements on all ranks, and its digest is a0 + a4: each part counts once.
    """

    tensors: list[WholeTensor]
    """Each tensor once, in any order."""
    tensor: NDArray[np.uint64]
    """Index in ``tensors``, for each part; so are the next three."""
    rank: NDArray[np.intp]
    """The rank that has it."""
    rows: NDArray[np.uint64]
    """Its row of ``RankDigest.rows``."""
    original: NDArray[np.intp]
    """Index of the first of its replicas."""
    of_tensor: list[slice]
    """The parts of each tensor."""
    ranks_of: list[list[int]]
    """The ranks that have a part of each tensor, ascending."""


def _table(ranks: Sequence[RankDigest]) -> _Table:
    numbers: dict[WholeTensor, int] = {}
    indexes: dict[int, NDArray[np.uint64]] = {}
    for own in ranks:
        if id(own.tensors) not in indexes:
            found = [numbers.setdefault(one, len(numbers)) for one in own.tensors]
            indexes[id(own.tensors)] = np.array(found, dtype=np.uint64)
    rows = np.concatenate([own.rows for own in ranks])
    tensor = np.concatenate([indexes[id(own.tensors)] for own in ranks])
    rank = np.repeat(np.arange(len(ranks)), [len(own.rows) for own in ranks])
    order = np.lexsort((rank, rows[:, 4] >> np.uint64(32), rows[:, 1], rows[:, 0], tensor))  # copies last
    rows, tensor, rank = rows[order], tensor[order], rank[order]
    new = np.ones(len(rows), dtype=bool)
    new[1:] = (tensor[1:] != tensor[:-1]) | (rows[1:, :2] != rows[:-1, :2]).any(axis=1)
    bounds = np.searchsorted(tensor, np.arange(len(numbers) + 1, dtype=np.uint64)).tolist()
    of_tensor = list(itertools.starmap(slice, itertools.pairwise(bounds)))
    return _Table(
        tensors=list(numbers),
        tensor=tensor,
        rank=rank,
        rows=rows,
        original=np.flatnonzero(new)[np.cumsum(new) - 1],
        of_tensor=of_tensor,
        ranks_of=[sorted({*rank[one].tolist()}) for one in of_tensor],
    )


def _compare_replicas(table: _Table, ranks: int) -> tuple[list[Mismatch], Apart]:
    """Compare each part with the first of its replicas: by its digest, or by its checksum if it is not digested.

    Ranks may have their own values of a buffer, such as the statistics of a batch norm: the first rank's count.

    Returns:
        Parts that differ; and the buffers that differ, or that some ranks lack.
    """
    mismatches = []
    sizes = [there.stop - there.start for there in table.of_tensor]
    odd = {n for n, (one, size) in enumerate(zip(table.tensors, sizes, strict=True)) if one.is_buffer and size < ranks}
    sums, digested, first = table.rows[:, 4], table.rows[:, 2:4], table.original
    differing = np.where(sums >= COPY, sums ^ sums[first] != COPY, (digested != digested[first]).any(axis=1))
    for index in np.flatnonzero(differing).tolist():
        number = int(table.tensor[index])
        one = table.tensors[number]
        if one.is_buffer:
            odd.add(number)
            continue
        two = sorted((int(table.rank[first[index]]), int(table.rank[index])))
        problem = f"differs between ranks {two[0]} and {two[1]}, which have the same part"
        mismatches.append(Mismatch(one.key, one.name, problem, of_values=True))
    return mismatches, _buffers(table, sorted(odd), ranks)


def _add_parts(table: _Table) -> tuple[dict[str, dict[str, TensorDigest]], list[Mismatch], list[Mismatch]]:
    """Add the digests of the parts of each tensor; replicas count once.

    Returns:
        The tensors; tensors that ranks have in another type or shape; and tensors that their parts do not cover once.
    """
    once_each = table.rows[:, 1:4] * (table.original == np.arange(len(table.rows)))[:, None]
    starts = [there.start for there in table.of_tensor]
    totals = np.add.reduceat(once_each, starts, axis=0) if starts else once_each
    tensors: dict[str, dict[str, TensorDigest]] = {}
    retyped, uncovered = [], []
    for number, (one, (covered, low, high)) in enumerate(zip(table.tensors, totals.tolist(), strict=True)):
        total = math.prod(one.shape)
        if one.name in tensors.setdefault(one.key, {}):
            both = (number, next(n for n, other in enumerate(table.tensors) if other[:2] == one[:2]))
            held = [told(TensorDigest(*table.tensors[n][2:4], 0)) + on_ranks(table.ranks_of[n]) for n in both]
            retyped.append(Mismatch(one.key, one.name, f"is {', but '.join(held)}"))
        elif covered != total:
            problem = f"has parts of {covered:,} elements on all ranks, of {total:,}"
            uncovered.append(Mismatch(one.key, one.name, problem))
        value = digests.joined(np.array([low, high], dtype=np.uint64))
        tensors[one.key].setdefault(one.name, TensorDigest(one.dtype, one.shape, value))
    return tensors, retyped, uncovered


def _weights(tensors: Sequence[WholeTensor]) -> dict[str, int]:
    """Return the index of the weights of each parameter and buffer; of the module's copy where it is alone."""
    found: dict[str, int] = {}
    for number, one in enumerate(tensors):
        if one.key in {WEIGHTS, MODULE} and (one.name not in found or tensors[found[one.name]].key != WEIGHTS):
            found[one.name] = number
    return found


def _unlike_weights(table: _Table, weights: Mapping[str, int], retyped: Collection[str]) -> list[Mismatch]:
    """Return the states of the optimizer that some ranks lack, or have other elements of, than of the weights."""
    found = []
    places = np.column_stack([table.rank.astype(np.uint64), table.rows[:, :2]])
    for number, one in enumerate(table.tensors):
        if one.key in {WEIGHTS, MODULE, GATHERED} or one.name in retyped or one.name not in weights:
            continue
        there, of_weights = table.of_tensor[number], table.of_tensor[weights[one.name]]
        lacking = sorted({*table.ranks_of[weights[one.name]]} - {*table.ranks_of[number]})
        alike = one.shape == table.tensors[weights[one.name]].shape
        if lacking and (alike or (table.rows[there, 1] == math.prod(one.shape)).all()):
            found.append(Mismatch(one.key, one.name, f"is missing{on_ranks(lacking)}"))
        elif alike and not np.array_equal(places[there], places[of_weights]):
            other = {*map(tuple, places[there].tolist())} ^ {*map(tuple, places[of_weights].tolist())}
            problem = f"has other elements than the weights{on_ranks(sorted({rank for rank, *_ in other}))}"
            found.append(Mismatch(one.key, one.name, problem))
    return found


def _unheld(table: _Table, ranks: Sequence[RankDigest]) -> tuple[list[Mismatch], list[str]]:
    """Return the weights that some ranks lack.

    Stages of a pipeline, and ranks with other experts, each have weights that others lack. A rank that only lacks some
    has lost them.

    Returns:
        Weights that ranks have lost; and the names of others.
    """
    copied = {one.name for one in table.tensors if one.key == MODULE}
    masters = {name for own in ranks if own.partitioned for name in own.group_of} - copied
    held: dict[str, set[int]] = {}
    for one, there in zip(table.tensors, table.ranks_of, strict=True):
        divided = one.is_buffer or one.name in masters or EXPERT.search(one.name) is not None
        if one.key == (MODULE if one.name in copied else WEIGHTS) and not divided:
            held.setdefault(one.name, set()).update(there)
    odd = {name: own for name, own in held.items() if len(own) < len(ranks)}
    names = [frozenset(name for name, own in odd.items() if rank in own) for rank in range(len(ranks) if odd else 0)]
    less = [(own or len(odd) < len(held)) and any(own < other for other in {*names}) for own in names]
    lost, spread = [], []
    for name, own in odd.items():
        without = [r for r in range(len(ranks)) if r not in own and name not in ranks[r].aliases]
        if gone := [r for r in without if less[r]]:
            lost.append(Mismatch(WEIGHTS, name, f"is missing{on_ranks(gone)}"))
        elif without:
            spread.append(name)
    return lost, spread


def _buffers(table: _Table, numbers: Sequence[int], ranks: int) -> Apart:
    """Return the ranks that have each value of some buffers; None for ranks that lack it."""
    result: dict[Item, dict[Fact | None, list[int]]] = {}
    for number in numbers:
        one, there = table.tensors[number], table.of_tensor[number]
        found = result.setdefault(Item(STATE, WEIGHTS, one.name), {})
        for lanes, own in zip(table.rows[there, 2:4], table.rank[there].tolist(), strict=True):
            found.setdefault(TensorDigest(one.dtype, one.shape, digests.joined(lanes)), []).append(own)
    for found in result.values():
        lacking = sorted({*range(ranks)}.difference(*found.values()))
        found |= {None: lacking} if lacking else {}
    return result
