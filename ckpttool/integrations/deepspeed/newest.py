"""Find the checkpoints of a root to resume from."""

from __future__ import annotations

import logging
import posixpath
from typing import TYPE_CHECKING

from ckpttool.catalog.restore_order import Candidate, candidates, contradiction
from ckpttool.commit import is_commit
from ckpttool.errors import LayoutError, StorageError

if TYPE_CHECKING:
    from ckpttool.storage import Storage

LOG = logging.getLogger(__name__)


def find(storage: Storage, root: str, tag: str | None) -> list[Candidate]:
    """Return the checkpoints to try, best first.

    Raises:
        CkptError: The root cannot be read, or holds no checkpoint of that tag.
    """
    storage.refresh([])
    if storage.exists(root) and not storage.is_dir(root):
        raise StorageError(root, "is a file", "pass a directory")
    if tag is None:
        found = candidates(storage, root)
        if problem := contradiction(storage, root, found):
            LOG.warning("%s: %s; resuming from %s", root, problem, found[0].tag)
        return found
    path = posixpath.join(root, tag)
    if not storage.is_dir(path):
        names = ", ".join(c.tag for c in candidates(storage, root)) or "none"
        raise LayoutError(root, f"holds no checkpoint of tag {tag!r}", f"choose one of: {names}")
    return [Candidate(tag, path, is_commit(storage, path))]
