"""Open a checkpoint only if it is complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.commit import is_commit
from ckpttool.commit.checksummed import signed_storage
from ckpttool.errors import CkptError, LayoutError, PlanError
from ckpttool.formats import open_checkpoint
from ckpttool.storage import is_half_removed

if TYPE_CHECKING:
    from ckpttool.model import Checkpoint
    from ckpttool.storage import Storage


def is_whole(storage: Storage, path: str) -> bool:
    """Return whether a checkpoint can be opened, without reading tensor bytes."""
    try:
        open_whole(storage, path)
    except CkptError:
        return False
    return True


def open_whole(storage: Storage, path: str, *, key: bytes | None = None, committed: bool = False) -> Checkpoint:
    """Open a complete checkpoint; with a key, all later reads are compared with its signed manifest.

    Args:
        storage: Its storage.
        path: The directory of its tag.
        key: Require a manifest signed with this key.
        committed: Require a manifest.

    Raises:
        PlanError: The manifest is missing, or not signed with that key.
        CkptError: The checkpoint is incomplete or damaged; tensor bytes are not checked.
    """
    if is_half_removed(storage, path):
        raise LayoutError(path, "is being removed", "use another tag")
    if committed and not is_commit(storage, path):
        problem = "has no manifest: ckpttool did not finish saving it, or the manifest was removed"
        raise PlanError(path, problem, "choose another tag, or restore without require_committed")
    return open_checkpoint(path, storage=storage if key is None else signed_storage(storage, path, key))
