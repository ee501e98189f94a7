"""A checkpoint's layout as JSON; keys are field names, and stable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.analysis.description import describe, describe_state
from ckpttool.cli._output import print_json
from ckpttool.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpttool.model import Checkpoint, State


def print_checkpoint(checkpoint: Checkpoint, name: str | None) -> None:
    """Print everything except extents, or one parameter with its extents.

    Raises:
        PlanError: There is no parameter of that name.
    """
    print_json(_parameter(checkpoint, name) if name is not None else describe(checkpoint))


def _parameter(c: Checkpoint, name: str) -> dict[str, Any]:
    states = dict(states_of(c, name))
    return {
        "name": c.aliases.get(name, name),
        "states": {
            key: {**describe_state(s), "extents": [_extent(c, s, row) for row in s.extents]}
            for key, s in states.items()
        },
    }


def states_of(c: Checkpoint, name: str) -> Iterator[tuple[str, State]]:
    """Yield the states of a parameter or buffer, by its name or a tied name.

    Raises:
        PlanError: No parameter or buffer has that name.
    """
    stored = c.aliases.get(name, name)
    found = False
    for owner, key, state in c.states():
        if owner == stored:
            found = True
            yield key, state
    if not found:
        raise PlanError(c.location, f"holds no parameter {name}", "inspect --params lists the names")


def _extent(c: Checkpoint, state: State, row: Any) -> dict[str, Any]:
    file = c.files[int(row["file"])]
    width = state.nbytes // state.numel if state.numel else 0
    extent = {
        "file": file.name,
        "rank": file.rank,
        "offset": int(row["offset"]),
        "nbytes": int(row["numel"]) * int(row["runs"]) * width,
        "start": int(row["start"]),
        "numel": int(row["numel"]),
        "padding": int(row["padding"]),
    }
    if row["runs"] > 1:
        extent |= {key: int(row[key]) for key in ("runs", "pitch", "stride")}
    return extent
