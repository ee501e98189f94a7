"""Compare the methods of a framework, which ckpttool wraps, replaces or calls, with those that it was written for."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from ckpttool.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def check_signatures(
    owner: Any, expected: Mapping[str, Sequence[str]], *, release: str, known: str, overrides: bool = False
) -> None:
    """Check that a class or module has functions with the expected parameters.

    Args:
        owner: The class or module.
        expected: Parameters of each function, by name: the first ones.
        release: Name and version of the installed framework, for messages.
        known: Name and version of a release that has these functions, for messages.
        overrides: ckpttool's own functions with these parameters take the places of the framework's, which then may
            have fewer parameters, but no others.

    Raises:
        PlanError: A function is missing, or has other parameters.
    """
    for name, parameters in expected.items():
        function = getattr(owner, name, None)
        full = f"{owner.__name__}.{name}"
        if function is None:
            raise PlanError(release, f"has no {full}, which ckpttool needs", f"use {known}")
        found = list(inspect.signature(function).parameters)
        count = len(found) if overrides else len(parameters)
        if found[:count] != list(parameters)[:count]:
            problem = f"has another {full} than ckpttool knows: {', '.join(found)}"
            raise PlanError(release, problem, f"use {known}")
