"""Replace attributes of one object for the time of a block."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def replaced(target: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object, which hide those of its class; restore them at the end of the block."""
    before = {name: target.__dict__[name] for name in values if name in target.__dict__}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(target, name, before[name])
            else:
                delattr(target, name)
