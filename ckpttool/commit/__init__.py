"""Read and check the files that tell committed checkpoints from unfinished saves: manifests and markers."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

from ckpttool.storage import MANIFEST, is_half_removed

if TYPE_CHECKING:
    from ckpttool.storage import Storage


def is_commit(storage: Storage, directory: str) -> bool:
    """Return whether a directory has a manifest and is not half removed."""
    return storage.exists(posixpath.join(directory, MANIFEST)) and not is_half_removed(storage, directory)
