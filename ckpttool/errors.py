"""The classes of all errors that ckpttool raises on purpose.

* CkptError
    * StorageError    a file or directory cannot be listed, read or written
        * LinkError       a symbolic link leaves the checkpoint's root, and following it was not allowed
        * PruneError      a checkpoint could not be removed or thinned
    * ContainerError  a file has another format than its name says, is damaged, or is hostile
        * TruncatedError  a file is empty, ends before its content does, or was never written
        * ChecksumError   bytes of a file do not match the checksum that the save recorded
    * LayoutError     the files are sound but do not form a checkpoint, or contradict each other
    * PlanError       this checkpoint cannot give the requested output
        * ArgumentError   an argument is wrong, whatever the checkpoint; a ``ValueError`` as well
    * ProofError      the live state of a run differs from the saved one

Each error names the file, the problem and the next step, and prints as one line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool.messages import printable, short_words, without_secrets

if TYPE_CHECKING:
    from collections.abc import Sequence


class CkptError(Exception):
    """Base of all errors: one line that names the file, the problem and the next step.

    The arguments are positional so that the error survives pickling between ranks.

    Attributes:
        half_loaded: Whether a load with ``staged=False`` had begun to change the run.
        falls_back: Whether a restore may try an older checkpoint.

    Args:
        path: File, directory or URL; or, if no file has the problem, the name of the argument, package or class:
            ``client_state``, ``ray``.
        problem: The rest of a sentence whose subject is ``path``.
        hint: The next step. It names parameters as Python does (``overwrite=True``), never flags of the command line.
        options: Parameters that ``hint`` names; the command line shows its flags in their place.
    """

    half_loaded = False
    falls_back = True

    def __init__(self, path: str, problem: str, hint: str, options: tuple[str, ...] = ()) -> None:
        super().__init__(path, problem, hint, options)
        self.path = path
        self.problem = problem
        self.hint = hint
        self.options = options

    def __str__(self) -> str:
        # Names come from untrusted files: nothing in them may break the line, drive the terminal or fill it.
        path, problem, hint = (
            printable(without_secrets(str(self.path))),
            short_words(printable(self.problem)),
            printable(self.hint),
        )
        return f"{path}: {problem}; {hint}" if hint else f"{path}: {problem}"


class StorageError(CkptError):
    """A file or directory cannot be listed, read or written."""


class LinkError(StorageError):
    """A symbolic link leaves the checkpoint's root, and following it was not allowed."""


class PruneError(StorageError):
    """A checkpoint could not be removed or thinned; ``prune`` has continued with the others.

    Attributes:
        decisions: The result for each checkpoint, as ``prune`` returns it.
    """

    decisions: Sequence[Any] = ()


class ContainerError(CkptError):
    """A file has another format than its name says, is damaged, or is hostile."""


class TruncatedError(ContainerError):
    """A file is empty, ends before its content does, or was never written, as after a killed save."""


class ChecksumError(ContainerError):
    """Bytes of a file do not match the checksum that the save recorded."""


class LayoutError(CkptError):
    """The files do not form a checkpoint, or contradict each other."""


class PlanError(CkptError):
    """This checkpoint cannot give the requested output."""


class ArgumentError(PlanError, ValueError):
    """An argument is wrong, whatever the checkpoint; its ``path`` is the argument's name."""


class ProofError(CkptError):
    """The live state of a run differs from the saved one in a tensor, a number or a hyper-parameter.

    Attributes:
        mismatches: Every part that differs, as text; the first one is in the message.
    """

    falls_back = False
    mismatches: Sequence[str] = ()
