"""The page of a comparison of two checkpoints."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from ckpttool.analysis.json_report import as_plain
from ckpttool.analysis.layout import layer_of
from ckpttool.extensions.pages.page import page

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.analysis.diff import Difference, DiffReport

MAX_ROWS = 4_000
"""Maximum number of tensors in the table of a page; more are cut to the ones that differ most."""
MAX_LAYERS = 1_500
"""Maximum number of layers in a page; a note reports further ones."""


def diff_page(report: DiffReport, *, max_rows: int = MAX_ROWS) -> bytes:
    """Build the page of a comparison.

    Args:
        report: The comparison.
        max_rows: Maximum number of tensors in its table; the layers and the totals are of all tensors.
    """
    tensors: Sequence[Difference] = report.tensors
    if len(tensors) > max_rows:
        tensors = sorted(tensors, key=_amount, reverse=True)[:max_rows]
    cells = _cells(report.tensors)
    layers = list(dict.fromkeys(cell["layer"] for cell in cells))
    shown = set(layers[:MAX_LAYERS])
    others = report.others or ()
    data = {
        "a": report.a,
        "b": report.b,
        "equal": report.equal,
        "notes": [*report.notes, *(f"{o.name} differs: {o.a or 'missing'}, {o.b or 'missing'}" for o in others)],
        "count": len(report.tensors),
        "kinds": Counter(tensor.kind for tensor in report.tensors),
        "layers": len(layers),
        "cells": [cell for cell in cells if cell["layer"] in shown],
        "tensors": tensors,
    }
    return page("diff", f"{report.a} and {report.b}", {"diff": as_plain(data)}, scripts=("charts.js", "diff.js"))


def _amount(tensor: Difference) -> tuple[bool, float]:
    """Return the sort key of how much a tensor differs: tensors without a partner or of another shape are first."""
    return tensor.kind not in {"equal", "values"}, tensor.max_abs


def _cells(tensors: Sequence[Difference]) -> list[dict[str, Any]]:
    """Return the differences of each state of each layer, in the order of the tensors."""
    cells: dict[tuple[str, str], list[Difference]] = {}
    for tensor in tensors:
        cells.setdefault((layer_of(tensor.name), tensor.state), []).append(tensor)
    return [
        {
            "layer": layer,
            "state": state,
            "odd": next((t.kind for t in held if t.kind not in {"equal", "values"}), None),
            "max_abs": max(t.max_abs for t in held),
            "max_rel": max(t.max_rel for t in held),
            "share": sum(t.differing for t in held) / max(1, sum(map(_numel, held))),
        }
        for (layer, state), held in cells.items()
    ]


def _numel(tensor: Difference) -> int:
    return math.prod(tensor.shapes[0] or tensor.shapes[1] or ())
