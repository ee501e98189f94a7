"""The files that a rank saves, captured from its live run."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpttool.containers.torch_file import MAX_PICKLE_BYTES
from ckpttool.containers.unpickler import Truncated, unpickle
from ckpttool.errors import CkptError, ContainerError, PlanError
from ckpttool.formats.sidecars import is_rank_state
from ckpttool.formats.zero.module import ENGINE_KEYS
from ckpttool.integrations.torch.objects import unknown_classes
from ckpttool.integrations.torch.pickling import describe
from ckpttool.messages import brief
from ckpttool.saving.files import ArchiveFile

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ckpttool.saving.files import OutgoingFile

LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class CapturedFiles:
    """The files that this rank writes."""

    files: list[OutgoingFile] = field(default_factory=list)
    """Files of the tag's directory."""
    root_files: dict[str, bytes] = field(default_factory=dict)
    """Files of the root: DeepSpeed's scripts."""
    failed: CkptError | None = None
    """Error of an incomplete capture; None if it is complete."""
    scratch: list[str] = field(default_factory=list)
    """Scratch directories with some of the files."""
    unknown: dict[str, list[str]] = field(default_factory=dict)
    """By file: classes of its objects that a restore builds only with ``allow``."""

    def check_pickles(self, allow: Collection[str] = ()) -> None:
        """Parse the pickles, as a restore does; record a failure in ``failed`` instead of raising it.

        Args:
            allow: Classes that the restore may build.
        """
        try:
            self._check_pickles(allow)
        except Exception as error:  # the other ranks wait for this rank, and raise it, too
            LOG.exception("the files of this rank could not be checked")
            problem = f"could not be checked: {type(error).__name__}: {error}"
            self.failed = PlanError("the save", problem, "see the log of that rank")

    def _check_pickles(self, allow: Collection[str]) -> None:
        for file in self.files if self.failed is None else ():
            if not isinstance(file, ArchiveFile):
                continue
            try:
                parsed = unpickle(file.pickled, path=file.name)
            except (ContainerError, Truncated) as error:
                problem = getattr(error, "problem", "its pickle ends too early")
                self.failed = PlanError(file.name, f"could not be read again: {problem}", hint_of(file.name))
                return
            if classes := unknown_classes(parsed.value, allow):
                self.unknown[file.name] = classes
            mismatched = [
                k
                for k, ref in parsed.storages.items()
                if k not in file.payloads or file.payloads[k].nbytes != ref.nbytes
            ]
            if mismatched or len(file.pickled) > MAX_PICKLE_BYTES:
                problem = (
                    f"storage {mismatched[0]} has another size than its tensors"
                    if mismatched
                    else "its pickle is too large"
                )
                self.failed = PlanError(file.name, f"could not be read again: {problem}", hint_of(file.name))
                return

    def release(self) -> None:
        """Release the files and the scratch directory."""
        self.files.clear()
        for directory in self.scratch:
            shutil.rmtree(directory, ignore_errors=True)


def merged(parts: Sequence[CapturedFiles]) -> CapturedFiles:
    """Return the files of several parts of a run as the files of one save."""
    return CapturedFiles(
        files=[file for part in parts for file in part.files],
        root_files={name: data for part in parts for name, data in part.root_files.items()},
        failed=next((part.failed for part in parts if part.failed is not None), None),
        scratch=[directory for part in parts for directory in part.scratch],
    )


def hint_of(name: str, keys: list[object] | None = None) -> str:
    """Return the hint of an error of a file that cannot be pickled, or not read again.

    Args:
        name: The file.
        keys: Path of keys to the value, if known.
    """
    keys = keys or []
    if keys[:1] == ["extra"]:
        return f"check the values in {' > '.join(brief(key) for key in keys[1:])} of extra"
    if is_rank_state(name):
        return "check the values in rank_state"
    if "optim_states" in name or (keys and keys[0] in ENGINE_KEYS):
        return f"check the values in {' > '.join(brief(key) for key in keys) or 'the optimizer'}"
    return "check the values in client_state"


def unpicklable(value: Any) -> list[object]:
    """Return the path of keys to a value that cannot be pickled."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        try:
            describe(item)
        except Exception:
            return [key, *unpicklable(item)]
    return []
