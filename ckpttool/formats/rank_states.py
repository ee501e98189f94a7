"""Find the rank states of a checkpoint: each rank's own object, saved with ``rank_state=``, in a file of its own."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.errors import LayoutError
from ckpttool.formats.fields import RESTORE
from ckpttool.model import Checkpoint, CheckpointFile

if TYPE_CHECKING:
    from ckpttool.formats.locate import Location
    from ckpttool.storage import Storage

KIND = "rank state"
"""``CheckpointFile.kind`` of these files."""
MAX_NAMED = 20
"""Maximum number of missing files named one by one."""
_NAME = re.compile(r"ckpttool_rank_state_(\d{5,7})\.pt")


def rank_state_name(rank: int) -> str:
    """Return the file name of a rank's state. No pattern of DeepSpeed's loaders and scripts matches it."""
    return f"ckpttool_rank_state_{rank:05d}.pt"


def is_rank_state(name: str) -> bool:
    """Return whether a file name is that of a rank state."""
    return _NAME.fullmatch(name) is not None


def with_rank_states(checkpoint: Checkpoint, storage: Storage, location: Location) -> Checkpoint:
    """Add the rank states in a checkpoint's directories to its files; none is opened.

    Args:
        checkpoint: The checkpoint as DeepSpeed's files describe it.
        storage: Its storage.
        location: Its directories.
    """
    found: dict[int, CheckpointFile] = {}
    for directory in (location.directory, *location.others):
        elsewhere = None if directory == location.directory else directory
        for entry in storage.listing(directory):
            match = _NAME.fullmatch(entry.name)
            if match is None or entry.is_dir or entry.name != rank_state_name(int(match[1])):
                continue
            rank = int(match[1])
            file = CheckpointFile(entry.name, entry.nbytes, KIND, rank, entry.version, directory=elsewhere)
            found.setdefault(rank, file)
    if not found:
        return checkpoint
    files = [found[rank] for rank in sorted(found)]
    missing = [rank for rank in range(min(max(found), len(found) + MAX_NAMED)) if rank not in found]
    notes = tuple(
        LayoutError(f"{location.directory}/{rank_state_name(rank)}", "is missing, others have theirs", RESTORE)
        for rank in missing[:MAX_NAMED]
    )
    return replace(checkpoint, files=(*checkpoint.files, *files), notes=(*checkpoint.notes, *notes))


def rank_state_indexes(checkpoint: Checkpoint) -> list[int]:
    """Return the indexes of the rank states in ``Checkpoint.files``, in the order of the ranks."""
    return [index for index, file in enumerate(checkpoint.files) if file.kind == KIND]
