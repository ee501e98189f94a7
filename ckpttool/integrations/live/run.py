"""A live run as a manager sees it: engines of DeepSpeed, or the model and the optimizer of torch."""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ckpttool.errors import CkptError, PlanError
from ckpttool.registry import hooks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckpttool.integrations.live.files import CapturedFiles
    from ckpttool.integrations.live.host_memory import HostMemory
    from ckpttool.integrations.live.options import LoadOptions
    from ckpttool.integrations.live.report import LoadReport
    from ckpttool.integrations.live.request import Save
    from ckpttool.model import Checkpoint
    from ckpttool.saving.coordination import Ranks
    from ckpttool.saving.two_phase import Index, Request


class Ready(NamedTuple):
    """A save that a rank is ready to begin."""

    request: Request
    live: Any
    """The state that ``Run.capture`` saves."""
    own_files: Mapping[str, Any]
    """Content of the file of the rank state, by its name; empty without one."""


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """The state of this rank at a save."""

    files: CapturedFiles
    states: Mapping[str, Any]
    """The captured state, for extensions: ``CapturedEngine`` by name of the engine, or ``CapturedChunks`` under ""."""
    index: Index | None = None
    """The files that rank 0 writes after all others."""


class Repeated:
    """Texts that every rank sends in each save: one that has not changed is sent as its hash."""

    def __init__(self) -> None:
        self._own: dict[str, str] = {}
        """The hash of each text of this rank in the exchange that runs."""
        self._agreed: dict[str, str] = {}
        """The hashes of the last exchange that succeeded: rank 0 has those texts."""
        self._known: dict[int, dict[str, str]] = {}
        """On rank 0, the texts of each rank."""

    def message(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Return the message of this rank; until ``agree``, the next one has all texts.

        Args:
            texts: The texts by key; none begins with "=".
        """
        agreed, self._agreed = self._agreed, {}
        self._own = {key: _hash(text) for key, text in texts.items()}
        return {key: own if own == agreed.get(key) else texts[key] for key, own in self._own.items()}

    def texts(self, messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
        """Return on rank 0 the texts of all ranks, from their messages; equal texts are one object.

        Raises:
            PlanError: A rank has sent the hash of a text that rank 0 does not have.
        """
        one: dict[str, str] = {}
        for rank, message in enumerate(messages):
            known = self._known.get(rank, {})
            if any(text.startswith("=") and text != _hash(known.get(key, "")) for key, text in message.items()):
                problem = f"is not of the same saves on ranks 0 and {rank}"
                raise PlanError("CheckpointManager", problem, "make it on every rank at the same time")
            whole = {key: known[key] if text.startswith("=") else text for key, text in message.items()}
            self._known[rank] = {key: one.setdefault(text, text) for key, text in whole.items()}
        return [*self._known.values()]

    def agree(self) -> None:
        """Note that the exchange has succeeded."""
        self._agreed = self._own


def _hash(text: str) -> str:
    return f"={hashlib.sha256(text.encode()).hexdigest()[:16]}"


@dataclass(slots=True, eq=False)
class Kept:
    """Objects of a run that a manager reuses in the next save."""

    scratch_root: str | None
    """A directory on the disk of the checkpoints; None if they are remote."""
    in_background: bool
    """Whether saves return before the checkpoint is committed."""
    layout: str = "nested"
    """Names of the entries of a torch run: a key of ``targets.dcp.LAYOUTS``."""
    checked: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    """The engines with a save that was found to be restorable."""
    warned: bool = False
    """Whether the user was warned that gradients are not saved."""
    repeated: Repeated = field(default_factory=Repeated)
    """The parts of the ranks in the last save."""
    places: Repeated = field(default_factory=Repeated)
    """Where each rank wrote its parts in the last save."""
    memory: dict[str, HostMemory] = field(default_factory=dict)
    """Buffers for copies of the state, by name of the engine."""

    def host_memory(self, name: str, *, on_device: bool) -> HostMemory | None:
        """Return buffers for a copy of the state; None if it can be written directly from host memory.

        Args:
            name: Name of the engine.
            on_device: Whether its state is on an accelerator.
        """
        if name not in self.memory and (self.in_background or on_device):
            from ckpttool.integrations.live.host_memory import HostMemory  # imports torch

            self.memory[name] = HostMemory(pinned=on_device)
        return self.memory.get(name)


class Run(Protocol):
    """One rank of a live run: the objects that are saved and restored together."""

    objects: Mapping[str, Any]
    """The engines by name, or the model under ""."""
    kind: dict[str, Any]
    """Facts that are the same on all ranks in every call: JSON data."""
    several: str
    """"several engines", whose checkpoints no rule of a manager can thin; "" otherwise."""

    is_folder: bool
    """True if a framework's folder is the directory of the checkpoint; False if it contains the directory of a tag."""

    def asked(self, save: Save) -> dict[str, Any]:
        """Return the arguments of a save that must be the same on all ranks."""

    def ready(self, save: Save, ranks: Ranks, *, provenance: bool) -> Ready:
        """Check the arguments of a save on this rank, and describe the run; nothing is copied or gathered.

        Raises:
            ArgumentError: An argument is wrong.
            PlanError: A restore would not know the optimizer.
        """

    def capture(self, ready: Ready, save: Save, ranks: Ranks, kept: Kept, directory: str) -> Captured:
        """Capture the state of this rank, on every rank; the run may continue when it returns, unless it waits.

        Args:
            ready: As ``ready`` returned it, with the tag of all ranks.
            save: The arguments.
            ranks: The ranks of the run.
            kept: Objects of earlier saves.
            directory: Directory of the checkpoint.

        Raises:
            CkptError: The state cannot be saved, or not restored; the same on every rank.
        """

    def check(self, options: LoadOptions) -> None:
        """Check that a restore can begin.

        Raises:
            CkptError: It cannot.
        """

    def restore(self, opened: Sequence[Checkpoint], options: LoadOptions, ranks: Ranks) -> list[LoadReport]:
        """Load an open checkpoint into each of ``objects``: all are read before the first one changes.

        Raises:
            CkptError: A checkpoint does not fit or cannot be read; on every rank, before the run changed.
        """


def thin_error(checkpoint: Checkpoint) -> PlanError:
    """Return the error of a load that wants more than the weights of a thin checkpoint."""
    problem = "is thin: prune has removed its optimizer states, and kept the weights"
    return PlanError(checkpoint.location, problem, "load it with weights_only=True, or choose a whole checkpoint")


@contextlib.contextmanager
def changing_run(location: str, options: LoadOptions) -> Iterator[None]:
    """Context manager: with ``staged=False``, an error says that the run is half loaded.

    Args:
        location: The checkpoint.
        options: The options of the load.
    """
    try:
        yield
    except Exception as error:
        if options.staged or options.dry_run:
            raise
        raise half_loaded(error, location) from error


def after_load(report: LoadReport, live: Any, prepared: Any, options: LoadOptions, ranks: Ranks) -> LoadReport:
    """Return the report of a load, with what extensions add to it; call it on every rank, after the load.

    Args:
        report: The report.
        live: The ``LiveEngine``, or the ``LiveRun`` of torch.
        prepared: The ``Prepared`` or ``PreparedRun`` that was loaded.
        options: The options of the load.
        ranks: The ranks that take part.
    """
    for hook in () if options.dry_run else hooks("after_load"):
        report = hook(report, live, prepared, options, ranks)
    return report


def half_loaded(error: Exception, location: str) -> CkptError:
    """Return an error that says that the run is half loaded.

    Args:
        error: The error that stopped the load.
        location: The checkpoint, for an error that names no file.
    """
    kind: type[CkptError] = PlanError
    path, problem = location, f"{type(error).__name__}: {error}"
    if isinstance(error, CkptError):
        kind, path, problem = type(error), error.path, error.problem
    made = kind(path, problem, "the run is half loaded: restore another checkpoint, or start again")
    made.half_loaded = True
    return made
