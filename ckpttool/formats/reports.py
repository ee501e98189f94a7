"""Findings of the readers: who takes them, and the advice they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from ckpttool.errors import CkptError

Report = Callable[[CkptError], None]
"""Takes a finding: raises it at once, or collects it so that reading continues as far as that makes sense."""

RESTORE = "restore it from a copy, or choose another tag"
"""Advice for a missing or damaged file."""


def raise_at_once(error: CkptError) -> NoReturn:
    """Report for callers that accept sound checkpoints only."""
    raise error
