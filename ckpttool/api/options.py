"""Arguments that the functions of this package share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttool.arguments import check_choice, check_positive, checked_size
from ckpttool.formats import Opening, open_checkpoint
from ckpttool.options import CHECKS

if TYPE_CHECKING:
    from ckpttool.execution.checks import Check, ReadChecks
    from ckpttool.formats import Source
    from ckpttool.model import Checkpoint
    from ckpttool.plan import SourceFile
    from ckpttool.units import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a command: opening its source, its work and its reports.

    Raises:
        ArgumentError: A value is outside its range; raised by the constructor, before any file is opened.
    """

    tag: str | None = None
    """Tag of the checkpoint in a root; None for the one that ``latest`` names."""
    jobs: int | None = None
    """Threads. None: one for each core, up to four; 16 where a storage is remote."""
    memory: int | str | None = None
    """Bytes, or a text like "256MB", that requests in flight may take where storages are remote; None: 256 MB. Between
    local files a few MB are used."""
    progress: Progress | None = None
    """Called with (bytes done, bytes in all)."""
    check: Check = "read"
    """Recorded CRC-32 to compare while reading: "read" for records that are read whole; "full" also for records that
    are read in part, which reads the rest of them; "off" for none."""
    prove: bool = False
    """Digest the source and the output, and commit only if they are equal."""
    dry_run: bool = False
    """Plan, but write nothing."""
    resume: bool | None = False
    """Continue from the files that an earlier run completed; None where a command cannot."""
    overwrite: bool | None = False
    """Replace an existing output; None where a command cannot."""
    allow_partial: bool = False
    """Accept a checkpoint whose files cannot be proven to be all."""
    trust_names: bool = False
    """Accept renamed files (the name recorded inside differs). By default they are refused."""
    module_only: bool = False
    """Accept a checkpoint with the files of the model alone."""
    opening: Opening = Opening()
    """How storages are opened."""

    def __post_init__(self) -> None:
        check_choice("check", self.check, CHECKS)
        check_positive("jobs", self.jobs)
        if self.memory is not None:
            checked_size("memory", self.memory)

    @property
    def memory_bytes(self) -> int:
        """``memory`` in bytes."""
        from ckpttool.execution.run import memory_bytes

        return memory_bytes(self.memory)

    def open(self, src: Source) -> Checkpoint:
        """Open the source of a command.

        Args:
            src: As for ``open_checkpoint``.

        Raises:
            CkptError: The checkpoint is missing or damaged.
        """
        return open_checkpoint(
            src,
            tag=self.tag,
            opening=self.opening,
            trust_names=self.trust_names,
            module_only=self.module_only,
        )

    def read_checks(self, sources: tuple[SourceFile, ...], checkpoint: Checkpoint) -> ReadChecks | None:
        """The CRC-32 comparisons of one command; None for ``check="off"``."""
        from ckpttool.execution.checks import checks_for

        return checks_for(sources, checkpoint, self.check)
