"""Actions of extensions on checkpoints that no retention rule keeps, instead of their removal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ckpttool.storage import Storage, WritableStorage
    from ckpttool.units import Advance


class Work(Protocol):
    """The planned action on one checkpoint."""

    @property
    def nbytes(self) -> int:
        """Bytes to write."""

    @property
    def freed(self) -> int:
        """Bytes that the directory loses."""

    def check_names(self, storage: Storage) -> None:
        """Check that no file of a user is in the way.

        Raises:
            CkptError: One is.
        """

    def carry_out(self, storage: WritableStorage, advance: Advance) -> object:
        """Do it.

        Args:
            storage: Storage of the checkpoint.
            advance: Called with the number of bytes written since the last call.

        Raises:
            TakenError: Another process does it, or saves there.
            CkptError: It failed; the checkpoint is as it was, unless only the removal of old files failed.
        """


class Action(Protocol):
    """An action, with the values of its rules."""

    @property
    def dtype(self) -> str:
        """Type of the weights that it keeps."""

    @property
    def every(self) -> int | None:
        """It takes only checkpoints whose step is a multiple of this, and the others are removed; None for all."""

    def refuse_several(self, several: str) -> None:
        """Refuse runs that save several engines together.

        Raises:
            ArgumentError: ``several`` is not "".
        """

    def plan(self, storage: Storage, path: str, *, jobs: int | None, memory: int, grace: float) -> Work:
        """Plan the action on a checkpoint; nothing is written.

        Args:
            storage: Its storage, for reading.
            path: Its directory, or a trainer's ``checkpoint-N`` with it.
            jobs: Threads; None for the default of the storage.
            memory: Bytes of parts in flight.
            grace: Seconds after which another machine's marker counts as left by a killed process.

        Raises:
            CkptError: It is damaged, or of a format that the action does not take.
        """
