"""Check arguments before any file is opened; a wrong value raises ``ArgumentError`` in every function."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

from ckpttool.errors import ArgumentError
from ckpttool.messages import brief
from ckpttool.units import MAX_SECONDS, parse_duration, parse_size

if TYPE_CHECKING:
    from collections.abc import Sequence


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse a value that is not among the choices.

    Raises:
        ArgumentError: The value is not among them.
    """
    if value not in choices:
        allowed = f"{', '.join(choices[:-1])} or {choices[-1]}"
        raise ArgumentError(name, f"is {brief(value)}, not {allowed}", f"choose {allowed}")


def checked_path(name: str, value: Any) -> str:
    """Return a path or URL as text.

    Raises:
        ArgumentError: The value is empty, or not a path.
    """
    if not isinstance(value, str | os.PathLike):
        raise ArgumentError(name, f"is {brief(value)}, not a path or URL", "name a directory")
    path = os.fspath(value)
    if not path:
        raise ArgumentError(name, "is an empty name", "name a directory")
    return str(path)


def check_positive(name: str, value: Any) -> None:
    """Refuse a value that is neither None nor a positive whole number.

    Raises:
        ArgumentError: The value is neither.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        problem = f"is {brief(value)}, not a whole number of at least 1"
        raise ArgumentError(name, problem, "choose 1 or more, or None")


def checked_duration(name: str, value: float | str | None) -> float | None:
    """Return the seconds that a number or a text like "7d" gives; None for None.

    Raises:
        ArgumentError: The value is not a duration.
    """
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_SECONDS
    return parse_duration(f"{value:.6f}" if number else str(value), name)  # the text of a float may have an exponent


def checked_size(name: str, value: int | str) -> int:
    """Return the size in bytes that a number or a text like "256MB" gives.

    Raises:
        ArgumentError: The value is not a size.
    """
    return parse_size(str(value), name)


def check_installed(what: str, package: str = "torch") -> None:
    """Refuse a call that needs a package of an extra of the same name, where it is not installed.

    Args:
        what: The call.
        package: The package.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"{what} needs {package}: pip install 'ckpttool[{package}]'", name=package)
