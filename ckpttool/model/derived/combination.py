"""Number the files of several checkpoints on, so that states of all of them can be read by one plan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.model.places import Renumbered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.model import Checkpoint, CheckpointFile, Replica, State


class Combination:
    """The files of several checkpoints.

    Args:
        checkpoints: The checkpoints; file numbers of the first stay.
    """

    def __init__(self, checkpoints: Sequence[Checkpoint]) -> None:
        self.files: list[CheckpointFile] = []
        """All files, each with its directory and storage."""
        self.replicas: list[Replica] = []
        """The replicas of all checkpoints, for consistency checks."""
        self._before: list[int] = []
        for number, checkpoint in enumerate(checkpoints):
            self._before.append(len(self.files))
            self.files += [
                replace(f, directory=f.directory or checkpoint.location, storage=f.storage or checkpoint.storage)
                for f in checkpoint.files
            ]
            self.replicas += [
                replace(r, state=self.state(number, r.state), copy=self.state(number, r.copy))
                for r in checkpoint.replicas
            ]

    def state(self, number: int, state: State) -> State:
        """Return a state of a checkpoint, with the numbers that its files have here.

        Args:
            number: Index of the checkpoint.
            state: One of its states.
        """
        before = self._before[number]
        if not before or state.formula is not None:
            return state
        others = tuple(self.state(number, other) for other in state.mean_with)
        return replace(state, place=Renumbered(state.place, before), mean_with=others)
