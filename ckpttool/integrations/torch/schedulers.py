"""The state of a learning-rate scheduler in a checkpoint: whether it is of the run's scheduler, in its order of groups.

Source: torch 2.13, optim/lr_scheduler.py (``state_dict`` of each class), distributed/checkpoint/_traverse.py.
"""

from __future__ import annotations

import copy
import posixpath
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpttool.errors import ArgumentError
from ckpttool.storage import connect

if TYPE_CHECKING:
    from ckpttool.model import Checkpoint

OF_EACH_GROUP = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "eta_mins", "base_momentums", "max_momentums"}
)
"""Keys of a state that list a value for each parameter group."""
OF_RELEASES = frozenset({"_is_initial", "_get_lr_called_within_step", "_step_count", "_last_lr", "verbose"})
"""Keys that other releases of torch have, or lack."""
OF_STEPS = frozenset({"milestones", "_milestones", "_schedule_phases"})
"""Keys that list other things."""
OTHER_GROUPS = "its parameter groups are others than the run's"
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
    known = [place for place in places if place is not None]
    if len(known) < len(places):
        raise Unfit(OTHER_GROUPS)
    return _reordered(found, known, groups)


def has_state(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint has the state of a scheduler, under its own name or among its items."""
    items = () if checkpoint.native else checkpoint.client_state
    return bool(checkpoint.scheduler) or any(f".{name}".endswith(".last_epoch") for name in items)


def file_beside(checkpoint: Checkpoint) -> str:
    """Return the path of the file with the scheduler's state that a trainer has saved beside; "" without one."""
    paths = (posixpath.join(checkpoint.location, name) for name in ("scheduler.bin", "scheduler.pt"))
    return next(filter(connect(checkpoint.storage).exists, paths), "")


def _in_items(own: Mapping[str, Any], checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the state among the items of a distributed checkpoint, which have the paths of all objects as names.

    Raises:
        Unfit: None or several of the objects have the scheduler's keys.
    """
    items = {} if checkpoint.native else checkpoint.client_state
    key = "last_epoch" if "last_epoch" in own else _first_item(own)
    prefixes = [name.removesuffix(key) for name in items if key and f".{name}".endswith(f".{key}")]
    found = []
    for prefix in prefixes:
        used: dict[str, Any] = {}
        try:
            state = _taken(own, prefix, items, used)
        except KeyError:
            continue
        if not prefix or all(name in used for name in items if name.startswith(prefix)):
            found.append(state)
    if len(found) != 1:
        several = "several objects of the checkpoint have its keys"
        raise Unfit(several if found else OTHER_CLASS if prefixes else "the checkpoint has no scheduler")
    return found[0]


def _first_item(value: Any) -> str:
    """Return the path of the first item of a state, in which lists of mappings and mappings are opened."""
    for key, one in value.items() if isinstance(value, Mapping) else enumerate(value):
        if key not in OF_RELEASES:
            opened = isinstance(one, Mapping) or (
                isinstance(one, list | tuple) and any(isinstance(x, Mapping) for x in one)
            )
            return f"{key}.{_first_item(one)}" if opened and one else str(key)
    return ""


def _taken(own: Mapping[str, Any], prefix: str, items: Mapping[str, Any], used: dict[str, Any]) -> dict[str, Any]:
    """Return the values under a prefix, in the form of the scheduler's own state; ``used`` gets the items.

    Raises:
        KeyError: An item is missing.
    """

    def take(value: Any, path: str) -> Any:
        if path in items:
            return used.setdefault(path, items[path])
        if isinstance(value, Mapping):
            return type(value)({key: take(one, f"{path}.{key}") for key, one in value.items()})  # type: ignore[call-arg]
        if isinstance(value, list | tuple) and value:
            return type(value)(take(one, f"{path}.{i}") for i, one in enumerate(value))
        raise KeyError(path)

    found = {key: take(value, f"{prefix}{key}") for key, value in own.items() if key not in OF_RELEASES}
    return found | {key: take(None, f"{prefix}{key}") for key in OF_RELEASES if f"{prefix}{key}" in items}


def _alike(own: Any, saved: Any) -> bool:
    """Return whether two states are of schedulers of one class, as far as their keys show it."""
    if not isinstance(saved, Mapping) or own.keys() - OF_RELEASES != saved.keys() - OF_RELEASES:
        return False
    inner, theirs = (list(state.get("_schedulers") or ()) for state in (own, saved))
    phases, others = (len(state.get("_schedule_phases") or ()) for state in (own, saved))
    return phases == others and len(inner) == len(theirs) and all(map(_alike, inner, theirs))


def _reordered(state: Mapping[str, Any], places: Sequence[int], groups: int) -> dict[str, Any]:
    """Return a state whose values of each group are in the run's order.

    Raises:
        Unfit: A list may be of groups, or of other things.
    """
    own = sorted({*places})  # the saved groups of this scheduler's optimizer, in their order
    found = dict(state)
    for key, value in state.items():
        if key == "_schedulers":
            found[key] = [_reordered(one, places, groups) for one in value]
        elif not isinstance(value, list | tuple) or key in OF_STEPS or ([*places] == own and len(value) == len(own)):
            continue
        elif key in OF_EACH_GROUP and len(value) == groups:
            found[key] = [value[place] for place in places]
        elif key in OF_EACH_GROUP and len(value) == len(own):
            found[key] = [value[own.index(place)] for place in places]
        elif key in OF_EACH_GROUP or len(value) in {groups, len(own)}:
            raise Unfit(OTHER_GROUPS)
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
