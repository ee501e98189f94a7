"""Readers: a directory -> Checkpoint, by the first format that recognizes it."""

from ckpttool.formats.opening import (
    LIVE_ORDER,
    Source,
    can_resume,
    in_order,
    is_whole,
    open_checkpoint,
    open_every,
    open_whole,
    source_paths,
    source_storage,
)
from ckpttool.formats.table import FORMATS
from ckpttool.storage import Opening

__all__ = [
    "FORMATS",
    "LIVE_ORDER",
    "Opening",
    "Source",
    "can_resume",
    "in_order",
    "is_whole",
    "open_checkpoint",
    "open_every",
    "open_whole",
    "source_paths",
    "source_storage",
]
