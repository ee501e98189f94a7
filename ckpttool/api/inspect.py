"""``inspect``: the layout of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.formats import Source, open_checkpoint
from ckpttool.model import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping


def inspect(
    src: Source,
    *,
    tag: str | None = None,
    trust_names: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Read the layout of a checkpoint; no weights are read and no code in it is run.

    Args:
        src: A checkpoint root (with ``latest``), a tag's directory, or a Hugging Face Trainer's ``checkpoint-N``; a
            universal checkpoint; a directory of ``torch.distributed.checkpoint``; safetensors, or ``torch.save`` files
            of weights. Several directories if each holds the files of some ranks (node-local storage).
        tag: Which checkpoint of a root; default: the one that ``latest`` names.
        trust_names: Accept a file whose content names another file name, after a deliberate rename. By default it is
            refused.
        storage_options: Options for the fsspec class of URLs: keys, an endpoint, ... Default: what fsspec finds itself.

    Raises:
        CkptError: There is no sound checkpoint; names the file, the problem and the next step.
    """
    return open_checkpoint(src, tag=tag, options=storage_options, trust_names=trust_names)


def _notebook(checkpoint: Checkpoint) -> str:
    """Return the page of a checkpoint in a frame of its own, for a cell of a notebook."""
    from ckpttool.pages.checkpoint import notebook_frame

    return notebook_frame(checkpoint)


Checkpoint._notebook = _notebook
