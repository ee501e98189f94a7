"""Every error ckpttool raises on purpose.

* CkptError
    * StorageError    a file or directory cannot be listed, read or written
        * LinkError       a symbolic link leaves the checkpoint's root, and was not said to be meant
    * ContainerError  a file is not what its name says, is damaged, or is hostile
        * ChecksumError   bytes of a file do not match the checksum that was recorded when it was saved
    * LayoutError     the files are sound but do not add up to a checkpoint, or disagree with each other
    * PlanError       what is asked for cannot be produced from this checkpoint

Each carries the file, what is wrong and what to do next, and prints as one line.
"""

from __future__ import annotations

from ckpttool.messages import printable, without_secrets


class CkptError(Exception):
    """Base of all errors: one line that names the file, the problem and the next step.

    The arguments are positional so that the error survives pickling between ranks.
    """

    def __init__(self, path: str, problem: str, hint: str) -> None:
        super().__init__(path, problem, hint)
        self.path = path
        self.problem = problem
        self.hint = hint

    def __str__(self) -> str:
        # Names come from untrusted files: nothing in them may break the line, drive the terminal or fill it.
        path, problem, hint = (
            printable(without_secrets(str(self.path))),
            printable(self.problem),
            printable(self.hint),
        )
        return f"{path}: {problem}; {hint}" if hint else f"{path}: {problem}"


class StorageError(CkptError):
    """A file or directory cannot be listed, read or written."""


class LinkError(StorageError):
    """A symbolic link leaves the checkpoint's root, and was not said to be meant."""


class ContainerError(CkptError):
    """A file is not what its name says, is damaged, or is hostile."""


class ChecksumError(ContainerError):
    """Bytes of a file do not match the checksum that was recorded when it was saved."""


class LayoutError(CkptError):
    """The files do not add up to a checkpoint, or disagree with each other."""


class PlanError(CkptError):
    """What is asked for cannot be produced from this checkpoint."""
