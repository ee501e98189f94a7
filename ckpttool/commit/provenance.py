"""The fields of a manifest that say what a checkpoint was made of, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REVISION = "git_revision"
"""Field: the commit of git that the run's code was checked out at; "" if unknown."""
DIRTY = "git_dirty"
"""Field: whether tracked files differed from that commit; missing if unknown."""
COMMAND = "command"
"""Field: the arguments of the process, without secrets."""
RESTORED_FROM = "restored_from"
"""Field: the checkpoint that the run was restored from: ``path``, ``tag``, ``step`` and ``attempt`` of its manifest."""
MAX_ARGUMENTS = 1000
"""Most arguments of a command that are kept."""


def parse_provenance(found: Any) -> dict[str, Any]:
    """Return the known fields of a manifest's provenance, checked.

    Raises:
        ValueError: A field has another type.
    """
    if not isinstance(found, Mapping):
        raise ValueError("not a mapping")  # noqa: TRY004  the caller reports what is no manifest
    result: dict[str, Any] = {}
    if REVISION in found:
        result[REVISION] = str(found[REVISION])
    if isinstance(found.get(DIRTY), bool):
        result[DIRTY] = found[DIRTY]
    if COMMAND in found:
        if not isinstance(found[COMMAND], list | tuple):
            raise ValueError("the command is no list")
        result[COMMAND] = [str(argument) for argument in found[COMMAND]]
    if RESTORED_FROM in found:
        parent = dict(found[RESTORED_FROM])
        step = parent.get("step")
        result[RESTORED_FROM] = {
            "path": str(parent.get("path", "")),
            "tag": str(parent.get("tag", "")),
            "step": None if step is None else int(step),
            "attempt": str(parent.get("attempt", "")),
        }
    return result
