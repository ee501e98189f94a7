"""The functions that the core calls at saves and loads: each rank digests its state, and the first one merges them."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.errors import CkptError
from ckpttool.extensions.proof.api import prove_state
from ckpttool.extensions.proof.comparison import Scope
from ckpttool.extensions.proof.rank_digest import RankDigest, merge

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.extensions.proof.live_state import LiveState, SavedDigests
    from ckpttool.integrations.live.options import LoadOptions
    from ckpttool.integrations.live.report import LoadReport
    from ckpttool.integrations.live.request import Save
    from ckpttool.integrations.live.run import Captured
    from ckpttool.saving.coordination import Ranks

LOG = logging.getLogger(__name__)
MOST_WARNINGS = 5
"""Most warnings of a save about an inconsistent state."""


class DigestRecord:
    """The digests of this rank for the manifest: a ``saving.two_phase.ManifestRecord``.

    Args:
        digests: The digests of each engine by its name, or of the run under ""; None if its parts cannot be digested.
    """

    def __init__(self, digests: Mapping[str, SavedDigests | None]) -> None:
        self._digests = digests

    def message(self) -> dict[str, dict[str, str] | None]:
        """Return the digests of each engine as JSON data; None for one that has none."""
        return {name: _computed(own) for name, own in self._digests.items()}

    def fields(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the digests of all ranks as a field of the manifest, for each engine."""
        return {name: {"digests": _merged([own[name] for own in messages])} for name in self._digests}


def _computed(digests: SavedDigests | None) -> dict[str, str] | None:
    try:
        return None if digests is None else digests.compute().to_json()
    except Exception:
        LOG.exception("the save records no digests")
        return None


def _merged(messages: Sequence[Mapping[str, str] | None]) -> dict[str, Any] | None:
    """Merge the digests of all ranks; None if a rank has none."""
    own = [message for message in messages if message is not None]
    if len(own) < len(messages):
        return None
    merged = merge(RankDigest.of_ranks(own), whole=False)
    for mismatch in merged.contradictions[:MOST_WARNINGS]:
        LOG.warning("the saved state is inconsistent: %s", mismatch)
    return merged.state.to_json()


def _module_of(live: Any) -> Any:
    """Return the module that reads the state of a ``LiveEngine``, or of a ``LiveRun`` of torch."""
    if hasattr(live, "engine"):
        from ckpttool.extensions.proof import engine_state

        return engine_state
    from ckpttool.extensions.proof import torch_state

    return torch_state


def after_capture(captured: Captured, save: Save, ranks: Ranks, *, waits: bool) -> DigestRecord:
    """Return the record of the captured state; other parts are digested at once, unless the train loop waits."""
    digests: dict[str, SavedDigests | None] = dict.fromkeys(captured.states)
    rank_state = save.rank_state
    for name, one in captured.states.items():
        try:
            digests[name] = _module_of(one.live).saved_digests(one, save, rank_state, ranks.rank, waits=waits)
        except Exception as error:  # the save does not depend on it
            what = error.path if isinstance(error, CkptError) else type(error).__name__
            why = f"{what}: {getattr(error, 'problem', error)}"
            if ranks.rank == 0:
                LOG.warning("the save records no digests, so that a restore is proven only by its files: %s", why)
        rank_state = None  # the first engine has the states of the ranks
    return DigestRecord(digests)


def before_load(live: Any, options: LoadOptions) -> None:
    """Check that the state of an engine can be digested after the load, if a proof is wanted.

    Raises:
        PlanError: It cannot.
    """
    if options.given.get("prove") and hasattr(live, "engine"):
        _module_of(live).check_provable(live)


def after_load(report: LoadReport, live: Any, prepared: Any, options: LoadOptions, ranks: Ranks) -> LoadReport:
    """Return the report of a load with the proof of the live state.

    Raises:
        ProofError: The live state differs from the saved one; on every rank.
    """
    module, checkpoint, fitted = _module_of(live), prepared.checkpoint, prepared.fitted
    wanted = options.given.get("prove")
    if not (checkpoint.digests is not None and module.is_on_accelerator(live) if wanted is None else wanted):
        return report

    def subject() -> LiveState:
        state: LiveState = module.read_again(live)
        return state.with_given(report.client_state, report.rank_state)

    without, rounds = module.left_out(live, prepared, report)
    scope = Scope(
        weights_only=report.weights_only,
        without_optimizer=not (report.optimizer or report.weights_only),
        without=frozenset(without | ({"groups"} if report.groups_kept else set())),
        without_names=frozenset(report.unexpected),
        without_states_of=frozenset() if fitted is None else fitted.fresh,
        rounds=frozenset(rounds),
        casts=report.method == "planned",
    )
    return replace(report, proof=prove_state(subject, checkpoint, ranks, scope))
