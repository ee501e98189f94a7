"""Receivers of the readers' findings, and shared advice."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from ckpttool.errors import CkptError

Report = Callable[[CkptError], None]
"""Receives a finding: raises it at once, or collects it so that reading continues as far as possible."""

RESTORE = "restore it from a copy, or choose another tag"
"""Advice for a missing or damaged file."""
WHOLE = "load it with its framework, and save whole weights or a checkpoint of torch.distributed.checkpoint"
"""Advice for the files of single ranks of other frameworks."""
WEIGHTS_ALONE = (
    "written from weights alone: load it with load_module_only=True at stages 1 and 2, and with "
    "load_optimizer_states=False and load_lr_scheduler_states=False at stage 3; DeepSpeed makes the masters from the "
    "16-bit weights"
)
"""Remark on a checkpoint of DeepSpeed without an optimizer."""


def raise_at_once(error: CkptError) -> NoReturn:
    """Raise the finding: for callers that accept only sound checkpoints."""
    raise error
