"""The digests that a save records in the manifest: each rank sends its own, and the first one merges them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ckpttool.extensions.proof.rank_digest import RankDigest, merge

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckpttool.extensions.proof.live_state import SavedDigests

LOG = logging.getLogger(__name__)
MOST_WARNINGS = 5
"""Most warnings of a save about an inconsistent state."""


class Record:
    """The digests of this rank for the manifest: a ``saving.two_phase.Record``.

    Args:
        digests: The digests of each engine by its name, or of the run under ""; None if its parts cannot be digested.
    """

    def __init__(self, digests: Mapping[str, SavedDigests | None]) -> None:
        self._digests = digests

    def message(self) -> dict[str, dict[str, str] | None]:
        """Return the digests of each engine as JSON data; None for one that has none."""
        found: dict[str, dict[str, str] | None] = {}
        for name, own in self._digests.items():
            found[name] = None
            try:
                found[name] = None if own is None else own.compute().to_json()
            except Exception:
                LOG.exception("the save records no digests")
        return found

    def fields(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the digests of all ranks as a field of the manifest, for each engine."""
        return {name: {"digests": _merged([own[name] for own in messages])} for name in self._digests}


def _merged(messages: Sequence[Mapping[str, str] | None]) -> dict[str, Any] | None:
    """Merge the digests of all ranks; None if a rank has none."""
    own = [message for message in messages if message is not None]
    if len(own) < len(messages):
        return None
    merged = merge(RankDigest.of_ranks(own), whole=False)
    for mismatch in merged.contradictions[:MOST_WARNINGS]:
        LOG.warning("the saved state is inconsistent: %s", mismatch)
    return merged.state.to_json()
