"""Symbolic links of a local directory."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from ckpttool.messages import brief

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.storage.base import Storage


MAX_HOPS = 40
"""Most links in a chain of links, as in Linux: a longer chain is a loop."""


def is_link(storage: Storage, path: str) -> bool:
    """Return whether a path is a symbolic link; only local disks have links."""
    return not storage.remote and os.path.islink(path)


def dead_links(storage: Storage, path: str) -> list[str]:
    """Return the names of the links in a directory that lead nowhere, or to themselves; a listing omits them."""
    if storage.remote or not os.path.isdir(path):
        return []
    with os.scandir(path) as names:
        return sorted(one.name for one in names if one.is_symlink() and not os.path.exists(one.path))


def leading_nowhere(path: str) -> str:
    """Return the problem of a link that cannot be followed, for errors."""
    try:
        os.stat(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return f"is a link to {brief(os.readlink(path), 200)}, which leads back to itself"
    return f"is a link to {brief(os.readlink(path), 200)}, which is not there"


def is_linked(storage: Storage, root: str, path: str) -> bool:
    """Return whether a component of a path below a root is a symbolic link.

    Args:
        storage: Storage of both; only local disks have links.
        root: A directory; the path to it may contain links.
        path: A path below it.
    """
    if storage.remote:
        return False
    below = os.path.relpath(os.path.abspath(path), os.path.abspath(root))
    return os.path.realpath(path) != os.path.normpath(os.path.join(os.path.realpath(root), below))


def links_below(root: str) -> list[tuple[str, str]]:
    """Return the symbolic links below a directory and their targets; empty for a URL.

    Returns:
        For each link its path relative to the directory, and the resolved path of its target. A link to another link
        has a pair for each of the two targets.
    """
    found = []
    for above, directories, names in os.walk(root):
        for name in sorted((*directories, *names)):
            hop = os.path.join(above, name)
            for _ in range(MAX_HOPS):
                if not os.path.islink(hop):
                    break
                hop = os.path.join(os.path.dirname(hop), os.readlink(hop))
                hop = os.path.join(os.path.realpath(os.path.dirname(hop)), os.path.basename(hop))
                hop = os.path.realpath(hop) if os.path.basename(hop) in {"", ".", ".."} else hop
                found.append((os.path.relpath(os.path.join(above, name), root), hop))
    return found


def link_into(links: Sequence[tuple[str, str]], root: str, path: str) -> str | None:
    """Return a link, relative to the root, that would dangle without a directory; None if there is not one.

    Args:
        links: ``links_below`` the root.
        root: A directory.
        path: The directory below it. Links inside it are removed with it.
    """
    real, base = os.path.realpath(path), os.path.realpath(root)
    for name, target in links:
        place = os.path.join(base, name)
        inside = f"{target}/".startswith(f"{real}/")
        above = f"{real}/".startswith(f"{target}/") and target.startswith(f"{base}/")  # for a tag "a/b", such as "a"
        if (inside or above) and not f"{place}/".startswith((f"{real}/", f"{target}/")):
            return name
    return None
