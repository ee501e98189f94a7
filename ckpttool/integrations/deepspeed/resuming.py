"""Which checkpoint of a root to go on from."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

from ckpttool.candidates import Candidate, candidates
from ckpttool.errors import LayoutError
from ckpttool.manifest import is_commit

if TYPE_CHECKING:
    from ckpttool.storage import Storage


def find(storage: Storage, root: str, tag: str | None) -> list[Candidate]:
    """The checkpoints to try, best first.

    Raises:
        CkptError: The root cannot be read, or there is none of that tag.
    """
    storage.refresh([])
    if tag is None:
        return candidates(storage, root)
    path = posixpath.join(root, tag)
    if not storage.is_dir(path):
        there = ", ".join(c.tag for c in candidates(storage, root)) or "none"
        raise LayoutError(root, f"holds no checkpoint of tag {tag!r}", f"these are there: {there}")
    return [Candidate(tag, path, is_commit(storage, path))]
