"""The live state of one rank, and its digests, taken in place.

The parts of all ranks are then merged (``rank_digest``): replicas must be equal, and parts must cover each tensor once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckpttool import digests
from ckpttool.checksums import crc32
from ckpttool.dtypes import BY_TORCH_NAME
from ckpttool.extensions.proof.rank_digest import BOX, COPY, NO_SUM, RankDigest, RankFacts, WholeTensor
from ckpttool.extensions.proof.state_digest import NOT_HYPERPARAMETERS, PYTHON, items_of, leaves
from ckpttool.integrations.torch.digest import as_array, digest, tensor_text
from ckpttool.integrations.torch.live import is_number
from ckpttool.model.items import canonical

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.integrations.torch.live import Piece


def place_of(piece: Piece) -> int:
    """Return the identifier of a part, the same on all ranks that have it; see ``RankDigest.rows``."""
    if piece.first is not None:
        return piece.first
    text = f"{piece.starts} {tuple(piece.tensor.shape)}".encode()
    return BOX | int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def digest_of(piece: Piece) -> int:
    """Return the digest of the elements of a part, computed on the device that has them."""
    return digest(piece.tensor, piece.starts if piece.first is None else piece.first, piece.shape)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LiveState(RankFacts):
    """The live state of one rank."""

    pieces: Sequence[Piece]
    """Its parts of all tensors; a shard may be empty."""

    def with_given(self, client_state: Mapping[str, Any], rank_state: Any) -> LiveState:
        """Return the state with the client state, and with the state of this rank that the user gives, or None."""
        own = {} if rank_state is None else values_of("rank_state", rank_state)
        values = {**self.values, **values_of("client_state", client_state)}
        return replace(self, values=values, own={**self.own, **own})

    def _digests(self) -> list[int]:
        if torch.get_num_threads() == 1:
            return [digest_of(piece) for piece in self.pieces]
        with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="ckpttool-digest") as pool:
            return list(pool.map(digest_of, self.pieces))

    def digest(self, found: Sequence[tuple[int, int]] | None = None) -> RankDigest:
        """Digest the state of this rank.

        Args:
            found: Digest and checksum of each piece, if they are known; see ``RankDigest.rows``.
        """
        values = [(one, NO_SUM) for one in self._digests()] if found is None else found
        rows = [
            [place_of(p), p.tensor.numel(), value & digests.MASK, value >> 64, checksum]
            for p, (value, checksum) in zip(self.pieces, values, strict=True)
        ]
        return RankDigest(
            tensors=[WholeTensor(p.key, p.name, p.dtype, p.shape, p.is_buffer) for p in self.pieces],
            rows=np.array(rows, dtype=np.uint64).reshape(-1, 5),
            **{name: getattr(self, name) for name in RankFacts.__dataclass_fields__},
        )


class SavedDigests:
    """The digests that a save records, computed in any thread.

    A checksum, which takes a tenth of the time, shows whether a part that another rank digests has the same bytes.

    Args:
        state: The live state of this rank.
        held: Parts with the bytes that the save writes, by index: if the train loop continues before the save has
            ended, all others are digested at once.
        copies: The parts that other ranks have too, by index: whether another one digests it.
        waits: Whether the train loop waits for the save.
    """

    def __init__(self, state: LiveState, held: Mapping[int, Piece], copies: Mapping[int, bool], *, waits: bool) -> None:
        self._state = replace(state, pieces=[held.get(n, piece) for n, piece in enumerate(state.pieces)])
        self._copies = copies
        self._known = {n: self._one(n) for n in range(len(state.pieces)) if n not in held and not waits}

    def compute(self) -> RankDigest:
        """Return the digests of this rank."""
        return self._state.digest([self._known.get(n) or self._one(n) for n in range(len(self._state.pieces))])

    def _one(self, n: int) -> tuple[int, int]:
        """Return the digest of a part, and its checksum as ``RankDigest.rows`` has it, if other ranks have the part."""
        piece, is_copy = self._state.pieces[n], self._copies.get(n)
        if is_copy is None:
            return digest_of(piece), NO_SUM
        checksum = crc32(as_array(piece.tensor).reshape(-1).view(np.uint8).data)
        return (0, checksum | COPY) if is_copy else (digest_of(piece), checksum)


def number_of(key: str, value: Any, parameter: Any) -> float | None:
    """Return an optimizer state that is one number for a parameter; None for any other state."""
    if not is_number(key, value, parameter):
        return None
    return float(value.full_tensor() if hasattr(value, "full_tensor") else value)


def type_of(number: Any) -> str:
    """Return the type of a number of ``number_of``."""
    known = BY_TORCH_NAME.get(str(getattr(number, "dtype", "")).removeprefix("torch."))
    return PYTHON if known is None else known.name


def options_of(group: Mapping[str, Any]) -> dict[str, str]:
    """Return the hyper-parameters of a parameter group as text."""
    return {key: canonical(value, tensor_text) for key, value in group.items() if key not in NOT_HYPERPARAMETERS}


def scheduler_values(scheduler: Any) -> dict[str, str]:
    """Return the state of a scheduler, or of several by name, as text by path."""
    several = scheduler if isinstance(scheduler, Mapping) else {"": scheduler}
    states = {name: one.state_dict() if hasattr(one, "state_dict") else {} for name, one in several.items()}
    return leaves("scheduler", states[""] if [*states] == [""] else states, tensor_text)


def values_of(kind: str, state: Any) -> dict[str, str]:
    """Return the items of plain data as text, by "kind.key"; data of another form as one item."""
    if not isinstance(state, Mapping):
        return {kind: canonical(state, tensor_text)}
    return {f"{kind}.{key}": canonical(value, tensor_text) for key, value in items_of(state)}
