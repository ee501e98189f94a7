"""One checkpoint on a storage."""

from __future__ import annotations

from typing import NamedTuple


class Location(NamedTuple):
    """One checkpoint on a storage."""

    root: str
    """The checkpoint root: the parent directory of the tag."""
    directory: str
    """Directory of the tag."""
    tag: str
    """Name of the tag."""
    others: tuple[str, ...] = ()
    """Directories of the same tag from other nodes, each with the files of some ranks."""
    strays: tuple[str, ...] = ()
    """Names of files beside ``latest`` that belong to no tag."""
    trust_names: bool = False
    """Whether to accept files whose recorded name differs from their name."""
    module_only: bool = False
    """Whether to accept a checkpoint without files of the optimizer, for the module weights."""
    order: tuple[str, ...] = ()
    """Parameters in the order of the optimizer, for files that number them; empty if it is unknown."""
    sizes: tuple[int, ...] = ()
    """Number of parameters of each of its groups; empty if it is unknown."""
