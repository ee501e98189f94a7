"""Listings of checkpoints as blocks of text."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ckpttool.blocks import Line, Table
from ckpttool.messages import name_some
from ckpttool.units import format_age, format_ago, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckpttool.blocks import Block
    from ckpttool.catalog.entries import Catalog, CatalogEntry
    from ckpttool.catalog.retention import Decision
    from ckpttool.commit.marks import Pin

SERIES = 5
"""Series that a listing names."""


def catalog(found: Catalog) -> Iterator[Block]:
    """Yield one row for each checkpoint, then defects of latest."""
    from ckpttool.catalog.retention import by_series  # the other commands need no catalog

    now = time.time()
    newest = "" if any(entry.latest for entry in found.entries) else _newest(found)
    rows = [
        (
            entry.name,
            _kind(entry),
            _number(entry.world_size),
            _number(entry.step),
            format_size(entry.nbytes),
            "" if entry.saved is None else format_age(now - entry.saved),
            _state(entry, newest),
        )
        for entry in found.entries
    ]
    right = ["ranks", "step", "size", "age"]
    yield Table(
        ["checkpoint", "format", "ranks", "step", "size", "age", "state"],
        rows,
        right=right,
        whole=["format"],
        prose=["state"],
        rare=["ranks", "age", "format"],
    )
    models = by_series([entry for entry in found.entries if entry.series and not entry.is_root])
    if len(models) > 1:
        names = "; ".join(name_some([entry.name for entry in own], 3) for own in models[:SERIES])
        names += f"; and {len(models) - SERIES} more" if len(models) > SERIES else ""
        yield Line(
            f"note: checkpoints of {len(models)} models or series of names; the rules of prune hold for each: {names}"
        )
    if found.unlisted:
        yield Line(f"note: not listed: {name_some(found.unlisted)}, with checkpoints of their own; pass each to ls")
    for problem in found.problems:
        yield Line(f"note: {problem}", color="yellow")


def _newest(found: Catalog) -> str:
    """Return the name of the newest whole checkpoint; "" unless there are several."""
    whole = [entry for entry in found.entries if entry.whole and entry.rank]
    return max(whole, key=lambda entry: entry.rank).name if len(whole) > 1 else ""


def _state(entry: CatalogEntry, newest: str) -> str:
    if entry.whole:
        state = "latest" if entry.latest else "newest" if entry.name == newest else "whole"
    elif entry.is_root:
        state = entry.problem or ""
    else:
        state = f"{'latest, ' if entry.latest else ''}{entry.condition}: {entry.problem}"
    if entry.pin is not None:
        state = f"{state}, {_pinned(entry.pin)}"
    return f"{state}, a link to {entry.link}" if entry.link else state


def _pinned(pin: Pin) -> str:
    when = format_ago(time.time() - pin.when)
    return f"pinned by {pin.who} {when}: {pin.why}" if pin.who else f"pinned: {pin.why}"


def _kind(entry: CatalogEntry) -> str:
    if entry.stage is not None:
        return f"ZeRO-{entry.stage}"
    if entry.thin is not None:
        return f"thin {entry.thin}"
    return entry.format or ""


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def decisions(found: Sequence[Decision], *, dry_run: bool) -> Iterator[Block]:
    """Yield one row for each checkpoint, then the freed bytes."""
    rows = [(d.entry.name, _verb(d, dry_run=dry_run), format_size(d.entry.nbytes), d.reason) for d in found]
    yield Table(["checkpoint", "", "size", "why"], rows, right=["size"], whole=[""], prose=["why"])
    gone, thinned = (sum(map(test, found)) for test in (lambda d: not d.keep, lambda d: d.thin is not None))
    would = "would be " if dry_run else ""
    also = f", {thinned} {would}thinned" if thinned else ""
    freed = format_size(sum(d.freed for d in found))
    yield Line(f"{gone} of {len(found)} {would}removed{also}, {freed} freed")
    if thinned and dry_run:
        yield Line(
            "note: a dry run reads no tensors: a checkpoint whose values are damaged is kept whole", color="yellow"
        )


def _verb(decision: Decision, *, dry_run: bool) -> str:
    if not decision.keep:
        return "would be removed" if dry_run else "removed"
    if decision.thin is not None:
        return f"{'would be thin' if dry_run else 'thinned'}, {decision.thin}"
    return "kept"
