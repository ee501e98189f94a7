"""The page of the statistics of one checkpoint, or of several."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckpttool.analysis.json_report import as_plain
from ckpttool.analysis.layout import Folding, folded_name, layer_of
from ckpttool.analysis.texts import title
from ckpttool.extensions.pages.page import CHARTS, CHARTS_STYLES, page

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool import Checkpoint, TensorStats

MAX_ENTRIES = 4_000
"""Maximum number of tensors and states in a page; more are folded by their names."""
MAX_EXACT = 1_000
"""Maximum number of entries with exact numbers; the counts of more have two digits in the histograms, which is all that
the height of a bar shows, and other numbers have DIGITS."""
DIGITS = 6
"""Digits of the norms of the older checkpoints of a series, and of the last one if it has many entries."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A row of the page."""

    stats: TensorStats
    """Statistics of the tensor, or of all that it stands for."""
    layer: str
    """Its layer."""
    count: int = 1
    """Tensors that it stands for."""


def stats_page(series: Sequence[tuple[Checkpoint, Sequence[TensorStats]]], *, max_entries: int = MAX_ENTRIES) -> bytes:
    """Build the page of the statistics of one checkpoint, or of a series.

    A series is in the order of the steps if every checkpoint has one of its own, and in the given order otherwise.

    Args:
        series: Checkpoints and their statistics.
        max_entries: Maximum number of tensors and states; more are folded by their names.
    """
    steps = [checkpoint.step for checkpoint, _ in series]
    stepped = len({step for step in steps if step is not None}) == len(series)
    ordered = sorted(series, key=lambda one: one[0].step or 0) if stepped else list(series)
    most = max(len(found) for _, found in ordered)
    folding = Folding.NONE
    runs = [[_Entry(tensor, layer_of(tensor.name)) for tensor in found] for _, found in ordered]
    whole = runs
    while most > max_entries and folding is not Folding.ALL:
        folding = Folding(folding.value + 1)
        runs = [_folded(entries, folding) for entries in whole]
        most = max(map(len, runs))
    last = ordered[-1][0]
    about = ", ".join(title(last))
    data = {
        "about": about,
        "stepped": stepped,
        "folded": folding is not Folding.NONE,
        "tensors": len({tensor.name for tensor in ordered[-1][1]}),
        "rounded": most > MAX_EXACT,
        "series": [
            {
                "location": checkpoint.location,
                "tag": checkpoint.tag,
                "step": checkpoint.step,
                "tensors": [_full(e.stats, most) if entries is runs[-1] else _brief(e.stats) for e in entries],
                "layers": [e.layer for e in entries],
                "counts": [e.count for e in entries] if folding is not Folding.NONE else [],
            }
            for (checkpoint, _), entries in zip(ordered, runs, strict=True)
        ],
    }
    name = last.tag if len(ordered) == 1 else f"{len(ordered)} checkpoints, {ordered[0][0].tag} to {last.tag}"
    scripts = (*CHARTS, "stats.js")
    return page("stats", f"{name}: {about}", data, scripts=scripts, styles=CHARTS_STYLES)


def _full(tensor: TensorStats, entries: int) -> dict[str, Any]:
    """Return the statistics of a tensor for a page with so many entries."""
    if entries > MAX_EXACT:
        counts = tuple((e, _rounded(negative), _rounded(positive)) for e, negative, positive in tensor.magnitudes)
        numbers: dict[str, Any] = {name: _shortened(getattr(tensor, name)) for name in ("min", "max", "mean", "norm")}
        tensor = replace(tensor, magnitudes=counts, **numbers)
    plain: dict[str, Any] = as_plain(tensor)
    return plain


def _brief(tensor: TensorStats) -> dict[str, Any]:
    """Return the statistics of a tensor of an older checkpoint: the page shows only its norm."""
    brief: dict[str, Any] = as_plain(
        {
            "name": tensor.name,
            "state": tensor.state,
            "dtype": tensor.dtype,
            "norm": _shortened(tensor.norm),
            "nan": tensor.nan,
            "inf": tensor.inf,
        }
    )
    return brief


def _shortened(value: float) -> float:
    """Return a number with DIGITS digits."""
    return float(f"{value:.{DIGITS}g}")


def _rounded(count: int) -> int:
    """Return a count with its first two digits."""
    unit = 10 ** max(0, len(str(count)) - 2)
    return (count + unit // 2) // unit * unit if count else 0


def _folded(entries: Sequence[_Entry], folding: Folding) -> list[_Entry]:
    """Join the entries of one state and type whose names differ only in the number of an expert or layer."""
    groups: dict[tuple[str, str, str], list[_Entry]] = {}
    for entry in entries:
        tensor = entry.stats
        groups.setdefault((folded_name(tensor.name, entry.layer, folding), tensor.state, tensor.dtype), []).append(
            entry
        )
    found = []
    for (name, _, _), group in groups.items():
        layer = re.sub(r"\d+", "*", group[0].layer) if folding is Folding.ALL else group[0].layer
        joined = group[0].stats if len(group) == 1 else _joined([entry.stats for entry in group])
        found.append(_Entry(replace(joined, name=name), layer, len(group)))
    return found


def _joined(tensors: Sequence[TensorStats]) -> TensorStats:
    """Return the statistics of the elements of several tensors; its shape is ()."""
    counted = [(t, t.numel - t.nan - t.inf) for t in tensors if not math.isnan(t.mean)]
    finite = sum(n for _, n in counted)
    magnitudes: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        for exponent, negative, positive in tensor.magnitudes:
            below, above = magnitudes.get(exponent, (0, 0))
            magnitudes[exponent] = below + negative, above + positive
    return replace(
        tensors[0],
        shape=(),
        numel=sum(t.numel for t in tensors),
        min=min((t.min for t, _ in counted), default=math.nan),
        max=max((t.max for t, _ in counted), default=math.nan),
        mean=math.fsum(t.mean * n for t, n in counted) / finite if finite else math.nan,
        norm=math.hypot(*(t.norm for t in tensors)),
        zeros=sum(t.zeros for t in tensors),
        nan=sum(t.nan for t in tensors),
        inf=sum(t.inf for t in tensors),
        magnitudes=tuple((e, *magnitudes[e]) for e in sorted(magnitudes)),
    )
