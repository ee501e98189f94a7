"""Match names to numbered tensors, if shapes and order allow exactly one assignment."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_STATES = 200_000
"""Maximum number of positions to examine."""


def match_names(
    names: Mapping[str, tuple[int, ...]], groups: Sequence[Sequence[tuple[int, ...] | None]]
) -> list[list[str]] | None:
    """Assign names to groups so that shapes match and every group keeps the order of the names.

    Names may be left over (frozen parameters); every place gets a name.

    Args:
        names: Name to shape, in order.
        groups: The shape of each place of each group, in order; None fits anything.

    Returns:
        Names of each group; None if there is no assignment, or more than one.
    """
    ordered = list(names.items())
    spare = len(ordered) - sum(map(len, groups))
    if spare < 0:
        return None
    # Backwards: number of ways (0, 1, more) to fill the groups from these places on with the names from i on.
    ways: dict[tuple[int, ...], int] = {tuple(map(len, groups)): 1}
    steps: list[dict[tuple[int, ...], int]] = [ways]
    looked_at = 0
    for i in range(len(ordered) - 1, -1, -1):
        shape = ordered[i][1]
        before: dict[tuple[int, ...], int] = {}
        left = len(ordered) - i
        for places, count in ways.items():
            options = [places] if left - _filled(places, groups) <= spare else []
            for g, at in enumerate(places):
                if at and _fits(groups[g][at - 1], shape):
                    options.append((*places[:g], at - 1, *places[g + 1 :]))
            for option in options:
                before[option] = min(2, before.get(option, 0) + count)
        looked_at += len(before)
        if looked_at > MAX_STATES:
            return None
        ways = before
        steps.append(ways)
    start = (0,) * len(groups)
    if ways.get(start) != 1:
        return None
    result: list[list[str]] = [[] for _ in groups]
    places = start
    for (name, shape), after in zip(ordered, reversed(steps[:-1]), strict=True):
        for g, at in enumerate(places):
            moved = (*places[:g], at + 1, *places[g + 1 :])
            if at < len(groups[g]) and _fits(groups[g][at], shape) and after.get(moved):
                result[g].append(name)
                places = moved
                break
    return result


def _filled(places: tuple[int, ...], groups: Sequence[Sequence[object]]) -> int:
    """Return the number of places that remain for the later names."""
    return sum(len(group) - at for group, at in zip(groups, places, strict=True))


def _fits(place: tuple[int, ...] | None, shape: tuple[int, ...]) -> bool:
    return place is None or place == shape
