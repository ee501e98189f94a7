"""Compare the digests of a live state with a saved one: the parts of both, and the reasons to leave out others."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ckpttool.digests import kind_of
from ckpttool.dtypes import itemsize
from ckpttool.errors import PlanError
from ckpttool.messages import printable
from ckpttool.model import MODULE
from ckpttool.model.rank_digest import merge
from ckpttool.model.state_digest import GATHERED, WEIGHTS, Mismatch, StateDigest, leaves

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpttool.model import Checkpoint
    from ckpttool.model.rank_digest import RankDigest
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
        self.own, self.problems, self.unproven, self.buffers = merge(ranks)
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
        self.all = StateDigest(
            tensors={key: self._all_names(own) for key, own in self.own.tensors.items()},
            numbers={key: self._all_names(own) for key, own in self.own.numbers.items()},
            groups=self.own.groups,
            group_of=self._all_names(self.own.group_of),
            values=self.own.values,
        )
        """The state with its tied parameters under all of their names."""
        self.names = {name for own in self.all.tensors.values() for name in own}

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
    result = Comparison(mismatches=live.problems, notes=[f"{key}: {why}" for key, why in live.unproven.items()])
    recorded = checkpoint.digests is not None
    with_values = not scope.weights_only and (live.trains or bool(live.own.values))
    weights_only = scope.weights_only or scope.without_optimizer or not live.trains
    if recorded and not weights_only:
        common = {key for options in saved.groups for key in options} | saved.numbers.keys()
        odd = sorted(common & live.unproven.keys())
        result.mismatches += [
            Mismatch(key, "", "differs between ranks, and was the same on all at the save") for key in odd
        ]
    if not weights_only and not saved.group_of:
        why = checkpoint.left_out or "ckpttool reads none in this checkpoint"
        result.notes.append(f"the optimizer's states: {why}")
    _check_names(saved, live, checkpoint)
    saved = _renamed(saved, live, checkpoint.aliases)
    whole = {text.rpartition(": ")[2] for text in checkpoint.nonpartitionable}
    if whole and not weights_only:
        result.notes.append(f"{', '.join(sorted(whole))}, whose shape is not the parameter's")
    frozen = set() if weights_only else {*saved.group_of} & live.frozen
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
        without=scope.without | live.unproven.keys() | whole,
        without_names=scope.without_names | live.others | {*beside},
        without_states_of=scope.without_states_of | frozen,
    )
    comparable = _tensors(saved, live, scope, result, native=checkpoint.native and not recorded)
    if not weights_only:
        comparable = _optimizer(comparable, saved, live, scope, result, recorded=recorded)
    if scope.without_optimizer and saved.group_of:
        result.notes.append("the optimizer's states and hyper-parameters, which were not restored")
    if with_values:
        if not recorded:
            saved = _of_files(saved, live, checkpoint, result)
        comparable = replace(comparable, values=_values(saved, live, scope, result, recorded=recorded))
    result.mismatches += comparable.mismatches(_with_buffers(live, comparable, result))
    copies = live.own.tensors.get(MODULE, {}).keys() - comparable.tensors.get(MODULE, {}).keys()
    if copies and MODULE not in scope.without:
        why = "whose digests were not recorded" if recorded else "which the files do not have"
        result.notes.append(f"the module's copies of {len(copies):,} weights, {why}")
    result.notes += _uncovered(comparable, result.rounded, live, scope)
    result.tensors = comparable.count + len(result.rounded)
    names = [*comparable.tensors, *comparable.numbers, *(["hyper-parameters"] if comparable.group_of else [])]
    names = [WEIGHTS, *names] if result.rounded and WEIGHTS not in names else names
    result.states = [*names, *dict.fromkeys(name.partition(".")[0] for name in comparable.values)]
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


def _with_buffers(live: _Live, saved: StateDigest, result: Comparison) -> StateDigest:
    """Return the live state in which a buffer that differs between ranks has the saved value, if a rank has it.

    Ranks may have their own statistics; a save keeps the statistics of one rank.
    """
    weights = saved.tensors.get(WEIGHTS, {})
    kept: dict[str, TensorDigest] = {}
    odd: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, values in live.buffers.items():
        lacking = tuple(sorted(set(range(live.ranks)) - values.keys()))
        if lacking:
            odd.setdefault(("missing on ranks", lacking), []).append(name)
        if name in weights and weights[name].value in values.values():
            kept[name] = weights[name]
            others = tuple(sorted(rank for rank, value in values.items() if value != weights[name].value))
            odd.setdefault(("other values on ranks", others), []).append(name)
    for (what, own), names in odd.items():
        if own:
            result.notes.append(f"{', '.join(sorted(names))} ({what} {', '.join(map(str, own))})")
    everything = live.all.tensors
    return replace(live.all, tensors={**everything, WEIGHTS: {**everything.get(WEIGHTS, {}), **kept}})


def _of_files(saved: StateDigest, live: _Live, checkpoint: Checkpoint, result: Comparison) -> StateDigest:
    """Return the saved state with the scheduler of a distributed checkpoint; name the values that no save digested.

    Such a checkpoint has the items of all objects under paths. Those of the scheduler are the ones that have its keys.
    """
    items = {path[1:]: text for path, text in leaves("", checkpoint.client_state).items()}
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


def _tensors(saved: StateDigest, live: _Live, scope: Scope, result: Comparison, *, native: bool) -> StateDigest:
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
    return StateDigest(tensors={key: own for key, own in tensors.items() if own})


def _is_rounded(saved: TensorDigest, live: TensorDigest) -> bool:
    same = kind_of(saved.dtype) == kind_of(live.dtype) and saved.shape == live.shape
    return same and saved.value != live.value and itemsize(live.dtype) < itemsize(saved.dtype)


def _optimizer(
    comparable: StateDigest, saved: StateDigest, live: _Live, scope: Scope, result: Comparison, *, recorded: bool
) -> StateDigest:
    """Add the optimizer's numbers, the hyper-parameters and the values; find live states that were not saved."""
    left_out = scope.without_names | scope.without_states_of
    if saved.group_of:
        for key, own in live.own.tensors.items():
            if key in {WEIGHTS, MODULE} | scope.without:
                continue
            held = saved.tensors.get(key, {})
            surplus = [name for name, one in own.items() if name not in held and name not in left_out and one.value]
            shapes = {name: live.own.tensors[WEIGHTS][name].shape for name in surplus}
            like_weights = [name for name in surplus if own[name].shape == shapes[name]]
            result.mismatches += [Mismatch(key, name, "is in the live state alone, and not 0") for name in like_weights]
            if len(like_weights) < len(surplus):
                result.notes.append(f"{key}, whose shape is not the parameter's")
    numbers = {key: own for key, own in saved.numbers.items() if key not in scope.without}
    for key in [key for key in numbers if key != "step" and not recorded and not _is_of_groups(live, key)]:
        del numbers[key]
        result.notes.append(f"{key}: files have one number for a group, the live state one for each parameter")
    lacking_numbers = sorted(live.own.numbers.keys() - saved.numbers.keys() - scope.without)
    if lacking_numbers and saved.group_of:
        result.notes.append(f"{', '.join(lacking_numbers)}, which the checkpoint does not record")
    groups = saved.group_of
    if groups and _partition(groups, live.all.group_of) != _partition(live.all.group_of, groups):
        result.notes.append("hyper-parameters, because the groups have other parameters")
        groups = {}
    elif "groups" in scope.without:
        result.notes.append("hyper-parameters, which were not restored")
        groups = {}
    result.notes += _one_sided_options(saved.groups, live.all.groups, _pairs(groups, live.all.group_of), scope)
    return replace(
        comparable,
        numbers={
            key: {name: number for name, number in own.items() if name not in left_out} for key, own in numbers.items()
        },
        groups=saved.groups,
        group_of={name: group for name, group in groups.items() if name not in left_out},
    )


def _one_sided_options(
    saved: Sequence[Mapping[str, str]], live: Sequence[Mapping[str, str]], pairs: set[tuple[int, int]], scope: Scope
) -> list[str]:
    """Return, as text, the hyper-parameters that only the saved groups, or only the live ones, have."""
    gone = {key for own, other in pairs for key in saved[own].keys() - live[other].keys()} - scope.without
    new = {key for own, other in pairs for key in live[other].keys() - saved[own].keys()}
    notes = [f"{', '.join(sorted(gone))}, which the live groups do not have"] if gone else []
    return [*notes, *([f"{', '.join(sorted(new))}, which the checkpoint does not record"] if new else [])]


def _values(saved: StateDigest, live: _Live, scope: Scope, result: Comparison, *, recorded: bool) -> dict[str, str]:
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
    return {
        name: text
        for name, text in saved.values.items()
        if _kind(name) in kinds - scope.without and (_kind(name) != "loss_scale" or name in live.own.values)
    }


def _is_of_groups(live: _Live, key: str) -> bool:
    """Return whether a number is the same for all parameters of each group."""
    own = live.own.numbers.get(key, {})
    pairs = {(live.own.group_of.get(name), number) for name, number in own.items()}
    return len(pairs) == len({group for group, _ in pairs})


def _pairs(saved: Mapping[str, int], live: Mapping[str, int]) -> set[tuple[int, int]]:
    """Return the indexes of the saved and the live group of each parameter that both have."""
    return {(group, live[name]) for name, group in saved.items() if name in live}


def _partition(groups: Mapping[str, int], others: Mapping[str, int]) -> set[frozenset[str]]:
    """Return the groups as sets of the parameters that both have."""
    found: dict[int, set[str]] = {}
    for name in groups.keys() & others.keys():
        found.setdefault(groups[name], set()).add(name)
    return set(map(frozenset, found.values()))


def _uncovered(comparable: StateDigest, rounded: Mapping[str, TensorDigest], live: _Live, scope: Scope) -> list[str]:
    """Return, as text, which live weights have no counterpart among the compared tensors."""
    held = {name for key in (WEIGHTS, MODULE) for name in comparable.tensors.get(key, ())} | rounded.keys()
    held |= {live.aliases[name] for name in held if name in live.aliases} | scope.without_names
    names = dict.fromkeys(name for key in (WEIGHTS, MODULE) for name in live.own.tensors.get(key, ()))
    lacking = [name for name in names if name not in held]
    return [f"{_tensors_of(lacking)} of the model, such as {lacking[0]}"] if lacking else []
