"""Decide by retention rules which checkpoints of a root to keep, with a reason for each."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttool.arguments import check_at_least
from ckpttool.catalog.entries import OWN_ROOT
from ckpttool.errors import ArgumentError, PlanError
from ckpttool.messages import brief
from ckpttool.storage import HALF_REMOVED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.catalog.entries import CatalogEntry

REPORTED = "Ray Train's snapshot lists it"
"""Reason to keep a checkpoint of Ray Train: only Ray's rules may remove it."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision to keep or remove one checkpoint."""

    entry: CatalogEntry
    """The checkpoint."""
    keep: bool
    """Whether to keep it."""
    reason: str
    """The rules that keep it, or a note that no rule does."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Retention rules; a checkpoint stays if any rule keeps it.

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

    def __post_init__(self) -> None:
        if self.last is None and self.every is None and self.best is None:
            rules = ("keep_last", "keep_every", "keep_best")
            raise ArgumentError("keep_last", "is missing, and so is any other rule", f"give {', '.join(rules)}", rules)
        check_at_least("keep_last", self.last, 1)
        check_at_least("keep_every", self.every, 1)
        if self.best is not None:
            parse_best(self.best)


def decide(entries: Sequence[CatalogEntry], rules: Rules, *, root: str) -> list[Decision]:
    """Decide for each checkpoint whether to keep it; decisions are ordered oldest first.

    The rules count and remove only whole native ZeRO checkpoints, and remove half removed ones. They always keep the
    newest whole checkpoint, the one that ``latest`` names, those in Ray Train's snapshot, links and their targets, and
    incomplete checkpoints, because a save may still write them.

    Raises:
        PlanError: No whole checkpoint has the metric of ``rules.best``.
    """
    whole = sorted((e for e in entries if e.whole and e.stage is not None and not e.link), key=lambda e: e.order)
    linked = {entry.link: entry.name for entry in entries if entry.link}
    reasons: dict[str, list[str]] = {e.name: [] for e in whole}
    for number, entry in enumerate(reversed(whole)):
        if number == 0:
            reasons[entry.name].append("the newest whole one")
        elif rules.last is not None and number < rules.last:
            reasons[entry.name].append(f"one of the last {rules.last}")
        if entry.latest:
            reasons[entry.name].append("latest names it")
        if entry.reported:
            reasons[entry.name].append(REPORTED)
        real = os.path.realpath(entry.path)
        reasons[entry.name] += [f"{n} is a link to it" for p, n in linked.items() if f"{p}/".startswith(f"{real}/")]
        if rules.every is not None and entry.order[0] >= 0 and entry.order[0] % rules.every == 0:
            reasons[entry.name].append(f"step {entry.order[0]} is a multiple of {rules.every}")
    if rules.best is not None and whole:
        for number, (best, value) in enumerate(_best(whole, rules.best, root), 1):
            which = "the best" if number == 1 else f"number {number} of the best"
            reasons[best.name].append(f"{which}: {rules.best.partition(':')[0]} is {value:g}")
    return [_decision(entry, reasons) for entry in sorted(entries, key=lambda e: e.order)]


def _decision(entry: CatalogEntry, reasons: Mapping[str, list[str]]) -> Decision:
    if entry.name in reasons:
        why = reasons[entry.name]
        return Decision(entry, bool(why), "; ".join(why) or "no rule keeps it")
    if entry.reported:
        return Decision(entry, keep=True, reason=REPORTED)
    if entry.link:
        return Decision(entry, keep=True, reason=f"a link to {entry.link}")
    if entry.problem == HALF_REMOVED:
        return Decision(entry, keep=False, reason=HALF_REMOVED)
    if not entry.whole:
        torn = "" if (entry.problem or "").startswith(OWN_ROOT) else "torn, or being saved: "
        return Decision(entry, keep=True, reason=f"{torn}{entry.problem}")
    return Decision(entry, keep=True, reason=f"{entry.format}, not a native ZeRO checkpoint")


def _best(whole: Sequence[CatalogEntry], rule: str, root: str) -> list[tuple[CatalogEntry, float]]:
    metric, direction, count = parse_best(rule)
    sign = -1 if direction == "max" else 1
    values = [(e, e.metrics[metric]) for e in whole if math.isfinite(e.metrics.get(metric, math.nan))]
    if not values:
        known = sorted({name for e in whole for name in e.metrics})[:20]
        hint = f"these have numbers: {', '.join(known)}" if known else "save it with metrics or client_state={...}"
        raise PlanError(root, f"no checkpoint has {metric} in its metrics or client state", hint)
    values.reverse()  # among equal values the newest comes first: it was trained longest
    return sorted(values, key=lambda pair: sign * pair[1])[:count]


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
