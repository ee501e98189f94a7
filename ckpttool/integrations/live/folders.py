"""Save an engine and the files of a training framework as one commit, each checkpoint in a folder of its own.

A framework (Hugging Face Trainer, Accelerate) writes small files beside DeepSpeed's directory: schedulers, its own
state, configurations. They are saved twice. In the checkpoint's folder they have the framework's names, so that the
framework reads them without ckpttool. And each rank's files are in its rank state, under the manifest: a restore takes
those, which always belong to the engine's state, even if a run was killed between the files and the commit.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import posixpath
import re
import sys
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from ckpttool.catalog.restore_order import candidates, newest, of_folder
from ckpttool.catalog.runs import trainer_commits
from ckpttool.errors import ArgumentError, CkptError, LayoutError, StorageError
from ckpttool.formats import open_whole
from ckpttool.formats.layouts import Place
from ckpttool.formats.nested import why_kept
from ckpttool.formats.sidecars import PATTERNS
from ckpttool.formats.unfinished import is_unfinished
from ckpttool.formats.weights import OPTIMIZER
from ckpttool.integrations.live.manager import CheckpointManager
from ckpttool.integrations.live.options import LoadOptions, SaveOptions
from ckpttool.integrations.live.rank_states import RankStates
from ckpttool.integrations.live.request import DISTRIBUTED, Save
from ckpttool.integrations.patches import write_file
from ckpttool.integrations.torch.collectives import open_together, ranks_of_process_group
from ckpttool.integrations.torch.rng import rng_state, set_rng_state
from ckpttool.integrations.torch.run_state import load_options
from ckpttool.saving.claim import check_not_only, check_not_pinned
from ckpttool.storage import connect, local_path, open_storage, scheme_of
from ckpttool.storage.confined import confined

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from ckpttool.formats.scan import Found
    from ckpttool.integrations.live.report import LoadReport, SaveReport
    from ckpttool.integrations.live.request import FrameworkFiles
    from ckpttool.integrations.live.run import Run
    from ckpttool.integrations.ray_run import RayRun
    from ckpttool.model import Checkpoint
    from ckpttool.saving.coordination import Ranks
    from ckpttool.storage import Storage

LOG = logging.getLogger(__name__)
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*", "adapter_model.bin")
"""Names of files with weights that frameworks and exports write into a checkpoint's folder."""
STATIC = (*PATTERNS, "training_args.bin", "adapter_config.json", "README.md")
"""Names of files that no resume reads."""
NO_WHOLE = "holds no whole checkpoint"
"""Problem of a folder that is not an unfinished save of ckpttool."""
RNG = "rng"
"""Key of the random number state in a rank state."""
WITHIN_EPOCH = "within_epoch"
"""Key in a rank state: whether the loop was between two batches of an epoch, so that its data loader has already drawn
the random numbers of the epoch."""
FILES = "files"
"""Key of the framework's files in a rank state: ``torch.uint8`` tensors by path relative to the folder."""

_POSSIBLE = (
    (r"(pass|load it with) weights_only=True", "start a new run from its weights, which ckpttool.consolidate writes"),
    (r"pass strict=False, and they.*", "build the model of the saved run"),
)
"""Patterns in hints of ``ckpttool.load``, and the hints in their place where a framework loads."""


def show_log() -> None:
    """Write the log of ckpttool to stderr, unless the program has configured logging.

    The user of a trainer sees resumes, commits and exports among its lines. Ranks after the first log only warnings.
    """
    log = logging.getLogger("ckpttool")
    if log.hasHandlers() or log.level:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("ckpttool: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.WARNING if int(os.environ.get("RANK") or 0) else logging.INFO)


class Folders:
    """Saves and loads checkpoints, each in a folder of its own; make one on every rank, with the same arguments.

    Args:
        root: A directory or URL on the storage of all checkpoints; in a worker of Ray Train None for the directory of
            the run: each save is then reported to Ray.
        options: How to save, and the classes that a load may build.
        on_save: Called on every rank after each save, in the thread of the save.
        layout: Names of the entries in saves of torch runs: "nested", "accelerate", ...
    """

    def __init__(
        self,
        root: str | None,
        options: SaveOptions,
        *,
        on_save: Callable[[SaveReport], None] | None = None,
        layout: str = "nested",
    ) -> None:
        self.run = current_run() if root is None else None
        """The run of Ray Train that the saves are reported to."""
        if self.run is not None:
            root, self.storage = self.run.root, self.run.storage
        elif root is None:
            raise ArgumentError("root", "is missing outside of Ray Train", "pass a directory or URL")
        else:
            self.storage = open_storage(local_path(root), options.storage_options)
        self._manager = CheckpointManager(
            root,
            layout=layout,
            async_save=options.async_save,
            timeout=options.timeout,
            allow=options.allow,
            on_save=on_save,
            storage=self.storage,
        )
        self._options = options
        self._unreported: tuple[str, Mapping[str, float]] | None = None
        self.root = self._manager.root
        """The root, as an absolute path or a URL."""
        self._loads = LoadOptions(allow=tuple(sorted(options.allow)), given=options.given)

    @cached_property
    def ranks(self) -> Ranks:
        """The ranks of the run; they meet at the first call."""
        return ranks_of_process_group("folders", self._options.timeout)

    def source(self, folder: str) -> Storage:
        """Return the storage to read a folder from, which may differ from the root's."""
        same = scheme_of(folder) == scheme_of(self.root)
        storage = self.storage if same else open_storage(folder, self._options.storage_options)
        return confined(storage, folder, follow_links=False)

    def save(  # noqa: PLR0913  the arguments of ``CheckpointManager.save``
        self,
        run: Run,
        folder: str,
        *,
        tag: str | None,
        files: Mapping[str, bytes],
        static: Collection[str] = (),
        hidden: Collection[str] = (),
        client_state: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        exclude_frozen: bool = False,
        before: tuple[str, int] | None = None,
        within_epoch: bool = False,
        written: FrameworkFiles = DISTRIBUTED,
    ) -> None:
        """Save the state of a run and this rank's files, on every rank at the same step; replaces an existing save.

        The folder of a torch run is the checkpoint itself; the folder of engines contains the directory of their tag.

        Args:
            run: The run; the same in each call.
            folder: Directory or URL of this checkpoint.
            tag: Name of DeepSpeed's directory in it; None for DeepSpeed's own.
            files: Files that this rank adds to the folder, by path relative to it.
            static: Those of them that no resume needs, such as a tokenizer.
            hidden: Those of them that this rank does not write into the folder, because another rank does.
            client_state: State to save with the checkpoint; ``restore`` returns it.
            metrics: Numbers for ``keep_best``; the manifest gets the first rank's.
            exclude_frozen: Leave frozen parameters out.
            before: Attempt and number of the previous commit of the run.
            within_epoch: Whether more batches of the epoch follow, for ``was_within_epoch``.
            written: How the framework itself writes the state of a torch run.

        Raises:
            CkptError: This save failed, or the previous one in the background. Nothing was committed.
        """
        self.wait()
        own = {name: _as_tensor(data) for name, data in files.items() if name not in static}
        shown = {name: data for name, data in files.items() if name not in hidden}
        root, name = posixpath.split(folder) if run.is_folder else (folder, tag)
        arguments = Save(
            tag=name,
            save_latest=not run.is_folder,
            client_state=client_state or {},
            metrics=metrics or {},
            overwrite=True,
            exclude_frozen=exclude_frozen,
            before=before,
            rank_state={RNG: rng_state(), FILES: own, WITHIN_EPOCH: within_epoch},
            written=written,
            **{"files" if run.is_folder else "root_files": shown},
        )
        self._manager.save_into(root, run, arguments)
        self._unreported = folder, metrics or {}
        if not self._options.async_save:
            self.wait()

    def wait(self) -> None:
        """Wait until the save in the background is committed, and report it to Ray Train; on every rank.

        Raises:
            CkptError: It failed.
        """
        unreported, self._unreported = self._unreported, None
        self._manager.wait()
        if unreported is not None and self.run is not None:
            self.run.report(*unreported)

    def report_restored(self, folder: str, metrics: Mapping[str, float]) -> None:
        """Report a restored checkpoint to Ray Train if Ray does not know it, as its worker died before the report."""
        run = self.run
        if run is None or posixpath.dirname(folder) != self.root:
            return
        if self.ranks.on_first(self.root, lambda: posixpath.basename(folder) not in run.reported()):
            run.report(folder, metrics)

    def skip(self, path: str, error: CkptError) -> None:
        """As ``CheckpointManager.skip``; on every rank."""
        if self.ranks.rank == 0:
            self._manager.skip(path, error)

    def open(self, path: str) -> Checkpoint:
        """Open the checkpoint in the directory of a tag, on every rank.

        Raises:
            CkptError: It is incomplete or damaged; the same on every rank.
        """
        storage = self.source(posixpath.dirname(path))
        return open_together(path, storage, partial(open_whole, storage, path), self.ranks)

    def write_files(self, checkpoint: Checkpoint, directory: str) -> None:
        """Write the framework's files for this rank into a local directory, on every rank.

        These are the files of the first rank and, on as many ranks as saved, this rank's own. Of a checkpoint that the
        framework saved without ckpttool they are the files of its folder.

        Raises:
            CkptError: They are missing or damaged; on every rank.
        """
        self.ranks.together(checkpoint.location, partial(self._write_files, checkpoint, directory))

    def _write_files(self, checkpoint: Checkpoint, directory: str) -> None:
        if not self._write_own_files(checkpoint, directory):
            alone = checkpoint.format in {"dcp", "safetensors", "torch"}  # the folder itself
            folder = checkpoint.location if alone else posixpath.dirname(checkpoint.location)
            _copy_files(connect(checkpoint.storage), folder, directory)

    def _write_own_files(self, checkpoint: Checkpoint, directory: str) -> bool:
        states = RankStates(checkpoint, load_options(checkpoint, self._loads))
        if not states:
            return False
        found = False
        for rank in dict.fromkeys([0, self.ranks.rank] if len(states) == self.ranks.size else [0]):
            state = states[rank]
            files = state.get(FILES) if isinstance(state, dict) else None
            found = found or isinstance(files, dict)
            for name, data in (files or {}).items():
                _write(checkpoint.location, directory, name, data)
        return found

    def restore(
        self, run: Run, checkpoint: Checkpoint, *, strict: bool = True, weights_only: bool = False
    ) -> LoadReport:
        """Load an open checkpoint into the run, on every rank; their number, stage and mesh may have changed.

        Raises:
            CkptError: The checkpoint does not fit or is damaged; on every rank, before the run changed.
        """
        options = replace(self._loads, strict=strict, weights_only=weights_only)
        try:
            (report,) = run.restore([checkpoint], options, self.ranks)
        except CkptError as error:
            hint = _hint_for_frameworks(error.hint)
            raise type(error)(error.path, error.problem, hint, error.options) from error
        if self.ranks.rank == 0:
            LOG.info("%s", report)
        return report

    def begin(self, run: Run, folder: str, step: int) -> tuple[str, int]:
        """Find the previous commit of the run, and remove files that must not be beside a new save; on every rank.

        Returns:
            Attempt and number of the previous commit, for ``save``.
        """
        begin = partial(self._begin, folder, is_folder=run.is_folder)
        attempt, number = self.ranks.on_first(self.root, begin, call=[folder, step])
        return attempt, number

    def _begin(self, folder: str, *, is_folder: bool) -> list[Any]:
        storage = self.storage
        storage.refresh([])
        found = trainer_commits(Place(storage, posixpath.dirname(folder)).folders)
        if storage.is_dir(folder) and not is_folder:  # the save itself replaces a folder that is a checkpoint
            held = candidates(storage, folder)
            for path in [folder] if storage.remote else [one.path for one in held]:
                check_not_pinned(storage, path)  # before any file is removed
                if (why := why_kept(storage, path)) is not None:
                    raise StorageError(path, why, "move them, or choose another output_dir")
            if storage.remote and held:  # a bucket cannot replace a commit as a whole
                others = (one.name for one in found if one.name != folder)
                check_not_only(storage, folder, others, "move it, or choose another output_dir")
                storage.remove_tree(folder)
            else:  # weights of an abandoned run
                names = [e.name for e in storage.listing(folder) if not e.is_dir and is_weights(e.name)]
                storage.delete([posixpath.join(folder, name) for name in names])
        return [found[0].attempt, found[0].number] if found else ["", 0]


class FoldersByStorage:
    """``Folders`` for paths and URLs of any storage, one for each; make one on every rank, with the same arguments.

    Args:
        options: How to save, and the classes that a load may build.
        on_save: Called on every rank after each save, in the thread of the save.
        layout: Names of the entries in saves of torch runs.
    """

    def __init__(self, options: SaveOptions, *, on_save: Callable[[SaveReport], None], layout: str) -> None:
        self._make = partial(Folders, options=options, on_save=on_save, layout=layout)
        self._made: dict[str, Folders] = {}

    def at(self, folder: str) -> Folders:
        """Return the saves for the storage of a folder: in the directory of a run of Ray Train, the run's saves."""
        run = current_run()
        in_run = run is not None and folder.startswith(f"{run.root}/")
        key = "run" if in_run else scheme_of(folder)
        if key not in self._made:
            self._made[key] = self._make(None if in_run else folder)
        return self._made[key]

    def wait(self) -> None:
        """Wait for all of them, as ``Folders.wait``."""
        for saves in self._made.values():
            saves.wait()


def current_run() -> RayRun | None:
    """Return the run of Ray Train that this process is a worker of; None outside of one.

    Raises:
        PlanError: The worker is one of an old release of Ray Train.
    """
    if "ray.train" not in sys.modules:
        return None
    from ckpttool.integrations.ray_run import NoRunError, RayRun  # imports Ray

    try:
        return RayRun()
    except NoRunError:
        return None


def is_weights(name: str) -> bool:
    """Return whether a file beside DeepSpeed's directory contains weights, by its name."""
    return _matches(name, WEIGHTS)


def set_rng_of(report: LoadReport) -> bool:
    """Set this rank's random number generators from the rank states of a restore; return False if there are none."""
    if not report.rank_states:
        return False
    state = report.rng_state(RNG)
    if state is None:
        return False
    set_rng_state(state)
    return True


def was_within_epoch(report: LoadReport) -> bool:
    """Return whether a restored checkpoint was saved with ``within_epoch``."""
    state = report.rank_states[0] if report.rank_states else None
    return isinstance(state, dict) and state.get(WITHIN_EPOCH) is True


def candidates_in(
    storage: Storage, folders: Iterable[str], skip: Callable[[str, CkptError], None] | None = None
) -> list[str]:
    """Return the directories of the checkpoints in some folders, best first; warn of a folder that has none.

    Thin checkpoints come after all others: a run cannot resume from one, only load its weights.

    Args:
        storage: Their storage.
        folders: The folders.
        skip: Called for a folder that a framework has left torn: the save of its step then moves it aside.

    Raises:
        StorageError: A folder cannot be read.
    """
    found: list[Found] = []
    for number, folder in enumerate(folders):
        own = of_folder(storage, folder)
        found += (inside := own if number or own else newest(storage, folder))
        if not inside:
            error = LayoutError(folder, why_not(storage, folder), "it is skipped")
            if skip is not None and error.problem == NO_WHOLE:
                skip(folder, error)
            else:
                LOG.warning("%s", error)
    return [one.path for one in sorted(found, key=lambda one: one.thin)]


def why_not(storage: Storage, folder: str) -> str:
    """Return why a folder contains no checkpoint, as the rest of a sentence."""
    if storage.is_dir(folder) and is_unfinished(storage, folder):
        return "was not committed: the save did not finish"
    for entry in storage.listing(folder) if storage.is_dir(folder) else []:
        if entry.is_dir and is_unfinished(storage, posixpath.join(folder, entry.name)):
            return f"was not committed: the save of {entry.name} did not finish"
    return NO_WHOLE


def check_no_foreign(storage: Storage, folders: Collection[str]) -> None:
    """Check that folders without a whole checkpoint contain no other kind of checkpoint, which a new run would replace.

    Raises:
        LayoutError: A folder contains weights, or a directory that is not an unfinished save.
    """
    for folder in (one for one in folders if not is_unfinished(storage, one)):
        for entry in storage.listing(folder):
            path = posixpath.join(folder, entry.name)
            unfinished = entry.is_dir and (not storage.listing(path) or is_unfinished(storage, path))
            if is_weights(entry.name) if not entry.is_dir else not unfinished:
                problem = f"holds {entry.name}, but no checkpoint that can be resumed from"
                raise LayoutError(folder, problem, "move the folder, or choose another output_dir")


def _hint_for_frameworks(hint: str) -> str:
    """Return a hint without parameters of ``ckpttool.load`` that no framework passes on."""
    for pattern, possible in _POSSIBLE:
        hint = re.sub(pattern, possible, hint)
    return hint


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def is_static(name: str) -> bool:
    """Return whether no resume reads a file beside DeepSpeed's directory, by its name."""
    return _matches(name, STATIC)


def read_files(directory: str) -> dict[str, bytes]:
    """Return the content of all files below a local directory, by relative path."""
    found = {}
    for above, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(above, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, directory)] = file.read()
    return found


def _copy_files(storage: Storage, folder: str, directory: str) -> None:
    for entry in storage.listing(folder):
        if entry.is_dir or is_static(entry.name) or is_weights(entry.name) or OPTIMIZER.fullmatch(entry.name):
            continue
        with storage.open(posixpath.join(folder, entry.name)) as reader:
            data = reader.read(0, reader.nbytes)
        write_file(directory, entry.name, data)


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(posixpath.basename(name), pattern) for pattern in patterns)


def _write(location: str, directory: str, name: Any, data: Any) -> None:
    """Write one file; its name comes from the checkpoint.

    Raises:
        LayoutError: It is not the name of a file below the directory, or has other content.
    """
    safe = isinstance(name, str) and name.isprintable() and not {"", ".", ".."} & set(name.split("/"))
    if not safe or not isinstance(data, torch.Tensor) or data.dtype != torch.uint8:
        raise LayoutError(location, "has rank states with files of unsafe names", "use another checkpoint")
    write_file(directory, name, data.numpy().tobytes())
