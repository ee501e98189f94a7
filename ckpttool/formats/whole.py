"""Opens a checkpoint only if all of it is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.commit.checksummed import guard
from ckpttool.commit.manifest import is_commit
from ckpttool.errors import CkptError, LayoutError, PlanError
from ckpttool.formats import open_checkpoint
from ckpttool.storage import is_half_removed

if TYPE_CHECKING:
    from ckpttool.model import Checkpoint
    from ckpttool.storage import Storage


def is_whole(storage: Storage, path: str) -> bool:
    """Whether a checkpoint can be opened, as far as can be seen without reading all of it."""
    try:
        open_whole(storage, path)
    except CkptError:
        return False
    return True


def open_whole(storage: Storage, path: str, *, key: bytes | None = None, committed: bool = False) -> Checkpoint:
    """The layout of a checkpoint, every file of which is there; what is read of it later is compared with its manifest.

    Args:
        storage: Where it lies.
        path: The directory of its tag.
        key: Its manifest must be signed with this key.
        committed: It must have a manifest.

    Raises:
        PlanError: It is not signed with that key, or has no manifest.
        CkptError: It is torn or damaged, as far as can be seen without reading all of it.
    """
    if is_half_removed(storage, path):
        raise LayoutError(path, "is being removed", "use another tag")
    if committed and not is_commit(storage, path):
        problem = "has no manifest: ckpttool did not save it to its end, or somebody removed that"
        raise PlanError(path, problem, "choose another tag, or restore without require_committed")
    return open_checkpoint(path, storage=guard(storage, path, key))
