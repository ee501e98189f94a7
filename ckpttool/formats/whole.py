"""Open a checkpoint only if it is complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.commit.checksummed import checksummed
from ckpttool.commit.manifest import is_commit
from ckpttool.errors import CkptError, LayoutError, PlanError
from ckpttool.formats import open_checkpoint
from ckpttool.storage import is_half_removed

if TYPE_CHECKING:
    from ckpttool.model import Checkpoint
    from ckpttool.storage import Storage


def is_whole(storage: Storage, path: str) -> bool:
    """Whether a checkpoint can be opened; tensor bytes are not read."""
    try:
        open_whole(storage, path)
    except CkptError:
        return False
    return True


def open_whole(storage: Storage, path: str, *, key: bytes | None = None, committed: bool = False) -> Checkpoint:
    """Open a complete checkpoint; bytes that are read later are compared with its manifest.

    Args:
        storage: Its storage.
        path: The directory of its tag.
        key: Its manifest must be signed with this key.
        committed: It must have a manifest.

    Raises:
        PlanError: It is not signed with that key, or has no manifest.
        CkptError: It is incomplete or damaged; tensor bytes are not checked.
    """
    if is_half_removed(storage, path):
        raise LayoutError(path, "is being removed", "use another tag")
    if committed and not is_commit(storage, path):
        problem = "has no manifest: ckpttool did not finish saving it, or the manifest was removed"
        raise PlanError(path, problem, "choose another tag, or restore without require_committed")
    return open_checkpoint(path, storage=checksummed(storage, path, key))
