"""The names that the source of a framework's function uses: they show whether a release has changed it."""

from __future__ import annotations

import inspect
from typing import Any


def names(function: Any) -> set[str]:
    """The global names, attributes and keywords that a function uses, also in nested ones."""
    code = [inspect.unwrap(function).__code__]
    found: set[str] = set()
    while code:
        one = code.pop()
        found |= {*one.co_names, *one.co_varnames}
        for constant in one.co_consts:
            if inspect.iscode(constant):
                code.append(constant)
            elif isinstance(constant, tuple):
                found |= {name for name in constant if isinstance(name, str)}
    return found
