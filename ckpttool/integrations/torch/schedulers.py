"""The state of a learning-rate scheduler in a checkpoint: whether it is of the run's scheduler, in its order of groups.

Source: torch 2.13, optim/lr_scheduler.py (``state_dict`` of each class), distributed/checkpoint/_traverse.py.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpttool.errors import ArgumentError

if TYPE_CHECKING:
    from ckpttool.model import Checkpoint

OF_EACH_GROUP = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "eta_mins", "base_momentums", "max_momentums"}
)
"""Keys of a state that list a value for each parameter group."""
OF_RELEASES = frozenset({"_is_initial", "_get_lr_called_within_step", "_step_count", "_last_lr", "verbose"})
"""Keys that other releases of torch have, or lack."""
OTHER_CLASS = "the checkpoint has the scheduler of another class"


class Unfit(Exception):  # noqa: N818  the reason why a state is not restored
    """A state of a scheduler does not fit the run's."""


def state_for(scheduler: Any, checkpoint: Checkpoint, saved: Any, places: Sequence[int | None], groups: int) -> Any:
    """Return the saved state of a scheduler, in the run's order of groups.

    Args:
        scheduler: The run's scheduler.
        checkpoint: The checkpoint.
        saved: Its scheduler's state, with built objects; None if it has none under its own name.
        places: For each group of the scheduler's optimizer, the index of the group that had its parameters at the save;
            None if several had.
        groups: Number of groups at the save.

    Raises:
        Unfit: The checkpoint has no state that fits; says why.
    """
    own = scheduler.state_dict()
    found = saved if isinstance(saved, Mapping) and saved else _in_items(own, checkpoint)
    if not _alike(own, found):
        raise Unfit(OTHER_CLASS)
    if [*places] == [*range(groups)]:
        return dict(found)
    if None in places:
        raise Unfit("its parameter groups are others than the run's")
    return _reordered(found, [place for place in places if place is not None], groups)


def _in_items(own: Mapping[str, Any], checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the state among the items of a distributed checkpoint, which have the paths of all objects as names.

    Raises:
        Unfit: None or several of the objects have the scheduler's keys.
    """
    items = {} if checkpoint.native else checkpoint.client_state
    first = next(iter(own), "")
    ends = [name for name in items if first and f".{name}".endswith(f".{first}")]
    found = []
    for name in ends:
        try:
            found.append(_taken(own, name.removesuffix(first), items))
        except KeyError:
            continue
    if len(found) != 1:
        raise Unfit("several objects of the checkpoint have its keys" if found else "the checkpoint has no scheduler")
    return found[0]


def _taken(own: Mapping[str, Any], prefix: str, items: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values under a prefix, in the form of the scheduler's own state.

    Raises:
        KeyError: An item is missing.
    """

    def take(value: Any, path: str) -> Any:
        if path in items:
            return items[path]
        if isinstance(value, Mapping):
            return {key: take(one, f"{path}.{key}") for key, one in value.items()}
        if isinstance(value, list | tuple) and value:
            return type(value)(take(one, f"{path}.{i}") for i, one in enumerate(value))
        raise KeyError(path)

    return {key: take(value, f"{prefix}{key}") for key, value in own.items() if key not in OF_RELEASES} | {
        key: items[f"{prefix}{key}"] for key in OF_RELEASES if f"{prefix}{key}" in items
    }


def _alike(own: Any, saved: Any) -> bool:
    """Return whether two states are of schedulers of one class, as far as their keys show it."""
    if not isinstance(saved, Mapping) or own.keys() - OF_RELEASES != saved.keys() - OF_RELEASES:
        return False
    inner, theirs = (list(state.get("_schedulers") or ()) for state in (own, saved))
    return len(inner) == len(theirs) and all(_alike(a, b) for a, b in zip(inner, theirs, strict=True))


def _reordered(state: Mapping[str, Any], places: Sequence[int], groups: int) -> dict[str, Any]:
    """Return a state whose values of each group are in the run's order."""
    found = dict(state)
    for key, value in state.items():
        if key == "_schedulers":
            found[key] = [_reordered(one, places, groups) for one in value]
        elif key in OF_EACH_GROUP and isinstance(value, list | tuple) and len(value) == groups:
            found[key] = [value[place] for place in places]
    return found


def check_loads(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Load a state and put the scheduler's own back, so that an error comes before the run changes.

    Raises:
        ArgumentError: The scheduler does not take the state.
    """
    own = copy.deepcopy(scheduler.state_dict())
    try:
        scheduler.load_state_dict(copy.deepcopy(state))
    except Exception as error:
        problem = f"cannot load the saved state: {type(error).__name__}: {error}"
        raise ArgumentError(
            "scheduler", problem, "build the scheduler of the saved run, or pass scheduler=False"
        ) from error
    finally:
        scheduler.load_state_dict(own)
