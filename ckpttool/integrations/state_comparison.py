"""Compare the digests of a live state with a saved one: the parts of both, and the reasons to leave out others."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ckpttool.analysis.digest import not_read
from ckpttool.digests import kind_of
from ckpttool.dtypes import itemsize
from ckpttool.errors import PlanError
from ckpttool.messages import printable
from ckpttool.model import MODULE
from ckpttool.model.rank_digest import contradictions, merge, of_group, on_ranks
from ckpttool.model.state_digest import (
    GATHERED,
    NOT_COMPARED,
    WEIGHTS,
    Mismatch,
    StateDigest,
    canonical,
    leaves,
    short,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set

    from ckpttool.model import Checkpoint
    from ckpttool.model.rank_digest import Item, RankDigest
    from ckpttool.model.state_digest import TensorDigest

T = TypeVar("T")
_COUNTED = frozenset({"global_steps", "global_samples", "skipped_steps"})
"""Counters of DeepSpeed's engine, which other models do not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The part of a state that was restored."""

    weights_only: bool = False
    """True if only weights and buffers were restored."""
    without_optimizer: bool = False
    """True if all but the optimizer's states and hyper-parameters was restored."""
    without: frozenset[str] = frozenset()
    """States and kinds of values that were not: "scheduler", "loss_scale", "groups", "module"."""
    without_names: frozenset[str] = frozenset()
    """Parameters and buffers that were not."""
    without_states_of: frozenset[str] = frozenset()
    """Parameters whose optimizer states were not."""
    casts: bool = False
    """True if the load converts types: equal values of another type are named, not refused."""


@dataclass(slots=True, kw_only=True)
class Comparison:
    """The result of a comparison."""

    mismatches: list[Mismatch] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Parts that were not compared, as text."""
    rounded: dict[str, TensorDigest] = field(default_factory=dict)
    """Live weights in a narrower type than the saved ones, which must equal these once they are cast."""
    tensors: int = 0
    """Tensors compared."""
    states: list[str] = field(default_factory=list)
    """Names of the compared states and values."""


class _Live:
    """The live state of all ranks.

    Args:
        ranks: The digests of each rank.
    """

    def __init__(self, ranks: Sequence[RankDigest]) -> None:
        self.own, problems, self.apart, self.unproven, self.buffers = merge(ranks)
        self.problems = [*problems]
        self.ranks = len(ranks)
        for name, gathered in self.own.tensors.get(GATHERED, {}).items():
            key = MODULE if name in self.own.tensors.get(MODULE, {}) else WEIGHTS
            if self.own.tensors[key][name].value != gathered.value:
                self.problems.append(Mismatch(key, name, "is not the same gathered and partitioned"))
        self.own = replace(self.own, tensors={k: own for k, own in self.own.tensors.items() if k != GATHERED})
        self.aliases = {alias: name for own in ranks for alias, name in own.aliases.items()}
        self.others = {name for own in ranks for name in own.others}
        self.frozen = {name for own in ranks for name in own.frozen}
        self.trains = any(own.trains for own in ranks)
        self.pending = [*dict.fromkeys(own.pending for own in ranks if own.pending)]
        self.all = StateDigest(
            tensors={key: self._all_names(own) for key, own in self.own.tensors.items()},
            numbers={key: self._all_names(own) for key, own in self.own.numbers.items()},
            groups=self.own.groups,
            group_of=self._all_names(self.own.group_of),
            values=self.own.values,
        )
        """The state with its tied parameters under all of their names."""
        self.names = {name for own in self.all.tensors.values() for name in own}

    def first_name(self, item: Item) -> Item:
        """Return an item with the first name of a tied parameter."""
        key, name = item
        start, _, bare = name.rpartition(" ")
        return key, f"{start} {self.aliases.get(bare, bare)}".strip()

    def _all_names(self, own: Mapping[str, Any]) -> dict[str, Any]:
        return {**own, **{alias: own[name] for alias, name in self.aliases.items() if name in own}}


def compare(saved: StateDigest, ranks: Sequence[RankDigest], checkpoint: Checkpoint, scope: Scope) -> Comparison:
    """Compare a saved state with the live state of all ranks.

    Args:
        saved: The saved state.
        ranks: The digests of each rank.
        checkpoint: The checkpoint.
        scope: The restored part.
    """
    live = _Live(ranks)
    recorded = checkpoint.digests is not None
    with_values = not scope.weights_only and (live.trains or bool(live.own.values))
    weights_only = scope.weights_only or scope.without_optimizer or not live.trains
    # What was the same on all ranks at the save must be so now.
    common = {key for options in saved.groups for key in options} | saved.numbers.keys()
    unproven = {key: why for key, why in live.unproven.items() if key not in common or weights_only}
    result = Comparison(mismatches=live.problems, notes=[f"{key}: {why}" for key, why in unproven.items()])
    result.notes += live.pending
    if not weights_only and not saved.group_of:
        why = checkpoint.left_out or "ckpttool reads none in this checkpoint"
        result.notes.append(f"the optimizer's states: {why}")
    _check_names(saved, live, checkpoint)
    saved = _renamed(saved, live, checkpoint.aliases)
    whole = {text.rpartition(": ")[2] for text in checkpoint.nonpartitionable}
    if whole and not weights_only:
        result.notes.append(f"{', '.join(sorted(whole))}, whose shape is not the parameter's")
    stated = {name for key, own in saved.tensors.items() if key not in {WEIGHTS, MODULE} for name in own}
    stated |= {name for own in saved.numbers.values() for name in own}
    frozen = set() if weights_only else stated & live.frozen
    if frozen:
        result.notes.append(f"the optimizer states of {len(frozen):,} parameters that are frozen now")
    beside = [n for n in saved.tensors.get(WEIGHTS, {}) if n in checkpoint.beside and n not in live.names]
    if beside:
        result.notes.append(f"{_tensors_of(beside)} saved beside the model, such as {beside[0]}")
    if not live.trains and not scope.weights_only and saved.group_of:
        result.notes.append("the optimizer's states, because no optimizer was passed")
    if live.others:
        result.notes.append(f"{', '.join(sorted(live.others))}: neither a parameter nor a buffer")
    scope = replace(
        scope,
        weights_only=weights_only,
        without=scope.without | unproven.keys() | whole,
        without_names=scope.without_names | live.others | {*beside},
        without_states_of=scope.without_states_of | frozen,
        casts=scope.casts or weights_only,
    )
    tensors = _tensors(saved, live, scope, result, native=checkpoint.native and not recorded)
    facts: dict[Item, str] = {}
    if not weights_only:
        facts = _optimizer(saved, live, scope, result)
    if scope.without_optimizer and saved.group_of:
        result.notes.append("the optimizer's states and hyper-parameters, which were not restored")
    values: dict[str, str] = {}
    may_differ = {*(live.own.differing or ())}
    may_differ &= may_differ if saved.differing is None else saved.differing
    if with_values:
        if not recorded:
            saved = _of_files(saved, live, checkpoint, result)
        values = _values(saved, live, scope, result, may_differ, recorded=recorded)
    _compare_tensors(tensors, _with_buffers(live, saved, tensors, result), scope, result)
    compared = {key for key, _ in facts} | scope.without | live.unproven.keys()
    of_live = _facts_of(live, facts) | {(name, ""): text for name, text in live.own.values.items()}
    facts |= {(name, ""): text for name, text in values.items()}
    old = recorded and saved.differing is None
    apart = {
        item: found
        for item, found in live.apart.items()
        if (item in facts and item[0] not in may_differ) or (item[1] and not weights_only and item[0] not in compared)
    }
    _compare_facts(facts, of_live, live, apart, result, old=old)
    copies = live.own.tensors.get(MODULE, {}).keys() - tensors.get(MODULE, {}).keys()
    if copies and MODULE in scope.without:
        result.notes.append(f"the module's copies of {len(copies):,} weights, whose type is another")
    elif copies:
        why = "whose digests were not recorded" if recorded else "which the files do not have"
        result.notes.append(f"the module's copies of {len(copies):,} weights, {why}")
    result.notes += _uncovered(tensors, result.rounded, live, scope)
    result.tensors = sum(map(len, tensors.values())) + len(result.rounded)
    names = [*dict.fromkeys((*tensors, *(key for key, name in facts if key in saved.numbers and name)))]
    names += ["hyper-parameters"] if any(name.startswith(of_group("")) for _, name in facts) else []
    names = [WEIGHTS, *names] if result.rounded and WEIGHTS not in names else names
    result.states = [*names, *dict.fromkeys(_kind(name) for name in values)]
    return result


def _check_names(saved: StateDigest, live: _Live, checkpoint: Checkpoint) -> None:
    """Check that a checkpoint has any weight of the live model.

    Raises:
        PlanError: All have other names.
    """
    names = [*saved.tensors.get(WEIGHTS, {}), *checkpoint.aliases]
    if names and not live.names.intersection(names):
        problem = f"has weights of other names, such as {printable(names[0])}"
        raise PlanError(checkpoint.location, problem, "pass its model; a state dict must have the key model, or none")


def _with_buffers(
    live: _Live, saved: StateDigest, tensors: Mapping[str, Mapping[str, TensorDigest]], result: Comparison
) -> Mapping[str, Mapping[str, TensorDigest]]:
    """Return the live tensors, in which a buffer that may differ between ranks has the saved value if a rank has it.

    Ranks may have their own statistics, and a save keeps the first rank's. A buffer that was the same on all ranks
    at the save must be so now.
    """
    weights = tensors.get(WEIGHTS, {})
    kept: dict[str, TensorDigest] = {}
    odd: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, values in live.buffers.items():
        lacking = tuple(sorted(set(range(live.ranks)) - values.keys()))
        if name not in weights:
            continue
        others = tuple(sorted(rank for rank, value in values.items() if value != weights[name].value))
        if saved.differing is not None and name not in saved.differing:
            told = ((f"is missing{on_ranks(lacking)}", lacking), (f"{OTHER_VALUES}{on_ranks(others)}", others))
            result.mismatches += [Mismatch(WEIGHTS, name, problem) for problem, ranks in told if ranks]
            kept[name] = weights[name]
            continue
        odd.setdefault(("missing on ranks", lacking), []).append(name)
        if len(others) < len(values):
            kept[name] = weights[name]
            odd.setdefault(("other values on ranks", others), []).append(name)
    for (what, own), names in odd.items():
        if own:
            result.notes.append(f"{', '.join(sorted(names))} ({what} {', '.join(map(str, own))})")
    return {**live.all.tensors, WEIGHTS: {**live.all.tensors.get(WEIGHTS, {}), **kept}}


OTHER_VALUES = "has other values than were saved"
"""Begins the problem of a tensor whose values differ."""


def _compare_tensors(
    saved: Mapping[str, Mapping[str, TensorDigest]],
    live: Mapping[str, Mapping[str, TensorDigest]],
    scope: Scope,
    result: Comparison,
) -> None:
    """Compare the type, the shape and the digest of every saved tensor."""
    cast: list[str] = []
    told = {(one.key, one.name) for one in result.mismatches}  # contradictions of the ranks, with their numbers
    for key, tensors in saved.items():
        there = live.get(key, {})
        for name, one in tensors.items():
            problem = tensor_problem(one, there.get(name))
            if problem == OTHER_TYPE and scope.casts:
                cast.append(f"{name} ({one.dtype}, now {there[name].dtype})")
            elif problem and (key, name) not in told:
                types = f": it is {there[name].dtype}, and was {one.dtype}" if problem == OTHER_TYPE else ""
                result.mismatches.append(Mismatch(key, name, f"{problem}{types}"))
    if cast:
        result.notes.append(f"the types of {_tensors_of(cast)} with equal values, such as {cast[0]}")


OTHER_TYPE = "has another type than was saved, with equal values"
"""The problem of a tensor whose values are equal."""


def tensor_problem(saved: TensorDigest, live: TensorDigest | None) -> str:
    """Return how a live tensor differs from the saved one; "" if it does not."""
    if live is None:
        return "is missing"
    same = saved.shape == live.shape or {saved.shape, live.shape} == {(), (1,)}  # universal: no 0-dim tensors
    if kind_of(saved.dtype) != kind_of(live.dtype) or not same:
        return f"is {live.dtype} {list(live.shape)}, but was saved as {saved.dtype} {list(saved.shape)}"
    if saved.value != live.value:
        return OTHER_VALUES + (f": it is {live.dtype}, and was {saved.dtype}" if saved.dtype != live.dtype else "")
    return OTHER_TYPE if saved.dtype != live.dtype else ""


def _facts_of(live: _Live, facts: Iterable[Item]) -> dict[Item, str]:
    """Return the live numbers and hyper-parameters of some items."""
    result = {}
    for key, name in facts:
        parameter = name.removeprefix(of_group(""))
        if parameter != name:
            group = live.all.group_of.get(parameter)
            text = None if group is None else live.all.groups[group].get(key)
        else:
            number = live.all.numbers.get(key, {}).get(name)
            text = None if number is None else canonical(number)
        if text is not None:
            result[key, name] = text
    return result


def _compare_facts(
    saved: Mapping[Item, str],
    of_live: Mapping[Item, str],
    live: _Live,
    apart: Mapping[Item, Mapping[str | None, Sequence[int]]],
    result: Comparison,
    *,
    old: bool,
) -> None:
    """Compare numbers, hyper-parameters and values: on each rank, if the ranks differ."""
    unknown: dict[str, None] = {}
    older: dict[str, None] = {}
    for item, text in saved.items():
        found = apart.get(live.first_name(item), {of_live.get(item): ()})
        for own, ranks in found.items():
            if own == text:
                unknown |= {_owned(item): None} if text.startswith(NOT_COMPARED) else {}
            elif old and own is not None and _may_be_objects(own, text):
                older[_owned(item)] = None
            else:
                on = on_ranks(ranks) if ranks else ""
                is_now = f"is missing{on}" if own is None else f"is {short(own)}{on}"
                result.mismatches.append(Mismatch(*item, f"{is_now}, but was saved as {short(text)}"))
    compared = {live.first_name(item) for item in saved}
    result.mismatches += contradictions({item: found for item, found in apart.items() if item not in compared})
    if unknown:
        result.notes.append(f"{', '.join(unknown)}: objects whose values cannot be compared")
    if older:
        result.notes.append(f"{', '.join(older)}: an older release recorded only the classes of objects")


def _owned(item: Item) -> str:
    return f"{item[0]} of {item[1]}" if item[1] else item[0]


def _may_be_objects(*texts: str) -> bool:
    """Return whether texts that differ may be one value: release 0.1 wrote objects as the names of their classes.

    It wrote -0.0 as 0, and small tensors as lists.
    """
    bare = [re.sub(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", "", text) for text in texts]
    words = {word for text in bare for word in re.findall(r"[A-Za-z_]\w*", text)}
    return bool(words - {"True", "False", "None", "nan", "inf", "e", "b"}) or {*texts} == {"0", "-0.0"}


def _of_files(saved: StateDigest, live: _Live, checkpoint: Checkpoint, result: Comparison) -> StateDigest:
    """Return the saved state with the scheduler of a distributed checkpoint; name the values that no save digested.

    Such a checkpoint has the items of all objects under paths. Those of the scheduler are the ones that have its keys.
    """
    items = {path[1:]: text for path, text in leaves("", checkpoint.client_state, not_read).items()}
    scheduler = [name.partition(".")[2] for name in live.own.values if _kind(name) == "scheduler"]
    prefixes = [] if checkpoint.native else _prefixes(scheduler, items)
    fitting = []
    for prefix in prefixes:
        keys = {name.removeprefix(prefix) for name in items if name.startswith(prefix)}
        tensors = {key for key in scheduler if f"{prefix}{key}" in checkpoint.beside}
        if keys <= {*scheduler} <= keys | tensors:
            fitting.append(prefix)
    if len(fitting) == 1:
        (prefix,) = fitting
        own = {name: text for name, text in items.items() if name.startswith(prefix)}
        items = {name: text for name, text in items.items() if name not in own}
        found = {f"scheduler.{name.removeprefix(prefix)}": text for name, text in own.items()}
        saved = replace(saved, values={**saved.values, **found})
    elif prefixes:
        how = "several states have its keys" if fitting else "no state in the checkpoint has its keys"
        result.notes.append(f"the scheduler: {how}")
    if items:
        name = printable(next(iter(items)))
        result.notes.append(f"the client state, such as {name}: the save recorded no digests")
    if any(_kind(name) == "rank_state" for name in live.own.values):
        result.notes.append("the rank state: the save recorded no digests")
    return saved


def _prefixes(keys: Sequence[str], items: Iterable[str]) -> list[str]:
    """Return the paths under which an item has one of the keys: the count of epochs, which most schedulers have."""
    key = next((key for key in keys if key.endswith("last_epoch")), next(iter(keys), ""))
    return [name.removesuffix(key) for name in items if key and name.endswith(f".{key}")]


def _tensors_of(names: Sequence[str]) -> str:
    return f"{len(names):,} tensor{'s' * (len(names) != 1)}"


def _kind(name: str) -> str:
    """Return the kind of a value: "scheduler" of "scheduler.last_epoch"."""
    return name.partition(".")[0]


def _renamed(saved: StateDigest, live: _Live, aliases: Mapping[str, str]) -> StateDigest:
    """Return a saved state under the names of the live one.

    Formats save a tied tensor under one of its names, or under several. Where the live names are not tied, each is
    compared.
    """
    tied: dict[str, set[str]] = {}
    for alias, name in aliases.items():
        tied.setdefault(name, {name}).add(alias)
    sets = {one: sorted(names) for names in tied.values() for one in names}

    def renamed(own: Mapping[str, T], everything: Iterable[str], apart: Iterable[str]) -> dict[str, T]:
        result: dict[str, T] = {}
        for name, one in own.items():
            names = sets.get(name, [name])
            first = name if name in everything else next((n for n in names if n in everything), name)
            result |= {n: one for n in names if n in apart and n not in own} | {first: one}
        return result

    def all_of(kind: str, found: Mapping[str, Mapping[str, T]]) -> dict[str, dict[str, T]]:
        full, bare = getattr(live.all, kind), getattr(live.own, kind)
        return {key: renamed(own, full.get(key, live.names), bare.get(key, ())) for key, own in found.items()}

    return replace(
        saved,
        tensors=all_of("tensors", saved.tensors),
        numbers=all_of("numbers", saved.numbers),
        group_of=renamed(saved.group_of, live.all.group_of, ()),
    )


def _tensors(
    saved: StateDigest, live: _Live, scope: Scope, result: Comparison, *, native: bool
) -> dict[str, dict[str, TensorDigest]]:
    """Return the saved tensors that are compared; sort out live weights in a narrower type."""
    keys = {WEIGHTS, MODULE} if scope.weights_only else {*saved.tensors}
    keys -= scope.without if MODULE in live.own.tensors else scope.without | {MODULE}
    tensors = {
        key: {
            name: one
            for name, one in own.items()
            if name not in scope.without_names and (key in {WEIGHTS, MODULE} or name not in scope.without_states_of)
        }
        for key, own in saved.tensors.items()
        if key in keys
    }
    copies, weights = tensors.setdefault(MODULE, {}), tensors.setdefault(WEIGHTS, {})
    there, copies_there = live.all.tensors.get(WEIGHTS, {}), live.all.tensors.get(MODULE, {})
    tensors[MODULE] = copies = {name: one for name, one in copies.items() if name in copies_there}
    for name in [name for name in weights if name in there and _is_rounded(weights[name], there[name])]:
        if scope.weights_only or name not in live.all.group_of:
            del weights[name]
            result.rounded[name] = there[name]
    # Without ZeRO, files may have masters that they do not name, beside the module's copies of a name.
    unnamed = [n for n in weights if native and n in there and _is_rounded(there[n], weights[n]) and n in copies_there]
    for name in unnamed:
        copies.setdefault(name, weights.pop(name))
    if unnamed:
        result.notes.append(f"{len(unnamed):,} master weights, which the files do not name")
    if result.rounded:
        result.notes.append(f"the bits of {len(result.rounded):,} weights that the cast to a narrower type rounds")
    return {key: own for key, own in tensors.items() if own}


def _is_rounded(saved: TensorDigest, live: TensorDigest) -> bool:
    same = kind_of(saved.dtype) == kind_of(live.dtype) and saved.shape == live.shape
    return same and saved.value != live.value and itemsize(live.dtype) < itemsize(saved.dtype)


def _optimizer(saved: StateDigest, live: _Live, scope: Scope, result: Comparison) -> dict[Item, str]:
    """Return the saved numbers and hyper-parameters that are compared; find live states that were not saved."""
    left_out = scope.without_names | scope.without_states_of
    if saved.group_of:
        result.mismatches += _surplus(saved, live, scope, left_out, result)
        result.mismatches += _regrouped(saved, live, scope, left_out, result)
    numbers = {
        (key, name): canonical(number)
        for key, own in saved.numbers.items()
        if key not in scope.without
        for name, number in own.items()
        if name not in left_out
    }
    lacking_numbers = sorted(live.own.numbers.keys() - saved.numbers.keys() - scope.without)
    if lacking_numbers and saved.group_of:
        result.notes.append(f"{', '.join(lacking_numbers)}, which the checkpoint does not record")
    groups = {name: group for name, group in saved.group_of.items() if name not in left_out}
    if "groups" in scope.without and groups:
        result.notes.append("hyper-parameters, which were not restored")
        groups = {}
    apart: dict[str, dict[str, Any]] = {}
    for (key, owner), found in live.apart.items():
        apart.setdefault(owner, {})[key] = found
    firsts: dict[tuple[int, int, str], str] = {}
    for name, group in groups.items():
        if name in live.all.group_of:  # once for all parameters that have the same on all ranks
            odd = apart.get(of_group(live.aliases.get(name, name)), {})
            firsts.setdefault((group, live.all.group_of[name], repr(odd) if odd else ""), name)
    pairs = {(group, other) for group, other, _ in firsts}
    result.notes += _one_sided_options(saved.groups, live.all.groups, pairs, scope)
    options = {
        (key, of_group(name)): text
        for (group, other, odd), name in firsts.items()
        for key, text in saved.groups[group].items()
        if key not in scope.without and (odd or key in live.all.groups[other])
    }
    return numbers | options


def _surplus(
    saved: StateDigest, live: _Live, scope: Scope, left_out: Collection[str], result: Comparison
) -> Iterator[Mismatch]:
    """Yield the live states and numbers of parameters that were trained without them, unless they are 0."""
    for key, own in live.own.tensors.items():
        if key in {WEIGHTS, MODULE} | scope.without:
            continue
        held = saved.tensors.get(key, {})
        surplus = [name for name, one in own.items() if name not in held and name not in left_out and one.value]
        shapes = {name: live.own.tensors[WEIGHTS][name].shape for name in surplus}
        like_weights = [name for name in surplus if own[name].shape == shapes[name]]
        yield from (Mismatch(key, name, "is in the live state alone, and not 0") for name in like_weights)
        if len(like_weights) < len(surplus):
            result.notes.append(f"{key}, whose shape is not the parameter's")
    for key, numbers in live.own.numbers.items():
        held_numbers = {live.aliases.get(name, name) for name in saved.numbers.get(key, ())}
        for name, number in numbers.items() if held_numbers and key not in scope.without else ():
            if name not in held_numbers and name in saved.group_of and name not in left_out and number:
                yield Mismatch(key, name, f"is {short(canonical(number))}, and was not saved")


def _regrouped(
    saved: StateDigest, live: _Live, scope: Scope, left_out: Collection[str], result: Comparison
) -> Iterator[Mismatch]:
    """Yield the parameters that joined or left the optimizer since the save."""
    trained = {name for key, own in saved.tensors.items() if key not in {WEIGHTS, MODULE} for name in own}
    trained |= saved.group_of.keys()
    trained |= {live.aliases.get(name, name) for name in trained}
    new = [n for n in live.own.group_of if n not in trained and n in saved.tensors.get(WEIGHTS, {})]
    told = [name for name in new if name in scope.without_states_of]
    if told:
        result.notes.append(f"the optimizer states of {len(told):,} parameters that were not trained at the save")
    yield from (Mismatch(WEIGHTS, n, "is trained now, and was frozen at the save") for n in new if n not in left_out)
    gone = [n for n in saved.group_of if n not in left_out and n in live.names and n not in live.all.group_of]
    yield from (Mismatch(WEIGHTS, n, "is in no group of the optimizer, and was trained at the save") for n in gone)


def _one_sided_options(
    saved: Sequence[Mapping[str, str]], live: Sequence[Mapping[str, str]], pairs: set[tuple[int, int]], scope: Scope
) -> list[str]:
    """Return, as text, the hyper-parameters that only the saved groups, or only the live ones, have."""
    gone = {key for own, other in pairs for key in saved[own].keys() - live[other].keys()} - scope.without
    new = {key for own, other in pairs for key in live[other].keys() - saved[own].keys()}
    notes = [f"{', '.join(sorted(gone))}, which the live groups do not have"] if gone else []
    return [*notes, *([f"{', '.join(sorted(new))}, which the checkpoint does not record"] if new else [])]


def _values(
    saved: StateDigest,
    live: _Live,
    scope: Scope,
    result: Comparison,
    may_differ: Set[str],
    *,
    recorded: bool,
) -> dict[str, str]:
    """Return the saved values that are compared: counters, scheduler, loss scale, client state and rank state.

    Wrappers without ZeRO have fewer numbers of a loss scaler than files.
    """
    kinds, saved_kinds = set(map(_kind, live.own.values)), set(map(_kind, saved.values))
    told = set() if recorded else {"client_state", "rank_state"}
    if any(note.startswith("the scheduler: ") for note in result.notes):
        told |= {"scheduler"}
    surplus = [name for name in live.own.values if name not in saved.values and _kind(name) not in told]
    kept = sorted(scope.without & (kinds | saved_kinds))
    result.notes += [f"{', '.join(kept)}, which was not restored"] if kept else []
    own, held = ({n for n in values if _kind(n) == "scheduler"} for values in (saved.values, live.own.values))
    if held and own - held and held - own:
        result.notes.append("the scheduler: another class saved its state")
        kinds, saved_kinds = kinds - {"scheduler"}, saved_kinds - {"scheduler"}
        surplus = [name for name in surplus if name not in held]
    lacking = sorted(saved_kinds - kinds - scope.without - _COUNTED)
    if lacking:
        result.notes.append(f"{', '.join(lacking)}, which the live run does not have, or was not passed")
    surplus = [_kind(name) if _kind(name) not in saved_kinds else name for name in surplus]
    surplus = [name for name in dict.fromkeys(surplus) if _kind(name) not in scope.without]
    if surplus:
        result.notes.append(f"{', '.join(surplus)}, which the checkpoint does not record")
    others = sorted(may_differ & live.own.values.keys())
    if others:
        result.notes.append(f"{', '.join(others)} of the ranks after the first, which differ from it")
    return {
        name: text
        for name, text in saved.values.items()
        if _kind(name) in kinds - scope.without and (_kind(name) != "loss_scale" or name in live.own.values)
    }


def _uncovered(
    tensors: Mapping[str, Mapping[str, TensorDigest]], rounded: Mapping[str, TensorDigest], live: _Live, scope: Scope
) -> list[str]:
    """Return, as text, which live weights have no counterpart among the compared tensors."""
    held = {name for key in (WEIGHTS, MODULE) for name in tensors.get(key, ())} | rounded.keys()
    held |= {live.aliases[name] for name in held if name in live.aliases} | scope.without_names
    names = dict.fromkeys(name for key in (WEIGHTS, MODULE) for name in live.own.tensors.get(key, ()))
    lacking = [name for name in names if name not in held]
    return [f"{_tensors_of(lacking)} of the model, such as {lacking[0]}"] if lacking else []
