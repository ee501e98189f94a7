"""Compare the live state of all ranks with a saved one: each item is equal, or differs, or is left out for a reason."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.digests import kind_of
from ckpttool.dtypes import itemsize
from ckpttool.errors import PlanError
from ckpttool.extensions.proof.rank_digest import MOMENTUM, OF_OTHER_FORM, UNLIKE, merge, on_ranks
from ckpttool.extensions.proof.state_digest import (
    FROZEN,
    MEMBER,
    MICRO_BATCHES,
    PYTHON,
    SCALE,
    TIE,
    TRAINED,
    TYPE,
    UNKNOWN,
    VALUE,
    StateDigest,
    items_of_state,
    leaves,
    not_read,
    once,
    other_values,
)
from ckpttool.formats import LIVE_ORDER
from ckpttool.messages import printable
from ckpttool.model import MODULE
from ckpttool.model.items import (
    NOT_COMPARED,
    OPTION,
    STATE,
    STEP,
    WEIGHTS,
    Item,
    Mismatch,
    TensorDigest,
    canonical,
    difference,
    equal_values,
    paired,
    tied_names,
)
from ckpttool.model.names import renames

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckpttool.extensions.proof.rank_digest import Merged, RankDigest
    from ckpttool.model import Checkpoint
    from ckpttool.model.items import Fact

_COUNTED = frozenset({"global_steps", "global_samples", "skipped_steps"})
"""Counters of DeepSpeed's engine, which other models do not have."""
_COPIES = frozenset({WEIGHTS, MODULE})


class Reason(Enum):
    """Why a part of a state is not compared; the page ``howto/prove`` explains each."""

    PENDING = "{names}"
    OF_RANKS = "{names}: {why}"
    NO_STATES = "the optimizer's states: {why}"
    NO_OPTIMIZER = "the optimizer's states, because no optimizer was passed"
    WITHOUT_OPTIMIZER = "the optimizer's states and hyper-parameters, which were not restored"
    OTHER_SHAPE = "{names}, whose shape is not the parameter's"
    WEIGHTS_ONLY = "all but the weights and buffers, which were left out"
    TIES = "the tie of {names}"
    NO_GROUP = "{count} parameters that need a gradient and are in no group of the optimizer, such as {first}"
    MAYBE_TRAINED = "whether {count} parameters that are frozen now were trained at the save"
    FROZEN = "the optimizer states of {count} parameters that are frozen now"
    JOINED = "the optimizer states of {count} parameters that were not trained at the save"
    OPTIONS = "hyper-parameters, which were not restored"
    BESIDE = "{tensors} saved beside the model, such as {first}"
    OF_MODEL = "{tensors} of the model, such as {first}"
    NO_TENSORS = "{names}: neither a parameter nor a buffer"
    CAST = "the types of {tensors} with equal values, such as {first}"
    ROUNDED = "the bits of {count} weights that the cast to a narrower type rounds"
    ROUNDED_STATES = "the bits of {names}, which a narrower type rounds"
    UNNAMED = "{count} master weights, which the files do not name"
    OF_SOME_RANKS = "{names} ({why})"
    OF_LATER_RANKS = "{names} of the ranks after the first, which differ from it"
    FIRST_RANKS = "{names}: ranks had values of their own at the save, and have the first rank's now"
    ZEROS = "{count} states of zeros that were not saved, such as {first}"
    SPREAD = "whether more ranks must have {count} weights, such as {first}"
    ORDER = "the order of the optimizer's parameters, which the files number"
    OBJECTS = "{names}: objects whose values cannot be compared"
    CLASSES = "{names}: an older release recorded only the classes of objects"
    STEPS = "step of {names}: an older release recorded the largest step of a group"
    SCHEDULER = "the scheduler: {why}"
    CLIENT_STATE = "the client state, such as {first}: the save recorded no digests"
    RANK_STATE = "the rank state: the save recorded no digests"
    NOT_LIVE = "{names}, which the live groups do not have"
    NOT_RECORDED = "{names}, which the checkpoint does not record"
    NOT_RESTORED = "{names}, which was not restored"
    NOT_PASSED = "{names}, which the live run does not have, or was not passed"
    COPIES_OF_TYPE = "the module's copies of {count} weights, whose type is another"
    COPIES_UNRECORDED = "the module's copies of {count} weights, whose digests were not recorded"
    COPIES_NOT_IN_FILES = "the module's copies of {count} weights, which the files do not have"
    ASKED = ""
    """The caller has left it out, or one side has no such thing; it is not named."""


class LeftOut(NamedTuple):
    """A part that is not compared."""

    reason: Reason
    name: str = ""
    """The name that is listed."""
    why: str = ""
    """More of the reason."""


def _first(*rules: tuple[Any, ...]) -> LeftOut | None:
    """Return the verdict of the first rule that holds: after its condition, the fields of ``LeftOut``, or None."""
    rule = next((one for one in rules if one[0]), (True, None))
    return None if rule[1] is None else LeftOut(*rule[1:])


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
    rounds: frozenset[str] = frozenset()
    """States ("weights", "exp_avg") that the load rounded to the type of the run."""
    casts: bool = False
    """True if the load converts types: equal values of another type are named, not refused."""


class Comparison(NamedTuple):
    """The result of a comparison, as JSON data."""

    mismatches: list[Mismatch]
    notes: list[str]
    """Parts that were not compared, as text."""
    rounded: dict[str, str]
    """The digests of live weights in a narrower type than the saved ones, which must equal them once they are cast."""
    tensors: int
    """Tensors compared."""
    states: list[str]
    """Names of the compared states and values."""


class _Part(NamedTuple):
    """One item of both sides; an item that differs between ranks is one for each of their values."""

    item: Item
    saved: Fact | None
    live: Fact | None
    ranks: Sequence[int] = ()
    """Ranks that have the live value; empty if all have it."""
    counts: bool = True
    """False if the item may differ between ranks, and the value of another rank counts."""


def compare(saved: StateDigest, ranks: Sequence[RankDigest], checkpoint: Checkpoint, scope: Scope) -> Comparison:
    """Compare a saved state with the live state of all ranks.

    Args:
        saved: The saved state.
        ranks: The digests of each rank.
        checkpoint: The checkpoint.
        scope: The restored part.

    Raises:
        PlanError: All weights have other names.
    """
    merged = merge(ranks)
    sides = _Sides(saved, merged, ranks, checkpoint, scope)
    verdicts = [(part, sides.verdict(part)) for part in sides.parts()]
    left_out = [(part, verdict) for part, verdict in verdicts if isinstance(verdict, LeftOut)]
    gathered = [one for one in merged.mismatches if one.problem == UNLIKE]
    apart = [one for one in merged.mismatches if one.problem != UNLIKE]
    told_by_ranks = {one[:2] for one in apart}
    mismatches = once(
        (part.item, verdict, other_values(part.saved, part.live))
        for part, verdict in verdicts
        if isinstance(verdict, str) and verdict and (part.item.key, part.item.owner) not in told_by_ranks
    )
    told = {one[:2] for one in mismatches}
    compared = {
        part.item: part.saved
        for part, verdict in verdicts
        if isinstance(verdict, str) or verdict.reason in {Reason.CAST, Reason.ROUNDED}
    }
    return Comparison(
        mismatches=[*apart, *sides.misshapen, *mismatches, *(one for one in gathered if one[:2] not in told)],
        notes=_notes([*sides.left_out(), *(verdict for _, verdict in left_out)]),
        rounded={part.item.name: str(part.live) for part, verdict in left_out if verdict.reason is Reason.ROUNDED},
        tensors=sum(isinstance(one, TensorDigest) for one in compared.values()),
        states=list(dict.fromkeys(_told_as(item) for item in compared if item.kind not in {MEMBER, TIE})),
    )


def _told_as(item: Item) -> str:
    """Return the name of an item in the list of the compared parts."""
    return {STATE: item.key, TYPE: item.key, OPTION: "hyper-parameters", VALUE: _kind(item.key)}[item.kind]


def _notes(found: Iterable[LeftOut]) -> list[str]:
    """Return the parts that were left out, as text by reason."""
    order = [*Reason]
    names: dict[tuple[Reason, str], dict[str, None]] = {}
    for one in found:
        if one.reason is not Reason.ASKED:
            names.setdefault((one.reason, one.why), {})[one.name] = None
    return [
        reason.value.format(
            names=", ".join(own),
            first=next(iter(own)),
            count=f"{len(own):,}",
            why=why,
            tensors=f"{len(own):,} tensor{'s' * (len(own) != 1)}",
        )
        for (reason, why), own in sorted(names.items(), key=lambda one: order.index(one[0][0]))
    ]


class _Sides:
    """A saved state and the live one, and the rules by which their items are compared.

    A rule returns why a part is left out, or how it differs as text: "" if it is equal.
    """

    def __init__(
        self, saved: StateDigest, merged: Merged, ranks: Sequence[RankDigest], checkpoint: Checkpoint, scope: Scope
    ) -> None:
        self.scope, self.checkpoint, self.merged, self.ranks = scope, checkpoint, merged, ranks
        self.recorded = checkpoint.digests is not None
        self.aliases = {alias: name for own in ranks for alias, name in own.aliases.items()}
        names = {*self.aliases, *(name for own in merged.state.tensors.values() for name in own)}
        # The names of the checkpoint are the model's already, where wrappers make them different, but not a record's.
        new = renames({name for own in saved.tensors.values() for name in own}, names)
        self.first = items_of_state(merged.state)
        self.live: dict[Item, Mapping[Fact | None, Sequence[int]]]
        self.live = {**{item: {fact: ()} for item, fact in self.first.items()}, **merged.apart}
        self.values = {item.key: None for item in self.live if item.kind == VALUE}
        of_files, self.of_files = ({}, []) if self.recorded else _of_files(self.values, checkpoint)
        self.record = replace(saved, values={**saved.values, **of_files}, aliases=checkpoint.aliases)
        self.saved = {
            item if item.kind == TIE else item._replace(name=new.get(item.name, item.name)): fact
            for item, fact in items_of_state(self.record).items()
        }
        weights = [*(item.name for item in self.saved if item[:2] == (STATE, WEIGHTS)), *checkpoint.aliases]
        if weights and not names.intersection(weights):
            path, problem = checkpoint.location, f"has weights of other names, such as {printable(weights[0])}"
            raise PlanError(path, problem, "pass its model; a state dict must have the key model, or none")
        of_both = (self.record.values, self.values)
        keys, keys_now = ({name for name in values if _kind(name) == "scheduler"} for values in of_both)
        other = "another class saved its state" if keys - keys_now and keys_now - keys else ""
        self.scheduler = next((one.why for one in self.of_files if one.reason is Reason.SCHEDULER), other)
        self.trains = any(own.trains for own in ranks)
        self.frozen = {name for own in ranks for name in own.frozen}
        self.others = sorted({name for own in ranks for name in own.others})
        self.weights_only = scope.weights_only or scope.without_optimizer or not self.trains
        self.unnamed = self._masters_without_name()
        self._name_nested_states()
        # What was the same on all ranks at the save must be so now.
        common = {item.key for item in self.saved if item.kind == OPTION} | saved.numbers.keys()
        self.unproven = {k: why for k, why in merged.unproven.items() if k not in common or self.weights_only}
        self.misshapen = [
            Mismatch(key, "", f"is not partitioned like the weights{on_ranks(ranks)}, and was at the save")
            for key, ranks in merged.other_forms.items()
            if key in saved.tensors and key != MOMENTUM and key in self.unproven and not self.weights_only
        ]
        self.shapeless = {t.rpartition(": ")[2] for t in checkpoint.nonpartitionable if not self.recorded}
        self.asked = scope.without | scope.without_names | self.unproven.keys() | self.shapeless
        self.saved_kinds, self.kinds = (set(map(_kind, values)) for values in of_both)
        then, now = tied_names(checkpoint.aliases), tied_names(self.aliases)
        self.members = {item.name for item in self.saved if item.kind == MEMBER}
        self.with_states = {item.name for item in self.saved if item.kind == STATE and not _is_weight(item)}
        self.trained = _with_tied(self.with_states | self.members, then)
        self.weights = _with_tied({item.name for item in self.saved if _is_weight(item)}, then)
        self.trained_now = _with_tied({item.name for item in self.live if item.kind == MEMBER}, now)
        self.weights_now = _with_tied({item.name for item in self.live if _is_weight(item)}, now)
        differed = frozenset(new.get(name, name) for name in saved.differing or ())
        self.may_differ = {*(merged.state.differing or ())}
        self.may_differ &= self.may_differ if saved.differing is None else differed
        values = frozenset() if scope.weights_only else self.values.keys()
        self.first_ranks = sorted((differed - self.may_differ) & {*self.weights_now, *values})

    def _masters_without_name(self) -> set[str]:
        """Take the weights in files without ZeRO for module copies where the live run has these.

        Such files may have masters that they do not name.
        """
        found = set()
        for name, one in self.record.tensors.get(WEIGHTS, {}).items() if self.checkpoint.native else ():
            master, copy = Item(STATE, WEIGHTS, name), Item(STATE, MODULE, name)
            if not self.recorded and copy in self.first and _is_rounded(self.first.get(master), one):
                self.saved.setdefault(copy, self.saved.pop(master))
                found.add(name)
        return found

    def _name_nested_states(self) -> None:
        """Name the states of the live optimizer that a distributed checkpoint has in a dict of their own."""
        live = {(i.key, i.name): i for i in self.live if i.kind == STATE and i not in self.saved}
        for name in self.checkpoint.beside if not self.recorded else ():
            whole, _, key = name.rpartition(".")
            owner = next((n for k, n in live if k == key and f".{n}." in f"{whole}."), None)
            stored = Item(STATE, WEIGHTS, name)
            if owner is not None and stored in self.saved:
                self.saved[live[key, owner]] = self.saved.pop(stored)

    def left_out(self) -> list[LeftOut]:
        """Return the parts that are left out whole."""
        found = [*self.of_files, *(LeftOut(Reason.OF_RANKS, key, why) for key, why in self.unproven.items())]
        found += [LeftOut(Reason.PENDING, own.pending) for own in self.ranks if own.pending]
        found += [LeftOut(Reason.NO_TENSORS, name) for name in self.others]
        found += [LeftOut(Reason.SPREAD, name) for name in self.merged.spread]
        found += [LeftOut(Reason.FIRST_RANKS, name) for name in self.first_ranks]
        if self.scope.weights_only:
            found.append(LeftOut(Reason.WEIGHTS_ONLY))
        if not self.weights_only:
            ungrouped = {name for own in self.ranks for name in own.ungrouped}
            found += [LeftOut(Reason.NO_GROUP, name) for name in sorted(ungrouped)]
            if not self.members:
                why = self.checkpoint.left_out or "ckpttool reads none in this checkpoint"
                found.append(LeftOut(Reason.NO_STATES, why=why))
            found += [LeftOut(Reason.OTHER_SHAPE, key) for key in sorted(self.shapeless)]
            if LIVE_ORDER in self.checkpoint.remarks:
                found.append(LeftOut(Reason.ORDER))
        return found

    def parts(self) -> Iterable[_Part]:
        """Yield all items of both sides."""
        for item, saved, found in paired(self.saved, self.live, tied_names(self.checkpoint.aliases, self.aliases)):
            live = found or {None: ()}
            first = next((own for own, ranks in live.items() if not ranks or 0 in ranks), None)
            if (item.name or item.key) not in self.may_differ:
                yield from (_Part(item, saved, own, ranks) for own, ranks in live.items())
            elif saved in live if item.name else saved == first:  # files may have a buffer of any rank
                yield from (_Part(item, saved, own, ranks, counts=own == saved) for own, ranks in live.items())
            else:
                yield _Part(item, saved, first)

    def verdict(self, part: _Part) -> LeftOut | str:
        """Return the verdict on a part."""
        kind = part.item.kind
        if kind == TIE:
            return self._tie(part)
        rule = self._value if kind == VALUE else self._weights if _is_weight(part.item) else self._of_optimizer
        return rule(part) or self._difference(part)

    def _tie(self, part: _Part) -> LeftOut | str:
        """Return what became of a tie: a load into a model without it gives both parameters the saved values."""
        name = part.item.name
        if part.live is None and part.ranks:
            return f"is a parameter of its own{on_ranks(part.ranks)}, and tied on other ranks"
        undone = part.live is None and {name, self.record.aliases.get(name, name)} <= self.weights_now
        both = {name, self.aliases.get(name, name)}  # files may have a tied parameter twice
        made = part.saved is None and both <= (self.weights if self.recorded else self.members)
        return LeftOut(Reason.TIES if undone or made else Reason.ASKED, name)

    def _value(self, part: _Part) -> LeftOut | None:
        """Return why a counter, or a value of the scheduler, the loss scale or another state, is not compared."""
        key, saved, live = part.item.key, part.saved, part.live
        kind = _kind(key)
        pending = f"the gradients of {saved} micro batches since the last step before the save"
        scheduler = self.scheduler if kind == "scheduler" else ""
        absent = live is None and kind not in self.kinds
        moved = kind == MOMENTUM and len(self.ranks) != self.checkpoint.topology.world_size
        return _first(
            (self.scope.weights_only or not (self.trains or self.values), Reason.ASKED),
            (key == MICRO_BATCHES and saved is None, Reason.ASKED),  # the live ones are named with their gradients
            (key == MICRO_BATCHES, Reason.PENDING, pending),
            (kind in self.scope.without, Reason.NOT_RESTORED, kind),
            (scheduler, Reason.SCHEDULER, "", scheduler),
            (moved, Reason.OF_RANKS, kind, OF_OTHER_FORM),
            (absent and key in _COUNTED, Reason.ASKED),
            (absent, Reason.NOT_PASSED, kind),
            # Wrappers without ZeRO have fewer numbers.
            (live is None and kind == SCALE and not part.ranks, Reason.NOT_PASSED, key),
            (saved is None and key == SCALE, None),
            (saved is None and kind == "rank_state" and not self.recorded, Reason.RANK_STATE),
            (saved is None and kind == "client_state" and not self.recorded, Reason.ASKED),
            (saved is None, Reason.NOT_RECORDED, key if kind in self.saved_kinds else kind),
            (not part.counts, Reason.OF_LATER_RANKS, key),
        )

    def _weights(self, part: _Part) -> LeftOut | None:
        """Return why a weight, a buffer or a module's copy is not compared."""
        (_, key, name), saved, live, scope = part.item, part.saved, part.live, self.scope
        ranks = f"{'missing' if live is None else 'other values'} on ranks {', '.join(map(str, part.ranks))}"
        trained = name in self.trained_now and not scope.weights_only
        may_be_rounded = key == WEIGHTS and (WEIGHTS in scope.rounds or not trained)
        return _first(
            (name in scope.without_names or name in self.others, Reason.ASKED),
            (not part.counts, Reason.OF_SOME_RANKS, name, ranks),
            (key == MODULE and live is None, Reason.ASKED),
            (key == MODULE and MODULE in scope.without, Reason.COPIES_OF_TYPE, name),
            (key == MODULE and saved is None and self.recorded, Reason.COPIES_UNRECORDED, name),
            (key == MODULE and saved is None, Reason.COPIES_NOT_IN_FILES, name),
            (saved is None, Reason.UNNAMED if name in self.unnamed else Reason.OF_MODEL, name),
            (live is None and name in self.checkpoint.beside, Reason.BESIDE, name),
            (may_be_rounded and _is_rounded(saved, live), Reason.ROUNDED, name),
        )

    def _of_optimizer(self, part: _Part) -> LeftOut | None:
        """Return why a state, a number, a hyper-parameter or the group of a parameter is not compared."""
        (kind, key, name), saved, live, scope = part.item, part.saved, part.live, self.scope
        joined = name not in self.trained and name in self.weights
        unknown = kind == MEMBER and (saved, live) == (UNKNOWN, FROZEN) and not part.ranks
        never_trained = self.with_states and name not in self.with_states
        frozen = live is None or ((live, saved) == (FROZEN, TRAINED) and not part.ranks)
        as_values = self.kinds if live is None else self.saved_kinds if saved is None else ()
        lost = live is None and not part.ranks
        surplus = self._surplus(part) if saved is None else None
        return _first(
            (scope.weights_only or (self.weights_only and not self.members), Reason.ASKED),
            (self.weights_only and scope.without_optimizer, Reason.WITHOUT_OPTIMIZER),
            (self.weights_only, Reason.NO_OPTIMIZER),
            ({key, name} & self.asked, Reason.ASKED),
            (key in scope.rounds, Reason.ROUNDED_STATES, key),
            (name in scope.without_states_of, Reason.JOINED if joined else Reason.ASKED, name),
            (kind == MEMBER and {live, saved} == {FROZEN, None}, Reason.ASKED),
            (unknown, Reason.ASKED if never_trained else Reason.MAYBE_TRAINED, name),
            (name in self.frozen and frozen, Reason.FROZEN, name),
            (kind == OPTION and {"groups", key} & scope.without, Reason.OPTIONS),
            # One side has it partitioned like the weights.
            (kind == STATE and key in as_values, Reason.OF_RANKS, key, OF_OTHER_FORM),
            (kind == TYPE and (None in {saved, live} or saved == PYTHON), Reason.ASKED),
            (saved is None, *(surplus or (None,))),
            # MEMBER names parameters in no group.
            (lost and kind == OPTION, Reason.NOT_LIVE if name in self.trained_now else Reason.ASKED, key),
            (kind == MEMBER and name not in self.weights_now, Reason.ASKED),
        )

    def _surplus(self, part: _Part) -> LeftOut | None:
        """Return why a part of the live optimizer that was not saved may be there."""
        (kind, key, name), live = part.item, part.live
        is_tensor = isinstance(live, TensorDigest)
        is_zero = not live.value if isinstance(live, TensorDigest) else live in {"0", "-0.0"}
        shapes = {
            one.shape for one in (live, self.first.get(Item(STATE, WEIGHTS, name))) if isinstance(one, TensorDigest)
        }
        zeros = Reason.ZEROS if is_zero else None  # a first step may make them
        return _first(
            (not self.members or (kind == MEMBER and (name in self.trained or name not in self.weights)), Reason.ASKED),
            (part.ranks, None),
            (kind == OPTION, Reason.NOT_RECORDED if name in self.trained else Reason.ASKED, key),
            (is_tensor and self.shapeless, Reason.NOT_RECORDED, key),  # perhaps in a state of another layout
            (is_tensor and not is_zero and len(shapes) > 1, Reason.OTHER_SHAPE, key),
            (is_tensor, zeros, f"{key} of {name}"),
            (kind == STATE and key not in self.record.numbers, Reason.NOT_RECORDED, key),
            (kind == STATE, zeros if name in self.trained else Reason.ASKED, f"{key} of {name}"),
        )

    def _difference(self, part: _Part) -> LeftOut | str:
        """Return how a part differs, or why its difference does not count."""
        item, saved, live = part.item, part.saved, part.live
        text = f"{item.key} of {item.owner}" if item.owner else item.key
        if live == saved or (item.kind == MEMBER and (saved, live) == (UNKNOWN, TRAINED)):
            return LeftOut(Reason.OBJECTS, text) if _is_object(saved) else ""
        if item.kind == OPTION and _is_object(saved):  # a number of numpy, for example
            return LeftOut(Reason.OBJECTS, text)
        if item.kind == MEMBER:
            return _of_member(part)
        casts = self.scope.casts or self.weights_only
        if casts and item.kind == TYPE:
            return LeftOut(Reason.CAST, f"{item.key} of {item.name} ({saved}, now {live})")
        tensors = (saved, live) if isinstance(saved, TensorDigest) and isinstance(live, TensorDigest) else ()
        types = [one.dtype for one in tensors]
        if casts and len({*types}) == 2 and equal_values(saved, live):
            return LeftOut(Reason.CAST, f"{item.name} ({types[0]}, now {types[1]})")
        if _kind(item.key) == MOMENTUM and _without_type(saved) == _without_type(live) != "":  # DeepSpeed's load casts
            return LeftOut(Reason.CAST, f"{text} ({saved}, now {live})")
        old = self.recorded and self.record.differing is None
        if old and item.key == STEP and saved == self._largest_step(item.name):
            return LeftOut(Reason.STEPS, item.name)
        if old and isinstance(saved, str) and isinstance(live, str) and _may_be_objects(saved, live):
            return LeftOut(Reason.CLASSES, text)
        alike = len({one[:2] for one in tensors}) == 1
        holders = () if item.kind != STATE or alike else self.merged.holders.get(item.name, ())
        return difference(saved, live, on_ranks(part.ranks or (holders if len(holders) < len(self.ranks) else ())))

    def _largest_step(self, name: str) -> str:
        """Return the largest step in the group of a parameter: release 0.1 recorded it for optimizers of DeepSpeed."""
        groups, steps = self.merged.state.group_of, self.merged.state.numbers.get(STEP, {})
        own = [steps[other] for other, group in groups.items() if group == groups.get(name) and other in steps]
        return canonical(max(own)) if own and self.checkpoint.optimizer.startswith("deepspeed.") else ""


def _without_type(fact: Fact | None) -> str:
    """Return the text of a floating-point tensor of an optimizer without its type; "" for any other value."""
    found = re.fullmatch(r"tensor (?:F32|F16|BF16) (\[.*\] [0-9a-f]{32})", fact) if isinstance(fact, str) else None
    return "" if found is None else found[1]


def _of_member(part: _Part) -> str:
    """Return how a parameter joined or left the optimizer, or was frozen."""
    on = on_ranks(part.ranks)
    if part.live == FROZEN:
        return (
            f"is frozen now{on}, {'but not on all ranks' if part.saved == UNKNOWN else 'and was trained at the save'}"
        )
    if part.live is None:
        return f"is in no group of the optimizer{on}, and was trained at the save"
    return f"is trained now{on}, and was {'frozen' if part.saved == FROZEN else 'not trained'} at the save"


def _is_weight(item: Item) -> bool:
    """Return whether an item is a weight, a buffer or a module's copy."""
    return item.kind == STATE and item.key in _COPIES


def _with_tied(names: set[str], tied: Mapping[str, Sequence[str]]) -> set[str]:
    """Return names with the other names of tied parameters."""
    return names.union(*(tied.get(name, ()) for name in names))


def _is_object(fact: Fact | None) -> bool:
    """Return whether a value in the files is an object that only its library builds."""
    return isinstance(fact, str) and fact.startswith(NOT_COMPARED)


def _is_rounded(saved: Fact | None, live: Fact | None) -> bool:
    if not isinstance(saved, TensorDigest) or not isinstance(live, TensorDigest):
        return False
    same = kind_of(saved.dtype) == kind_of(live.dtype) and saved.shape == live.shape
    return same and saved.value != live.value and itemsize(live.dtype) < itemsize(saved.dtype)


def _may_be_objects(*texts: str) -> bool:
    """Return whether texts that differ may be one value: release 0.1 wrote objects as the names of their classes.

    It wrote -0.0 as 0, and small tensors as lists.
    """
    bare = [re.sub(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", "", text) for text in texts]
    words = {word for text in bare for word in re.findall(r"[A-Za-z_]\w*", text)}
    return bool(words - {"True", "False", "None", "nan", "inf", "e", "b"}) or {*texts} == {"0", "-0.0"}


def _of_files(live: Iterable[str], checkpoint: Checkpoint) -> tuple[dict[str, str], list[LeftOut]]:
    """Return the values of a scheduler in a distributed checkpoint; and the values that no save digested.

    Such a checkpoint has the items of all objects under paths. The items that have the scheduler's keys are its state.
    """
    items = {path[1:]: text for path, text in leaves("", checkpoint.client_state, not_read).items()}
    scheduler = {name.partition(".")[2] for name in live if _kind(name) == "scheduler"}
    # Most schedulers have a count of epochs.
    key = next((key for key in scheduler if key.endswith("last_epoch")), next(iter(scheduler), ""))
    prefixes = [] if checkpoint.native else [n.removesuffix(key) for n in items if key and n.endswith(f".{key}")]
    fitting, found = [], []
    for prefix in prefixes:
        keys = {name.removeprefix(prefix) for name in items if name.startswith(prefix)}
        tensors = {key for key in scheduler if f"{prefix}{key}" in checkpoint.beside}
        fitting += [prefix] if keys <= scheduler <= keys | tensors else []
    values = {n: text for n, text in items.items() if len(fitting) == 1 and n.startswith(fitting[0])}
    if prefixes and not values:
        how = "several states have its keys" if fitting else "no state in the checkpoint has its keys"
        found.append(LeftOut(Reason.SCHEDULER, why=how))
    found += [LeftOut(Reason.CLIENT_STATE, printable(name)) for name in items if name not in values]
    return {f"scheduler.{name.removeprefix(fitting[0])}": text for name, text in values.items()}, found


def _kind(name: str) -> str:
    """Return the kind of a value: "scheduler" of "scheduler.last_epoch"."""
    return name.partition(".")[0]
