"""Readers: a directory -> Checkpoint. One module for each thing that DeepSpeed describes in its own way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.formats.locate import locate
from ckpttool.formats.zero import read_zero
from ckpttool.formats.zero_files import raise_at_once
from ckpttool.storage import open_storage

if TYPE_CHECKING:
    from ckpttool.formats.zero_files import Report
    from ckpttool.model import Checkpoint

__all__ = ["open_checkpoint"]


def open_checkpoint(src: str, *, tag: str | None = None, report: Report = raise_at_once) -> Checkpoint:
    """Read the layout of a checkpoint.

    Args:
        src: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``.
        tag: Which checkpoint of a root; default: the one that ``latest`` names.
        report: Takes findings that need not end the reading; the default raises the first.

    Raises:
        CkptError: There is no sound checkpoint.
    """
    storage = open_storage(src)
    return read_zero(storage, locate(storage, src, tag), report)
