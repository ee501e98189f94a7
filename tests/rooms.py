"""The extensions that are present: tests leave out cases of an extension that was removed."""

from __future__ import annotations

from ckpttool.registry import EXTENSIONS


def present(name: str) -> bool:
    """Return whether an extension is there."""
    return name in {extension.name for extension in EXTENSIONS}
