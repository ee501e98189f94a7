"""Checkpoints of DeepSpeed engines under Ray Train: saved once, directly to the run's storage, and committed there.

    from ckpttool.integrations import ray_train

    def train_func(config):
        ...
        state = ray_train.restore(engine) or {"step": 0}
        for step in range(state["step"], steps):
            ...
            ray_train.report(engine, {"loss": loss}, client_state={"step": step + 1})

``ray.train.report`` returns before the run's controller records a checkpoint, and Ray does not check that it is
complete. Therefore the manifest decides: ``restore`` takes the newest commit in the run's directory, even if Ray does
not know it, and ``report`` passes a reference to Ray after the commit.

Source: Ray 2.60, ray/train/v2 (Train V2): ``report``, ``CheckpointUploadMode.NO_UPLOAD``, ``get_storage``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import numbers
import posixpath
import secrets
import weakref
from collections.abc import Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import ray.train
import torch

from ckpttool.catalog.cleanup import left_by_workers, remove_unchanged
from ckpttool.catalog.runs import checkpoints_of_ray, last_commit, run_candidates
from ckpttool.catalog.snapshot import directory_name, latest_of_ray, listed_by_ray
from ckpttool.commit import is_commit
from ckpttool.commit.manifest import read_manifest, size_problems
from ckpttool.errors import ArgumentError, CkptError, StorageError
from ckpttool.formats.layouts import METRICS_OF_RAY
from ckpttool.formats.scan import scan
from ckpttool.integrations.live.choice import run_of
from ckpttool.integrations.live.manager import CheckpointManager
from ckpttool.integrations.live.options import LoadOptions
from ckpttool.integrations.live.request import Save, checked_tag, note_known
from ckpttool.integrations.ray_run import RayRun, at_end, storage_of, url_of
from ckpttool.integrations.torch.collectives import ranks_of_process_group
from ckpttool.messages import brief
from ckpttool.registry import values_of, with_options
from ckpttool.saving.coordination import TIMEOUT
from ckpttool.saving.two_phase import settle
from ckpttool.storage import open_storage, read_json

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from types import TracebackType

    from typing_extensions import Unpack

    from ckpttool import _RayTrainCheckpointsRestoreOptions
    from ckpttool.integrations.live.report import LoadReport, SaveReport
    from ckpttool.integrations.live.run import Run
    from ckpttool.saving.coordination import Ranks
    from ckpttool.storage import Storage


LOG = logging.getLogger(__name__)
GRACE = 900.0
"""Default of ``grace``: seconds after which leftovers of killed workers are removed."""
MAX_METRICS = 1000
"""Maximum number of reported metrics in the manifest."""


class RayTrainCheckpoints:
    """Saves, reports and restores the checkpoints of one run; make one in each worker, in ``train_func``.

    As a context manager it calls ``finish`` at the end of the block. If an exception ends the block or ``train_func``,
    the running save is still committed, and a restarted run finds it.

    Args:
        blocking: Whether ``report`` returns after the checkpoint is committed and reported. If not, the state is copied
            to host memory and written in the background; the next call, ``finish``, or the end of ``train_func``
            reports the checkpoint.
        layout: Names of the entries in saves of torch runs, for loaders without ckpttool: "nested" for torch's
            ``get_state_dict``, "flat" with a flat optimizer, "app" of Ray's template, "accelerate", "torchtitan"
            or "lightning".
        timeout: Seconds that a worker may lag before a save fails.
        grace: Seconds after which the unfinished directory of a killed worker is removed, counted from the newest of
            its files.
        allow: Classes ("module.Class") of objects in the client state that ``restore`` builds, which runs their code.

    Raises:
        PlanError: This process is not a worker of Ray Train V2.
    """

    def __init__(
        self,
        *,
        blocking: bool = True,
        layout: str = "nested",
        timeout: float = TIMEOUT,
        grace: float = GRACE,
        allow: Collection[str] = (),
    ) -> None:
        self._run = RayRun()
        self._grace = grace
        self._timeout = timeout
        self._allow = allow
        if not blocking:
            at_end(self.finish, self._abandon)
        self._manager = CheckpointManager(
            self._run.root,
            layout=layout,
            async_save=not blocking,
            timeout=timeout,
            storage=self._run.storage,
            on_save=self._note,
            allow=allow,
        )
        self._pending: tuple[str, dict[str, Any], Any] | None = None
        """Directory, metrics and validation of the save that is to be reported."""
        self._leaving: set[str] = set()
        """The nodes whose preemption ``preempted`` has returned."""
        self._whole: set[str] = set()
        """Names of directories with a commit, which are not searched for leftovers again."""
        self._last: tuple[str, int] | None = None
        """Attempt and number of the last commit; None before it is known."""
        self.last_save: SaveReport | None = None
        """Report of the last save of this worker."""
        self.restored: LoadReport | None = None
        """Report of the last ``restore``, with ``rank_state`` and ``rank_states``."""

    def __enter__(self) -> RayTrainCheckpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self._abandon()

    @cached_property
    def _ranks(self) -> Ranks:
        """The workers; they meet at the first report or restore, because a constructor may fail on one of them."""
        return ranks_of_process_group("Ray Train", self._timeout)

    def _abandon(self) -> None:
        """Wait for the running save, because an exception ends the block."""
        self._pending = None  # not reported: the other workers may be at another point of the loop
        try:
            self._manager.wait()
        except CkptError as failed:
            LOG.error("%s", failed)  # noqa: TRY400  the exception that ends the block has details

    def report(  # noqa: PLR0913  public API
        self,
        engine: Any,
        metrics: Mapping[str, Any],
        *,
        optimizer: Any = True,
        scheduler: Any = True,
        extra: Mapping[str, Any] | None = None,
        step: int | None = None,
        client_state: Mapping[str, Any] | None = None,
        rank_state: Any = None,
        checkpoint_dir_name: str | None = None,
        validation: Any = False,
    ) -> None:
        """Save the state of a run of DeepSpeed or torch and report it to Ray Train; on every worker at the same step.

        Args:
            engine: The engine that ``deepspeed.initialize`` returned; or several by name, such as {"policy": a,
                "critic": b}, which are one checkpoint. The same in each call of a worker. Or a torch model, or several
                by name, whose parameters are saved with the names in front.
            optimizer: Of a torch model, its optimizer, or several in a list or by the names of their models; an engine
                has its own.
            scheduler: Of a torch model, its learning-rate scheduler, or several by name; an engine has its own.
            extra: Of a torch model, other objects with ``state_dict`` and ``load_state_dict`` by name, such as
                {"scaler": scaler}. A state that differs between ranks is of each rank, and restored on as many ranks.
            step: Of a torch model, the steps of the run; an engine counts them.
            metrics: As for ``ray.train.report``; the manifest gets the numbers.
            client_state: State to save with the checkpoint; ``restore`` returns it.
            rank_state: This rank's own state, in a file of its own; on every rank or on none. Of the same types as
                ``client_state``. ``restored.rank_state`` and ``restored.rank_states`` return it after a restore.
            checkpoint_dir_name: Name of the checkpoint's directory in the run's, as for ``ray.train.report``; unique.
            validation: As for ``ray.train.report``; the validation gets the committed checkpoint.

        Raises:
            CkptError: The save failed, or the previous one in the background; names the worker and the cause. It
                was neither committed nor reported.
        """
        if not isinstance(metrics, Mapping):
            raise ArgumentError("metrics", f"are {brief(metrics)}, not a mapping", 'pass a dict, such as {"loss": 0.5}')
        if tensors := [name for name, value in metrics.items() if isinstance(value, torch.Tensor)]:
            problem = f"have a tensor of torch as {brief(tensors[0])}, which Ray Train does not take"
            raise ArgumentError("metrics", problem, "pass a number: tensor.item()")
        self.finish()
        run = run_of(engine, optimizer, scheduler, step, extra)
        reached = int(getattr(next(iter(run.objects.values()), None), "global_steps", step or 0))
        folder, attempt, number = self._ranks.on_first(
            self._run.root, partial(self._next_folder, reached, checkpoint_dir_name), call=reached
        )
        save = Save(
            metrics=_flat_metrics(metrics),
            client_state={} if client_state is None else client_state,
            before=(attempt, number),
            rank_state=rank_state,
            root_files={} if self._ranks.rank else {METRICS_OF_RAY: _as_json(metrics)},
        )
        self._manager.save_into(folder, run, save, self._run.engines)
        self._pending = folder, dict(metrics), validation
        if not self._manager.saves_in_background:
            self.finish()

    def _next_folder(self, step: int, given: str | None) -> tuple[str, str, int]:
        """Return the directory of the next save, and attempt and number of the previous commit, which has another.

        Raises:
            ArgumentError: The given name cannot name a directory.
            StorageError: There is a checkpoint of that name.
        """
        storage, root = self._run.storage, self._run.root
        if self._last is None:
            self._last = last_commit(storage, root)
        attempt, number = self._last
        name = directory_name(step, number + 1, secrets.token_hex(4)) if given is None else checked_tag(given)
        folder = posixpath.join(root, name)
        if given is None:
            return folder, attempt, number
        if "/" in name:
            raise ArgumentError("checkpoint_dir_name", f"is {brief(name)}, with several parts", "use one name")
        storage.refresh([])
        if any(one.committed or (one.is_tag and not one.marked) for one in scan(storage, folder, depth=1)):
            raise StorageError(folder, "is saved already", "give each checkpoint a checkpoint_dir_name of its own")
        return folder, attempt, number

    def finish(self) -> None:
        """Wait for the save in the background, and report it to Ray Train; on every worker.

        Raises:
            CkptError: The save failed.
        """
        pending, self._pending = self._pending, None
        self._manager.wait()
        if pending is not None:
            folder, metrics, validation = pending
            self._last = self._manager.committed  # Ray may remove it before the next commit
            self._report(folder, metrics, validation)
            self._collect()

    def _report(self, folder: str, metrics: Mapping[str, Any], validation: Any = False) -> None:
        self._whole.add(posixpath.basename(folder))
        self._run.report(folder, metrics, validation=validation)

    def _note(self, report: SaveReport) -> None:
        self.last_save = report

    # ------------------------------------------------------------------------------------------- restoring

    @with_options
    def restore(  # noqa: PLR0913  public API
        self,
        engine: Any,
        checkpoint: Any = None,
        *,
        strict: bool = True,
        weights_only: bool = False,
        optimizer: Any = True,
        scheduler: Any = True,
        extra: Mapping[str, Any] | None = None,
        require_committed: bool = False,
        staged: bool = True,
        **given: Unpack[_RayTrainCheckpointsRestoreOptions],
    ) -> dict[str, Any] | None:
        """Load a checkpoint into the run, on every worker; number of workers, ZeRO stage and mesh may have changed.

        Args:
            engine: The engine that ``deepspeed.initialize`` returned; or several by the names that they were saved
                with, or by the names of their folders in a checkpoint of the documented way. Or a torch model, or
                several by name.
            checkpoint: A ``ray.train.Checkpoint``, a path or a URL, of another run's directory too. Default: the newest
                of this run: among the commits of ``report``, known to Ray or not, and the result of
                ``ray.train.get_checkpoint``. To begin a run with a given one:
                ``restore(engine) or restore(engine, given)``, which after a failure continues with the run's own.
            strict: Whether checkpoint and engine must have the same parameters and buffers. If not, missing ones keep
                the engine's values, and unexpected ones are left out; the report names both.
            weights_only: Load weights, fp32 master weights and buffers from any source, and leave the optimizer's
                states, the counters and the scheduler unchanged. The report has the client state.
            optimizer: Of a torch model, its optimizer, or several in a list or by the names of their models. Of an
                engine, whether to restore the optimizer's states and hyper-parameters. Without them, the engine gets
                weights, fp32 master weights, buffers, counters and the scheduler.
            scheduler: Of a torch model, its learning-rate scheduler, or several by name. Of an engine, whether to
                restore it.
            extra: Of a torch model, the other objects that were saved, by name; a GradScaler also gets the loss scale
                of DeepSpeed.
            require_committed: Fail if the newest checkpoint has no manifest, like DeepSpeed's own saves.
            staged: Whether to read the new state into host memory beside the run's; see ``CheckpointManager.restore``.

        Returns:
            The client state of the checkpoint; None without a given checkpoint, if the run has none yet.

        Raises:
            CkptError: No checkpoint of the run, or not the given one, can be restored; the same on every worker.
        """
        self.finish()
        self.restored = None
        options = LoadOptions(
            strict=strict,
            weights_only=weights_only,
            optimizer=optimizer,
            scheduler=scheduler,
            staged=staged,
            allow=tuple(self._allow),
            committed=require_committed,
            given=values_of("RayTrainCheckpoints.restore", given),
        )
        run = run_of(engine, optimizer, scheduler, extra=extra)
        if checkpoint is not None:
            return self._restore_given(run, checkpoint, options)
        found = self._manager.begin_restore(run, self._found, options, self._run.engines)
        state = self._manager.restore_first(found, run, options, fall_back=True)
        note_known(run.objects, self._run.engines)
        self.restored = self._manager.restored
        if self._manager.restored is not None:
            self._report_unknown(found, self._manager.restored_path)
        return state

    def _restore_given(self, run: Run, given: Any, options: LoadOptions) -> dict[str, Any] | None:
        if isinstance(given, ray.train.Checkpoint):
            storage, root = storage_of(given.filesystem), url_of(given.filesystem, given.path)
        else:
            storage, root = open_storage(str(given)), str(given)
        manager = CheckpointManager(root, timeout=self._timeout, storage=storage, allow=self._allow)
        search = partial(_candidates, manager.source, manager.root)
        found = manager.begin_restore(run, search, options, root=manager.root)
        state = manager.restore_first(found, run, options, fall_back=len(found) > 1)
        self.restored = manager.restored
        return state

    def _found(self) -> list[str]:
        """Return the checkpoints to resume from, newest first."""
        run, newest = self._run, self._run.newest()
        return run_candidates(self._manager.source, run.root, newest, run.reported() if newest else ())

    def _report_unknown(self, found: list[str], restored: str) -> None:
        """Report the restored checkpoint if Ray does not know it: a worker died between commit and report.

        Earlier commits unknown to Ray are reported too, in order, so that Ray's rules apply to them; except those older
        than a checkpoint known to Ray: Ray would treat them as the newest.
        """
        for folder, metrics in self._ranks.on_first(self._run.root, partial(self._unreported, found, restored)):
            self._report(folder, metrics)

    def _unreported(self, found: list[str], restored: str) -> list[tuple[str, dict[str, Any]]]:
        storage, unheard = self._run.storage, []
        known = self._run.reported()
        for path in found[found.index(restored) :]:
            folder, tag = posixpath.split(path)
            if posixpath.basename(folder) in known or not is_commit(storage, path):
                break
            manifest = read_manifest(storage, path)
            if not size_problems(storage, path, manifest):
                settle(storage, folder, tag)
                unheard.append((folder, _metrics_in(storage, folder) or dict(manifest.metrics)))
        return unheard[::-1]

    # ------------------------------------------------------------------------------------------- cleanup

    def _collect(self) -> None:
        """Remove the unfinished directories of killed workers."""
        if self._ranks.rank:
            return
        storage, run = self._run.storage, self._run.root
        try:
            left, whole = left_by_workers(storage, run, self._whole, grace=self._grace)
            self._whole |= whole
            for directory, state in left.items():
                if remove_unchanged(storage, directory, state) is None:
                    LOG.info("removed %s", directory)
        except CkptError as error:
            LOG.warning("leftovers of killed workers were not removed: %s", error)

    # ------------------------------------------------------------------------------------------- preemption

    def preempted(self) -> bool:
        """Return whether a node is about to be preempted, once for each node. Call it on every worker, once a step.

        If so, save at once, call ``finish``, and continue training: Ray ends the workers at the deadline, and restarts
        on the remaining nodes from the newest commit.
        """
        info = ray.train.get_preemption_info()
        leaving = set() if info is None else set(info.preempted_node_ids)
        new = leaving - self._leaving
        self._leaving |= new
        return bool(new)


def _candidates(storage: Storage, root: str) -> list[str]:
    """Return the checkpoints at a path of the user: a run, a root of checkpoints, or one checkpoint of any format."""
    latest = latest_of_ray(storage, root)
    reported = posixpath.join(root, latest) if latest else ""
    found = run_candidates(storage, root, reported, listed_by_ray(storage, root))
    return found or [one.path for one in checkpoints_of_ray(storage, root)] or [root]


def _flat_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in metrics by Ray's names: "eval/loss" for {"eval": {"loss": 0.5}}."""

    def flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
        for name, value in values.items():
            if isinstance(value, Mapping):
                yield from flat(f"{prefix}{name}/", value)
            elif isinstance(value, numbers.Real) and not isinstance(value, bool):
                yield f"{prefix}{name}", float(value)

    return dict(list(flat("", metrics))[:MAX_METRICS])


def _as_json(metrics: Mapping[str, Any]) -> bytes:
    """Return metrics as JSON, so that a report after a worker's death has the same types; without values of others."""
    kept = {}
    for name, value in metrics.items():
        with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError, RecursionError):
            kept[str(name)] = json.loads(json.dumps(value, default=lambda one: one.item()))  # a number of numpy
    return json.dumps(kept).encode()


def _metrics_in(storage: Storage, root: str) -> dict[str, Any]:
    """Return the metrics that were reported with a commit; empty for commits of old releases."""
    try:
        return read_json(storage, posixpath.join(root, METRICS_OF_RAY), "", "")
    except CkptError:
        return {}


_OF_RUN: weakref.WeakKeyDictionary[Any, RayTrainCheckpoints] = weakref.WeakKeyDictionary()
"""The object that implements the functions below, by the context of its run."""


def _current() -> RayTrainCheckpoints:
    context = RayRun().context
    if context not in _OF_RUN:
        _OF_RUN[context] = RayTrainCheckpoints()
    return _OF_RUN[context]


def report(engine: Any, metrics: Mapping[str, Any], **options: Any) -> None:
    """Save, commit and report, on every worker; see ``RayTrainCheckpoints.report``."""
    _current().report(engine, metrics, **options)


def restore(engine: Any, checkpoint: Any = None, **options: Any) -> dict[str, Any] | None:
    """Load the newest commit of the run, or a given checkpoint; see ``RayTrainCheckpoints.restore``."""
    return _current().restore(engine, checkpoint, **options)


def restored() -> LoadReport | None:
    """Return the report of the last ``restore``, with the rank states; see ``RayTrainCheckpoints.restored``."""
    return _current().restored


def preempted() -> bool:
    """Return whether a node is about to be preempted; see ``RayTrainCheckpoints.preempted``."""
    return _current().preempted()
