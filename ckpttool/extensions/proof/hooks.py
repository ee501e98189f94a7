"""The functions that the core calls at saves and loads; the row in ``ckpttool/registry.py`` names them."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.errors import CkptError
from ckpttool.extensions.proof.api import prove_state
from ckpttool.extensions.proof.record import Record

if TYPE_CHECKING:
    from ckpttool.extensions.proof.live_state import LiveState, SavedDigests
    from ckpttool.integrations.live.options import LoadOptions
    from ckpttool.integrations.live.report import LoadReport
    from ckpttool.integrations.live.request import Save
    from ckpttool.integrations.live.run import Captured
    from ckpttool.saving.coordination import Ranks

LOG = logging.getLogger(__name__)


def _state_of(live: Any) -> Any:
    """Return the module that reads the state of a ``LiveEngine``, or of a ``LiveRun`` of torch."""
    if hasattr(live, "engine"):
        from ckpttool.extensions.proof import engine_state

        return engine_state
    from ckpttool.extensions.proof import torch_state

    return torch_state


def after_capture(captured: Captured, save: Save, ranks: Ranks, *, waits: bool) -> Record:
    """Return the digests of the captured state."""
    digests: dict[str, SavedDigests | None] = {}
    rank_state = save.rank_state
    for name, one in captured.states.items():
        try:
            module = _state_of(one.live)
            digests[name] = module.saved_digests(one, save, rank_state, ranks.rank, waits=waits)
        except Exception as error:  # the save does not depend on it
            digests[name] = None
            why = (
                f"{error.path}: {error.problem}" if isinstance(error, CkptError) else f"{type(error).__name__}: {error}"
            )
            if ranks.rank == 0:
                LOG.warning("the save records no digests, so that a restore is proven only by its files: %s", why)
        rank_state = None  # the first engine has the states of the ranks
    return Record(digests)


def before_load(live: Any, options: LoadOptions) -> None:
    """Check that the state of an engine can be digested after the load, if a proof is wanted.

    Raises:
        PlanError: It cannot.
    """
    if options.given.get("prove") and hasattr(live, "engine"):
        _state_of(live).check_provable(live)


def after_load(report: LoadReport, live: Any, prepared: Any, options: LoadOptions, ranks: Ranks) -> LoadReport:
    """Return the report of a load with the proof of the live state.

    Raises:
        ProofError: The live state differs from the saved one; on every rank.
    """
    module, checkpoint = _state_of(live), prepared.checkpoint
    wanted = options.given.get("prove")
    if wanted is None:
        wanted = checkpoint.digests is not None and module.is_on_accelerator(live)
    if not wanted:
        return report

    def subject() -> LiveState:
        state: LiveState = module.read_again(live)
        return state.with_given(report.client_state, report.rank_state)

    proof = prove_state(subject, checkpoint, ranks, module.scope_of(live, prepared, report))
    return replace(report, proof=proof)
