"""Pins: small files that keep a checkpoint from being removed or thinned by retention rules."""

from __future__ import annotations

import json
import posixpath
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ckpttool.commit.marks import own_directories
from ckpttool.errors import CkptError
from ckpttool.storage.base import PIN

if TYPE_CHECKING:
    from ckpttool.storage import Storage, WritableStorage


@dataclass(frozen=True, slots=True)
class Pin:
    """The pin of one checkpoint."""

    who: str
    """User and host that pinned it; "" if the pin cannot be read."""
    when: float
    """Time in seconds since 1970."""
    why: str
    """The reason given."""


UNREADABLE = Pin("", 0.0, "its pin cannot be read")
"""A damaged pin; it keeps the checkpoint all the same."""


def find_pin(storage: Storage, path: str) -> Pin | None:
    """Return the pin of a checkpoint, in its directory or at any depth below it; None without one.

    Whatever has the name of a pin is one, such as a directory or a link that leads nowhere.

    Raises:
        StorageError: The directory cannot be listed.
    """
    every = (directory for directory, _ in own_directories(storage, path))
    pinned = (directory for directory in every if storage.exists(posixpath.join(directory, PIN)))
    return next((read_pin(storage, directory) for directory in pinned), None)


def read_pin(storage: Storage, directory: str) -> Pin:
    """Read the pin in a directory; ``UNREADABLE`` for a damaged one."""
    try:
        found = json.loads(storage.read_text(posixpath.join(directory, PIN)))
        return Pin(str(found["who"]), float(found["when"]), str(found["why"]))
    except (CkptError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return UNREADABLE


def write_pin(storage: WritableStorage, directory: str, pin: Pin) -> None:
    """Pin the checkpoint in a directory; replaces an earlier pin.

    Raises:
        StorageError: The file cannot be written.
    """
    storage.put(posixpath.join(directory, PIN), json.dumps(asdict(pin)).encode())
