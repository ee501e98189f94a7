"""Read the state of this rank into host memory, without changes to the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.integrations.deepspeed.load_native import read_native
from ckpttool.integrations.deepspeed.load_partitions import read_partitions
from ckpttool.integrations.torch.run_state import read_run_state

if TYPE_CHECKING:
    from ckpttool.integrations.deepspeed.engine import LiveEngine
    from ckpttool.integrations.deepspeed.match import Match
    from ckpttool.integrations.deepspeed.prepared import NativeState, PlannedState
    from ckpttool.integrations.live.options import LoadOptions


def read_state(live: LiveEngine, match: Match, options: LoadOptions) -> NativeState | PlannedState:
    """Read the state of this rank by the method of a match.

    Raises:
        CkptError: A file is missing or damaged, or reading failed.
    """
    checkpoint = match.checkpoint
    if match.fitted is None or match.method == "native":
        return read_native(live, checkpoint, match.fitted, options)
    prepared = read_partitions(live, checkpoint, match.fitted, options)
    return replace(prepared, run_state=read_run_state(checkpoint, options)) if options.without_optimizer else prepared
