"""``ls``: the checkpoints under a root."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from ckpttool.catalog.entries import Catalog


def ls(root: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Catalog:
    """List the checkpoints in a directory, sorted by step, and whether each is whole.

    Args:
        root: A checkpoint root, or a directory of a trainer's ``checkpoint-N``.
        storage_options: As for ``inspect``.

    Raises:
        CkptError: The directory cannot be read, or holds no checkpoint.
    """
    from ckpttool.arguments import checked_path
    from ckpttool.catalog.entries import catalog

    return catalog(checked_path("root", root), options=storage_options)
