"""Describe an open storage as data, and open the storage of such a description."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from ckpttool.storage.base import StorageSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckpttool.storage.base import Storage


class Described:
    """Base class of storages that have a spec."""

    remote: bool
    _spec: weakref.ref[StorageSpec] | None = None

    def describe(self) -> tuple[Callable[..., Storage], tuple[Any, ...]]:
        """Return the opener of this storage and its positional arguments, both picklable."""
        raise NotImplementedError

    def __reduce__(self) -> tuple[Callable[..., Storage], tuple[Any, ...]]:
        return self.describe()  # another process opens it anew, without cached listings

    @property
    def spec(self) -> StorageSpec:
        """This storage as data. While the spec is in use, ``connect`` returns this storage."""
        with _LOCK:
            spec = None if self._spec is None else self._spec()
            if spec is None:
                opener, arguments = self.describe()
                spec = StorageSpec(opener, arguments, self.remote)
                # Weak, because the table below holds the storage for as long as the spec lives.
                self._spec = weakref.ref(spec)
                _OPEN[spec] = self
            return spec


_LOCK = threading.RLock()
_OPEN: weakref.WeakKeyDictionary[StorageSpec, Any] = weakref.WeakKeyDictionary()
"""The open storage of each spec; dropped with the last layout or plan that names the spec."""


def connect(spec: StorageSpec) -> Storage:
    """Return the open storage of a spec; opened at the first call in a process.

    Raises:
        StorageError: The package of the storage is not installed.
    """
    with _LOCK:
        storage = _OPEN.get(spec)
        if storage is None:
            storage = _OPEN[spec] = spec.opener(*spec.arguments)
        return storage
