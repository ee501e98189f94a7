"""Decide by retention rules which checkpoints of a root to keep, thin or remove, with a reason for each."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpttool.arguments import check_positive, checked_duration
from ckpttool.blocks import Line, Shown, Table
from ckpttool.catalog.entries import BESIDE_WEIGHTS, UNCOMMITTED
from ckpttool.catalog.listing import by_series
from ckpttool.errors import ArgumentError, PlanError
from ckpttool.formats.layouts import named_alike
from ckpttool.messages import brief, printable
from ckpttool.registry import actions
from ckpttool.storage import HALF_REMOVED, link_into, links_below
from ckpttool.units import format_age, format_ago, format_duration, format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ckpttool.blocks import Block
    from ckpttool.catalog.actions import Action
    from ckpttool.catalog.listing import CatalogEntry

REPORTED = "Ray Train's snapshot lists it"
"""Reason to keep a checkpoint of Ray Train: only Ray's rules may remove it."""
NAMED = "latest names it"
"""Reason to keep the checkpoint to resume from; a torn one is removed if ``latest`` can name a whole one."""
GRACE = 3600.0
"""Default of ``grace``: age in seconds at which leftovers of a killed save are deleted."""
RULES = (
    "keep_last",
    "keep_every",
    "keep_best",
    "keep_for",
    *(rule for action in actions() for rule in action.rules),
    "torn",
)
"""Parameters; at least one must be given."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision to keep, thin or remove one checkpoint."""

    entry: CatalogEntry
    """The checkpoint."""
    keep: bool
    """Whether to keep it, whole or thin."""
    reason: str
    """The rules that keep it, or a note that no rule does."""
    thin: str | None = None
    """Type of the weights ("bf16", "fp32") if only the optimizer states are removed; None if nothing changes."""
    freed: int = 0
    """Removed bytes: all of a removed checkpoint. ``prune`` fills in the number for a checkpoint to thin."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Retention rules; a checkpoint is kept whole if any rule keeps it.

    Raises:
        ArgumentError: No rule is given, or one is malformed.
    """

    last: int | None = None
    """Number of newest checkpoints to keep."""
    every: int | None = None
    """Keep checkpoints whose step is a multiple of this."""
    best: str | None = None
    """Keep the checkpoint with the smallest value of this metric or number of the client state; with the suffix ":max"
    the one with the largest; with ":min:3" the three with the smallest."""
    age: float | str | None = None
    """Keep checkpoints younger than this: seconds, or a text like "7d"."""
    action: Action | None = None
    """The action on a checkpoint that no rule keeps, instead of its removal."""
    torn: bool = False
    """Remove leftovers of killed saves."""
    grace: float | str = GRACE
    """Age of the newest file of such a leftover: seconds, or a text like "1h"."""
    seconds: float | None = field(init=False)
    """``age`` in seconds."""
    grace_seconds: float = field(init=False)
    """``grace`` in seconds."""

    def __post_init__(self) -> None:
        if self._keeps_none and self.action is None and not self.torn:
            problem = "is missing, and so is any other rule"
            raise ArgumentError("keep_last", problem, f"give {', '.join(RULES)}", RULES)
        check_positive("keep_last", self.last)
        check_positive("keep_every", self.every)
        if self.best is not None:
            parse_best(self.best)
        object.__setattr__(self, "seconds", checked_duration("keep_for", self.age))
        object.__setattr__(self, "grace_seconds", checked_duration("grace", self.grace))

    @property
    def _keeps_none(self) -> bool:
        return self.last is None and self.every is None and self.best is None and self.age is None

    @property
    def only_torn(self) -> bool:
        """Whether the rules do not affect whole checkpoints."""
        return self._keeps_none and self.action is None


def decide(entries: Sequence[CatalogEntry], rules: Rules, *, root: str, now: float | None = None) -> list[Decision]:
    """Decide for each checkpoint whether to keep, thin or remove it; decisions are ordered oldest first.

    The rules hold for each model in the root. They count, thin and remove only whole saves of runs, of ZeRO or of
    torch, and remove half removed ones. They always keep the newest whole checkpoint of each model, the one that
    ``latest`` names, those in Ray Train's snapshot, the best of a trainer's run, pinned ones, links, and targets of any
    link below the root. They keep incomplete checkpoints, because a save may still write them, unless ``rules.torn`` is
    set. They keep thin checkpoints, unless ``rules.action.every`` selects some.

    Args:
        entries: The checkpoints.
        rules: The rules.
        root: Their directory.
        now: Seconds since 1970; None for the clock.

    Raises:
        PlanError: No whole checkpoint has the metric of ``rules.best``.
    """
    now = time.time() if now is None else now
    whole = [e for e in entries if e.whole and e.of_run and not e.link]
    whole.sort(key=lambda e: (e.rank, e.order))
    reasons: dict[str, list[str]] = {e.name: [] for e in whole}
    several = by_series(whole)
    for own in several:
        last = max(own, key=lambda e: e.order)
        for number, entry in enumerate(reversed(own)):
            why = reasons[entry.name]
            if number == 0:
                why.append("the newest whole one" + (" of its model" if len(several) > 1 else ""))
            elif rules.last is not None and number < rules.last:
                why.append(f"one of the last {rules.last}")
            if entry is last and number and not entry.committed:
                why.append("of the last step")  # no record that the run went back before it
            why += _standing(entry)
            why += _dated(entry, rules, now)
    if rules.best is not None and whole:
        for best, reason in _best(several, rules.best, root):
            reasons[best.name].append(reason)
    ordered = sorted(entries, key=lambda e: e.order)
    decisions = [
        _of_whole(e, reasons[e.name], rules) if e.name in reasons else _of_other(e, rules, whole, now) for e in ordered
    ]
    if all(decision.keep and decision.thin is None for decision in decisions):
        return decisions
    links = links_below(root)
    return [_for_links(decision, links, root) for decision in decisions]


def _for_links(decision: Decision, links: Sequence[tuple[str, str]], root: str) -> Decision:
    """Keep the target of a link whole: another checkpoint, or one that a user has assembled, needs it."""
    if decision.keep and decision.thin is None:
        return decision
    if (name := link_into(links, root, decision.entry.path)) is None:
        return decision
    return Decision(decision.entry, keep=True, reason=printable(f"{name} is a link to it"))


def _standing(entry: CatalogEntry) -> list[str]:
    """Return the reasons that keep a checkpoint whatever the rules are."""
    return [
        *([NAMED] if entry.latest else []),
        *([REPORTED] if entry.reported else []),
        *(["the trainer's best"] if entry.best else []),
        *([entry.resumes] if entry.resumes and not entry.latest else []),
        *([] if entry.pin is None else [printable(f"pinned by {entry.pin.who or '?'}: {entry.pin.why}", 300)]),
    ]


def _dated(entry: CatalogEntry, rules: Rules, now: float) -> list[str]:
    """Return the reasons of step and age."""
    why = []
    if rules.every is not None and entry.order[0] >= 0 and entry.order[0] % rules.every == 0:
        why.append(f"step {entry.order[0]} is a multiple of {rules.every}")
    if rules.seconds is not None and entry.saved is not None and now - entry.saved < rules.seconds:
        why.append(f"saved {format_ago(now - entry.saved)}, less than {format_duration(rules.seconds)}")
    return why


def _takes(action: Action, entry: CatalogEntry) -> bool:
    """Return whether an action takes a checkpoint that no rule keeps whole."""
    step = entry.order[0]
    return action.every is None or (step >= 0 and step % action.every == 0)


def _of_whole(entry: CatalogEntry, why: list[str], rules: Rules) -> Decision:
    if why:
        return Decision(entry, keep=True, reason="; ".join(why))
    if rules.only_torn:
        return Decision(entry, keep=True, reason="whole")
    action = rules.action
    if action is not None and _takes(action, entry):
        every = "" if action.every is None else f", and its step is a multiple of {action.every}"
        return Decision(entry, keep=True, reason=f"no rule keeps it whole{every}", thin=action.dtype)
    return Decision(entry, keep=False, reason="no rule keeps it", freed=entry.nbytes)


def _of_other(entry: CatalogEntry, rules: Rules, whole: Sequence[CatalogEntry], now: float) -> Decision:
    """Decide about a checkpoint that is torn, thin, a link, or of another format."""
    if entry.link and not entry.reported:
        return Decision(entry, keep=True, reason=f"a link to {entry.link}")
    why = _standing(entry)
    if why and not (rules.torn and entry.torn is not None and whole and why == [NAMED]):
        torn = "" if entry.whole else f"{_not_whole(entry)}; "
        return Decision(entry, keep=True, reason=torn + "; ".join(why))
    if entry.problem == HALF_REMOVED:
        return Decision(entry, keep=False, reason=HALF_REMOVED, freed=entry.nbytes)
    if not entry.whole:
        return _of_torn(entry, rules, whole, now)
    if entry.thin is None:
        return Decision(entry, keep=True, reason=f"{entry.format}, not the save of a run")
    why = _dated(entry, rules, now)
    if why or rules.action is None or _takes(rules.action, entry):
        return Decision(entry, keep=True, reason="; ".join(["thin already", *why]))
    return Decision(entry, keep=False, reason="thin, and no rule keeps it", freed=entry.nbytes)


def _not_whole(entry: CatalogEntry) -> str:
    how = "not read" if entry.is_unread else "torn, or being saved" if entry.torn is not None else "not whole"
    return f"{how}: {entry.problem}"


def _of_torn(entry: CatalogEntry, rules: Rules, whole: Sequence[CatalogEntry], now: float) -> Decision:
    """Decide about a checkpoint that is not whole; remove it only if no save seems to write it."""
    if entry.is_root:
        return Decision(entry, keep=True, reason=str(entry.problem))
    kept = _not_whole(entry)
    if not rules.torn or entry.is_unread:
        return Decision(entry, keep=True, reason=kept)
    quiet = abs(now - (entry.modified or 0.0))
    if entry.torn is None:
        return Decision(entry, keep=True, reason=f"cannot be opened, which does not prove it torn: {entry.problem}")
    if entry.torn == BESIDE_WEIGHTS:
        return Decision(
            entry,
            keep=True,
            reason=f"torn, but its weight files may be whole: remove it by hand; {entry.problem}",
        )
    if entry.being_saved:
        return Decision(entry, keep=True, reason=kept)
    if quiet < rules.grace_seconds:
        ages = f"its newest file is {format_age(quiet)} old, grace is {format_age(rules.grace_seconds)}"
        return Decision(entry, keep=True, reason=f"{kept}; {ages}")
    # A reader that does not know a file calls a whole checkpoint incomplete: a newer one shows that it knows the run's,
    # and so does any that has files of all its sorts.
    # If the model of a torn one is unknown, its name decides.
    by_name = [one for one in whole if named_alike(one.name, entry.name)]
    own = [one for one in whole if one.series == entry.series] if entry.series else by_name
    newer = all(any(one.order > entry.order for one in each) for each in by_series(own))
    known = bool(own) and (newer or any(one.sorts >= entry.sorts != frozenset() for one in own))
    if entry.torn != UNCOMMITTED and not known:
        return Decision(entry, keep=True, reason=f"torn, but no newer checkpoint is whole: {entry.problem}")
    return Decision(entry, keep=False, reason=f"torn: {entry.problem}", freed=entry.nbytes)


def _best(several: Sequence[Sequence[CatalogEntry]], rule: str, root: str) -> list[tuple[CatalogEntry, str]]:
    """Return the best checkpoints of each model, with the reason.

    Raises:
        PlanError: None has the metric.
    """
    metric, direction, count = parse_best(rule)
    sign = -1 if direction == "max" else 1
    found = []
    for own in several:
        # Among equal values the newest comes first: it was trained longest.
        values = [(e, e.metrics[metric]) for e in reversed(own) if math.isfinite(e.metrics.get(metric, math.nan))]
        for number, (entry, value) in enumerate(sorted(values, key=lambda pair: sign * pair[1])[:count], 1):
            which = "the best" if number == 1 else f"number {number} of the best"
            found.append((entry, f"{which}: {metric} is {value:g}"))
    if not found:
        whole = [entry for own in several for entry in own]
        known = sorted({name for e in whole for name in e.metrics})[:20]
        hint = f"these have numbers: {', '.join(known)}" if known else "save it with metrics or client_state={...}"
        raise PlanError(root, f"no checkpoint has {metric} in its metrics or client state", hint)
    return found


def format_best(rule: tuple[str, str, int]) -> str:
    """Return the text for ``parse_best``.

    Raises:
        ArgumentError: The rule is a text already.
    """
    if isinstance(rule, str):
        raise ArgumentError("keep_best", f"is {brief(rule)}", 'write ("METRIC", "min", 1) or ("METRIC", "max", 1)')
    return ":".join(map(str, rule))


def parse_best(rule: str) -> tuple[str, str, int]:
    """Parse METRIC[:min|max[:COUNT]].

    Raises:
        ArgumentError: The rule does not have that form.
    """
    metric, *rest = rule.split(":")
    direction, count = (rest + ["min", "1"][len(rest) :])[:2]
    if not metric or len(rest) > 2 or direction not in {"min", "max"} or not count.isdecimal() or int(count) < 1:
        hint = "write METRIC, METRIC:min or METRIC:max, and :COUNT for several"
        raise ArgumentError("keep_best", f"is {brief(rule)}, not a rule", hint)
    return metric, direction, int(count)


class Decisions(Shown, list[Decision]):
    """The decisions of a ``prune``, oldest checkpoint first; ``print`` and notebooks show a table."""

    def __init__(self, found: Iterable[Decision] = (), *, dry_run: bool = False) -> None:
        super().__init__(found)
        self.dry_run = dry_run

    def blocks(self) -> Iterator[Block]:
        """Yield one row for each checkpoint, then the freed bytes."""
        rows = [(d.entry.name, _verb(d, dry_run=self.dry_run), format_size(d.entry.nbytes), d.reason) for d in self]
        yield Table(["checkpoint", "", "size", "why"], rows, right=["size"], whole=[""], prose=["why"], rare=["size"])
        gone, thinned = (sum(map(test, self)) for test in (lambda d: not d.keep, lambda d: d.thin is not None))
        would = "would be " if self.dry_run else ""
        also = f", {thinned} {would}thinned" if thinned else ""
        freed = format_size(sum(d.freed for d in self))
        yield Line(f"{gone} of {len(self)} {would}removed{also}, {freed} freed")
        if thinned and self.dry_run:
            yield Line(
                "note: a dry run reads no tensors: a checkpoint whose values are damaged is kept whole", color="yellow"
            )


def _verb(decision: Decision, *, dry_run: bool) -> str:
    if not decision.keep:
        return "would be removed" if dry_run else "removed"
    if decision.thin is not None:
        return f"{'would be thin' if dry_run else 'thinned'}, {decision.thin}"
    return "kept"
