"""Which extensions are there: products of cases leave out those that need one that was removed."""

from __future__ import annotations

from ckpttool.registry import EXTENSIONS


def present(name: str) -> bool:
    """Return whether an extension is there."""
    return name in {extension.name for extension in EXTENSIONS}
