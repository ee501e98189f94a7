"""Which checksums a command compares while it reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ckpttool.dtypes import itemsize
from ckpttool.model import stored_blocks
from ckpttool.read_checks import ReadChecks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.model import Checkpoint
    from ckpttool.plan import SourceFile
    from ckpttool.read_checks import Owners

Check = Literal["read", "full", "off"]
"""Compare the records that are read whole, or nearly; those that are read in part as well; or none."""


def checks_for(sources: Sequence[SourceFile], checkpoint: Checkpoint, check: Check) -> ReadChecks | None:
    """The checks of one command; None for "off".

    Args:
        sources: The files of its plan.
        checkpoint: What errors take the names of parameters from.
        check: Which checks.

    Raises:
        ValueError: ``check`` is none of the three.
    """
    if check not in {"read", "full", "off"}:
        raise ValueError(f"check is {check!r}, not read, full or off")
    if check == "off":
        return None
    return ReadChecks(sources, full=check == "full", owners=owners_of(checkpoint))


def owners_of(checkpoint: Checkpoint) -> Owners:
    """What names the parameters and buffers in a range of a checkpoint's file."""

    def owners(path: str, start: int, end: int) -> list[str]:
        index = next((n for n in range(len(checkpoint.files)) if checkpoint.path(n) == path), None)
        names: dict[str, None] = {}
        for name, _, state in checkpoint.states():
            width = itemsize(state.dtype)
            rows = stored_blocks(state.extents[state.extents["file"] == index], width) if index is not None else ()
            if any(int(r["offset"]) < end and int(r["offset"]) + int(r["numel"]) * width > start for r in rows):
                names[name] = None
        return list(names)

    return owners
