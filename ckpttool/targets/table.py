"""The formats that ``convert`` writes, of the core and of extensions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.arguments import check_choice
from ckpttool.errors import ArgumentError
from ckpttool.other_packages import call, find_target
from ckpttool.registry import EXTENSIONS, Target

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.model import Checkpoint
    from ckpttool.plan import CopyPlan

_CORE = (
    Target(
        "zero",
        "ckpttool.targets.conversions.for_zero",
        "load_checkpoint",
        options=("world_size", "stage", "sub_group_size", "round_robin", "expert_parallel", "dtype", "buffers"),
        checker="ckpttool.targets.conversions.check_zero",
    ),
    Target("universal", "ckpttool.targets.conversions.for_universal", "load_universal"),
    Target(
        "dcp",
        "ckpttool.targets.conversions.for_dcp",
        "torch.distributed.checkpoint",
        options=("layout",),
        layouts=("nested", "flat", "app", "accelerate", "torchtitan", "lightning"),
        holds_any_shape=True,
    ),
)
TARGETS = {target.name: target for target in (*_CORE, *(t for extension in EXTENSIONS for t in extension.targets))}
"""The targets by name."""
LAYOUTS = tuple(dict.fromkeys(layout for target in TARGETS.values() for layout in target.layouts))
"""Layouts of all targets."""


class Planned(NamedTuple):
    """The planned output of a target."""

    plan: CopyPlan
    """The plan."""
    last: tuple[str, ...]
    """Names of the files to commit last, in this order."""
    losses: Sequence[str]
    """State that the output does not keep, and other remarks."""


def check(to: str, given: Mapping[str, Any]) -> None:
    """Refuse a target and options that no checkpoint allows.

    Args:
        to: Name of the target.
        given: The options of all targets; None for those that are not given.

    Raises:
        ArgumentError: The target is unknown, or does not have an option or its value.
    """
    target = target_of(to)
    for name, value in given.items():
        having = [other.name for other in TARGETS.values() if name in other.options]
        if name not in target.options and value is not None:
            problem = f"is for {' and '.join(having)}, not for {to}"
            raise ArgumentError(name, problem, f'leave out {name}, or write to="{having[0]}"', (name, "to"))
    if given["layout"] is not None:
        check_choice("layout", given["layout"], target.layouts)
    if target.checker:
        call(target.checker, to, given)


def plan(to: str, checkpoint: Checkpoint, given: Mapping[str, Any], tag: str) -> Planned:
    """Plan the output of a target.

    Args:
        to: Name of the target.
        checkpoint: The source.
        given: The options, as for ``check``.
        tag: Name of the checkpoint in the output.

    Raises:
        CkptError: The checkpoint or an option does not fit the target.
    """
    planned: Planned = call(target_of(to).planner, checkpoint.location, checkpoint, given, tag)
    return planned


def target_of(name: str) -> Target:
    """Return a target, of ckpttool or else of another package.

    Raises:
        ArgumentError: There is none of that name.
    """
    if name not in TARGETS:
        if (found := find_target(name)) is not None:
            return found
        check_choice("to", name, tuple(TARGETS))
    return TARGETS[name]
