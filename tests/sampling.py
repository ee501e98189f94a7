"""Choose a spread of many cases for ``make test``; ``make thorough`` (``--thorough``) takes all of them."""

from __future__ import annotations

import itertools
import zlib
from typing import TYPE_CHECKING, Any, TypeVar

from tests.truth import REPRESENTATIVE

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

    import pytest

T = TypeVar("T")

_state = {"thorough": False}


def begin(config: pytest.Config) -> None:
    """Take all cases from now on if ``--thorough`` was given. Called before test modules are imported."""
    _state["thorough"] = bool(config.getoption("--thorough"))


def thorough() -> bool:
    """Return whether all cases are to be tried."""
    return _state["thorough"]


def is_left_out(item: pytest.Item) -> bool:
    """Return whether only ``make thorough`` runs a test."""
    return item.get_closest_marker("thorough") is not None


def swept(names: Iterable[str]) -> list[str]:
    """Return those of bundled checkpoints that represent the others; all with ``--thorough``."""
    return [name for name in names if thorough() or name in REPRESENTATIVE]


def texts(item: pytest.Item) -> list[str]:
    """Return the parameters of a test that are text, such as the name of a checkpoint."""
    callspec = getattr(item, "callspec", None)
    return [value for value in callspec.params.values() if isinstance(value, str)] if callspec is not None else []


def some(cases: Iterable[T], count: int, *, key: str = "") -> list[T]:
    """Return ``count`` cases at equal distances, in order; all cases with ``--thorough``.

    Args:
        cases: All cases.
        count: Number of cases to take.
        key: Name of the test. Tests with other names take other cases, so that together they try more of them.
    """
    found = list(cases)
    if thorough() or len(found) <= count:
        return found
    step = len(found) / count
    first = zlib.crc32(key.encode()) % len(found) if key else 0
    return [found[i] for i in sorted({int(first + number * step) % len(found) for number in range(count)})]


def pairs(cases: Iterable[T]) -> list[T]:
    """Return cases in which each two values meet that meet in any case; all cases with ``--thorough``.

    Args:
        cases: All cases: tuples of values, or dictionaries, of which ``id`` does not count, and a tuple counts as its
            members.
    """
    found = list(cases)
    if thorough():
        return found
    met = [set(itertools.combinations(enumerate(_values(case)), 2)) for case in found]
    left = set().union(*met)
    chosen: set[int] = set()
    while left:
        best = max(range(len(found)), key=lambda number: len(met[number] & left))
        chosen.add(best)
        left -= met[best]
    return [case for number, case in enumerate(found) if number in chosen]


def _values(case: Any) -> Iterator[Hashable]:
    values = [value for key, value in case.items() if key != "id"] if isinstance(case, dict) else [case]
    for value in values:
        yield from value if isinstance(value, tuple) else (value,)
