"""The checkpoints under a root as data, and as blocks of text."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpttool.blocks import Line, Shown, Table
from ckpttool.formats.layouts import OWN_OF_RAY, step_in
from ckpttool.formats.scan import last_number, natural_order
from ckpttool.messages import name_some
from ckpttool.units import format_age, format_ago, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckpttool.blocks import Block
    from ckpttool.commit.marks import Pin


SKIPPED = "skipped by a restore, because it could not be restored: "
"""Start of the problem of a checkpoint with the mark of a save."""
OWN_ROOT = "is a root of its own"
"""Start of the problem of a directory that contains checkpoints but is not one itself."""
NOT_FOLLOWED = "leaves the root: follow_links is not set"
"""End of the problem of a checkpoint that is not read, because a link leads out of the root."""
UNREADABLE = "cannot be read: "
"""Start of the problem of a checkpoint with a file that could not be read."""
SERIES = 5
"""Series that a listing names."""


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One checkpoint under a root."""

    name: str
    """Directory relative to the root: the tag, or a trainer's "checkpoint-500"."""
    path: str
    """Path or URL of the directory."""
    format: str | None
    """``Checkpoint.format``; None if unknown."""
    stage: int | None
    """ZeRO stage."""
    world_size: int | None
    """Number of ranks of the saved run."""
    step: int | None
    """Steps of the engine."""
    nbytes: int
    """Size of all files below the directory in bytes; 0 for a link."""
    modified: float | None
    """Modification time of the newest file in seconds since 1970."""
    whole: bool
    """Whether the files of all ranks exist and agree."""
    problem: str | None
    """Problem of a checkpoint that is not whole."""
    latest: bool
    """Whether ``latest`` names it."""
    link: str | None
    """The target of a symbolic link; None for a directory."""
    metrics: Mapping[str, float]
    """Metrics of the manifest, and numbers of the client state by dotted key."""
    reported: bool = False
    """Whether Ray Train's snapshot of the run lists it. Only Ray's rules may remove it: the run cannot restart without
    it."""
    saved: float | None = None
    """Time of the save in seconds since 1970: of the manifest, or else ``modified``."""
    thin: str | None = None
    """Type of the weights ("bf16", "fp32") of a thin checkpoint: ``prune`` has removed its optimizer states."""
    pin: Pin | None = None
    """The pin that keeps it from being removed or thinned."""
    torn: str | None = None
    """"uncommitted": its save has an in-progress marker and no manifest; "incomplete": files are missing or cut off;
    "incomplete, beside weights": one of the two, but the directory also contains weight files, which may be whole. None
    if the checkpoint is whole, or cannot be read for another reason."""
    being_saved: bool = False
    """Whether the process that saves it still runs on this machine."""
    state: str = ""
    """Changes when any file below the directory is written or removed."""
    rank: int = 0
    """Place in the order of the saves, from the oldest: a run that went back to an old step abandons later ones."""
    series: str = ""
    """Differs between checkpoints of different models, of the models of one save, and between a tag and the folder of a
    trainer; "" if it is unknown."""
    sorts: frozenset[str] = field(default=frozenset(), metadata={"json": False})
    """The names of its files, with "#" for each number."""
    committed: bool = False
    """Whether it has a manifest of ckpttool."""
    resumes: str = field(default="", metadata={"json": False})
    """Why a run may resume from it, though it is not the newest whole one in the order; "" if none does."""
    mixed: bool = field(default=False, metadata={"json": False})
    """Whether its files may be of two saves, as a note of ``inspect`` then says."""
    best: bool = False
    """Whether the trainer's state in the newest checkpoint names it as the best, which the trainer loads at the end."""
    of_run: bool = field(default=False, metadata={"json": False})
    """Whether a run has saved it and can resume from it. The rules count these alone: no conversion and no export."""

    @property
    def is_root(self) -> bool:
        """Whether the directory contains checkpoints, but is not one itself."""
        return (self.problem or "").startswith(OWN_ROOT)

    @property
    def is_skipped(self) -> bool:
        """Whether it has the mark of a checkpoint that a restore has skipped."""
        return (self.problem or "").startswith(SKIPPED)

    @property
    def is_unread(self) -> bool:
        """Whether a file cannot be read: access is denied, or a link leads out of the root."""
        problem = self.problem or ""
        return problem.startswith(UNREADABLE) or problem.endswith(NOT_FOLLOWED)

    @property
    def condition(self) -> str:
        """One of "whole", "torn", "not whole", "unreadable", "not read (--follow-links)" and "a root"."""
        if self.whole:
            return "whole"
        if self.is_unread:
            return "unreadable" if (self.problem or "").startswith(UNREADABLE) else "not read (--follow-links)"
        return "a root" if self.is_root else "not whole" if self.torn is None else "torn"

    @property
    def order(self) -> tuple[int, int, tuple[tuple[int, int | str], ...]]:
        """Sort key, older checkpoints first: by step, or its number in the name if it is unknown; then by rank."""
        return _step_in(self.name) if self.step is None else self.step, self.rank, natural_order(self.name)


@dataclass(frozen=True, slots=True)
class Catalog(Shown):
    """The checkpoints under a root."""

    root: str
    """The directory."""
    entries: tuple[CatalogEntry, ...]
    """Entries, older ones first."""
    problems: tuple[str, ...]
    """Problems of ``latest``, of Ray Train's snapshot, and of the trainer's state."""
    unlisted: tuple[str, ...] = ()
    """Directories in it with checkpoints of their own, such as the output of a trainer, that are not listed."""

    def blocks(self) -> Iterator[Block]:
        """Yield one row for each checkpoint, then defects of latest."""
        now = time.time()
        newest = "" if any(entry.latest for entry in self.entries) else _newest(self)
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
            for entry in self.entries
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
        models = by_series([entry for entry in self.entries if entry.series and not entry.is_root])
        if len(models) > 1:
            names = "; ".join(name_some([entry.name for entry in own], 3) for own in models[:SERIES])
            names += f"; and {len(models) - SERIES} more" if len(models) > SERIES else ""
            kinds = f"{len(models)} models or series of names"
            yield Line(f"note: checkpoints of {kinds}; the rules of prune hold for each: {names}")
        if self.unlisted:
            yield Line(f"note: not listed: {name_some(self.unlisted)}, with checkpoints of their own; pass each to ls")
        for problem in self.problems:
            yield Line(f"note: {problem}", color="yellow")


def _step_in(name: str) -> int:
    """Return the step in the name of a checkpoint; -1 without one."""
    own = step_in(name, OWN_OF_RAY)
    return last_number(name) if own is None else own


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
        state = f"{'latest, ' if entry.latest else ''}{entry.condition}"
        if entry.problem != f"is a link that {NOT_FOLLOWED}":  # the condition and the link say it
            state += f": {entry.problem}"
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


def by_series(entries: Sequence[CatalogEntry]) -> list[list[CatalogEntry]]:
    """Return the checkpoints of each model, in the same order: the rules hold for each."""
    found: dict[str, list[CatalogEntry]] = {}
    for entry in entries:
        found.setdefault(entry.series, []).append(entry)
    return list(found.values())
