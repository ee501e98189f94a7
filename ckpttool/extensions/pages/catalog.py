"""The page of the checkpoints under a root."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.analysis.json_report import as_plain
from ckpttool.extensions.pages.page import CHARTS, CHARTS_STYLES, page
from ckpttool.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.catalog.listing import Catalog
    from ckpttool.catalog.retention import Decision


def catalog_page(found: Catalog, decisions: Sequence[Decision] = (), rules: Mapping[str, Any] = {}) -> bytes:
    """Build the page of the checkpoints under a root.

    Args:
        found: The checkpoints.
        decisions: Decisions of ``prune`` to show beside them.
        rules: The rules of these decisions, by the parameters of ``prune``.
    """
    given = dict(rules)
    if isinstance(seconds := given.get("keep_for"), int | float):
        given["keep_for"] = format_duration(seconds)
    shown = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())
    steps = [None if entry.order[0] < 0 else entry.order[0] for entry in found.entries]
    states = [entry.condition for entry in found.entries]
    plain = {"catalog": as_plain(found), "decisions": as_plain(decisions)}
    data = {**plain, "steps": steps, "states": states, "rules": shown}
    about = f"{found.root}: {len(found.entries)} checkpoints"
    return page("catalog", about, data, scripts=(*CHARTS, "catalog.js"), styles=CHARTS_STYLES)
