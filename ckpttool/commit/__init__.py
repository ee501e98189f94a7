"""Read and check the files that distinguish committed checkpoints from unfinished saves: manifests and markers."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Any

from ckpttool.errors import CkptError
from ckpttool.storage import MANIFEST, MARK, is_half_removed, read_json, whole_path

if TYPE_CHECKING:
    from ckpttool.storage import Storage

MAX_MARK_BYTES = 1 << 28
"""Most bytes of a marker, which may name all files of an output."""
REVISION = "git_revision"
"""Field of the provenance: the git revision of the run's code."""
DIRTY = "git_dirty"
"""Field of the provenance: whether tracked files differed from that revision."""
RESTORED_FROM = "restored_from"
"""Field of the provenance: the checkpoint that the run was restored from, by path, tag, step and attempt."""


def has_manifest(storage: Storage, directory: str) -> bool:
    """Return whether a directory has a manifest; an output that is compared before its commit may have one already."""
    return storage.exists(posixpath.join(directory, MANIFEST))


def split_directory(directory: str) -> tuple[str, str]:
    """Return the parent directory and the name of a directory, also of "." and ".."."""
    return posixpath.split(whole_path(directory))


def is_commit(storage: Storage, directory: str) -> bool:
    """Return whether a directory has a manifest, and is neither half removed nor a copy that is still being written."""
    if not has_manifest(storage, directory) or is_half_removed(storage, directory):
        return False
    listed = read_mark(storage, directory).get("files")
    return not isinstance(listed, list) or MANIFEST not in listed


def read_mark(storage: Storage, directory: str, name: str = MARK) -> dict[str, Any]:
    """Return the fields of a directory's marker, by default the in-progress one; empty without a readable marker.

    The marker of a save has the field "machine", and the manifest commits the save while the marker is there. The
    marker of a command's output has the field "over", and the output is not committed before the marker is removed.
    """
    path = posixpath.join(directory, name)
    if not storage.exists(path):
        return {}
    try:
        return read_json(storage, path, "a marker", "", MAX_MARK_BYTES)
    except CkptError:
        return {}
