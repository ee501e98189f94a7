"""The action on checkpoints that no retention rule keeps: ``thin`` and ``thin_every`` of ``prune`` and managers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.arguments import check_choice, check_positive
from ckpttool.errors import ArgumentError

if TYPE_CHECKING:
    from ckpttool.extensions.thinning.replacement import Thinning
    from ckpttool.storage import Storage

DTYPES = ("bf16", "fp32")
"""Types of the weights of thin checkpoints."""


@dataclass(frozen=True, slots=True)
class Thin:
    """The action, with its rules.

    Raises:
        ArgumentError: A rule is malformed.
    """

    thin: str | None = None
    """Type of the weights; None for bf16."""
    thin_every: int | None = None
    """Thin only those whose step is a multiple of this, and remove the others."""

    def __post_init__(self) -> None:
        check_positive("thin_every", self.thin_every)
        if self.thin is not None:
            check_choice("thin", self.thin, DTYPES)

    @property
    def dtype(self) -> str:
        """Type of the weights."""
        return self.thin or "bf16"

    @property
    def every(self) -> int | None:
        """It takes only checkpoints whose step is a multiple of this."""
        return self.thin_every

    def refuse_several(self, several: str) -> None:
        """Refuse runs that save several engines together.

        Raises:
            ArgumentError: ``several`` is not "".
        """
        if several:
            problem = f"is not possible for a checkpoint of {several}"
            raise ArgumentError("thin", problem, "leave out thin and thin_every")

    def plan(self, storage: Storage, path: str, **options: Any) -> Thinning:
        """Plan the thin files of a checkpoint; nothing is written.

        Args:
            storage: Its storage, for reading.
            path: Its directory, or a trainer's ``checkpoint-N`` with it.
            options: Fields of ``ThinOptions``.

        Raises:
            CkptError: It is damaged or of another format.
        """
        from ckpttool.extensions.thinning.replacement import ThinOptions, plan_thinning  # few runs need it

        return plan_thinning(storage, path, ThinOptions(dtype=self.dtype, **options))
