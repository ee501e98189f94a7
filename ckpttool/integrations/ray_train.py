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
import math
import numbers
import posixpath
import secrets
import weakref
from collections.abc import Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pyarrow.fs
import ray.train
from fsspec.implementations.local import LocalFileSystem

from ckpttool.catalog.cleanup import remove_unchanged
from ckpttool.catalog.entries import (
    checkpoints_of_ray,
    directory_name,
    is_own_name,
    last_commit,
    latest_of_ray,
    listed_by_ray,
    ray_folders,
    run_candidates,
)
from ckpttool.commit import is_commit, read_mark
from ckpttool.commit.manifest import read_manifest, size_problems
from ckpttool.commit.marks import is_alive, is_old, state_of, unfinished_below
from ckpttool.errors import ArgumentError, CkptError, PlanError, StorageError
from ckpttool.formats.layouts import METRICS_OF_RAY
from ckpttool.formats.scan import scan
from ckpttool.integrations.deepspeed.manager import CheckpointManager
from ckpttool.integrations.deepspeed.prepared import LoadOptions
from ckpttool.integrations.deepspeed.request import Save, checked_tag, engines_by_name, note_known
from ckpttool.integrations.torch.collectives import ranks_of_process_group
from ckpttool.messages import brief
from ckpttool.saving.coordination import TIMEOUT
from ckpttool.saving.two_phase import settle
from ckpttool.storage import LOCAL, find_text, open_storage, walk
from ckpttool.storage.fsspec import RemoteStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from types import TracebackType

    from ckpttool.commit.signing import Key
    from ckpttool.integrations.deepspeed.report import LoadReport, SaveReport
    from ckpttool.saving.coordination import Ranks
    from ckpttool.storage import Storage, WritableStorage


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
        timeout: Seconds that a worker may lag before a save fails.
        grace: Seconds after which the unfinished directory of a killed worker is removed, counted from the newest of
            its files.
        allow: As for ``CheckpointManager``.
        sign_key: As for ``CheckpointManager``.

    Raises:
        PlanError: This process is not a worker of Ray Train V2.
    """

    def __init__(
        self,
        *,
        blocking: bool = True,
        timeout: float = TIMEOUT,
        grace: float = GRACE,
        allow: Collection[str] = (),
        sign_key: Key | None = None,
    ) -> None:
        storage = _run_storage()
        self._filesystem = storage.storage_filesystem
        self._run = storage.experiment_fs_path
        self._root = url_of(self._filesystem, self._run)
        self._storage = storage_of(self._filesystem)
        self._engines = _ENGINES.setdefault(storage, {})
        self._grace = grace
        self._timeout = timeout
        self._allow, self._sign_key = allow, sign_key
        if not blocking:
            _at_end(self.finish, self._abandon)
        self._manager = CheckpointManager(
            self._root,
            async_save=not blocking,
            timeout=timeout,
            storage=self._storage,
            on_save=self._note,
            allow=allow,
            sign_key=sign_key,
        )
        self._pending: tuple[str, dict[str, Any], Any] | None = None
        self._leaving: set[str] = set()
        self._whole: set[str] = set()
        self._last: tuple[str, int] | None = None
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

    def report(
        self,
        engine: Any,
        metrics: Mapping[str, Any],
        *,
        client_state: Mapping[str, Any] | None = None,
        rank_state: Any = None,
        checkpoint_dir_name: str | None = None,
        validation: Any = False,
    ) -> None:
        """Save the engine's state and report it to Ray Train; call it on every worker at the same step.

        Args:
            engine: The engine that ``deepspeed.initialize`` returned; or several by name, such as {"policy": a,
                "critic": b}, which are one checkpoint. The same in each call of a worker.
            metrics: As for ``ray.train.report``; the manifest gets the numbers.
            client_state: State to save with the checkpoint; ``restore`` returns it.
            rank_state: As for ``CheckpointManager.save``; ``restored`` has it after a restore.
            checkpoint_dir_name: Name of the checkpoint's directory in the run's, as for ``ray.train.report``; unique.
            validation: As for ``ray.train.report``; the validation gets the committed checkpoint.

        Raises:
            CkptError: The save failed, or the previous one in the background; names the worker and the cause. It
                was neither committed nor reported.
        """
        if not isinstance(metrics, Mapping):
            raise ArgumentError("metrics", f"are {brief(metrics)}, not a mapping", 'pass a dict, such as {"loss": 0.5}')
        self.finish()
        first, *_ = engines_by_name(engine).values()
        step = int(getattr(first, "global_steps", 0))
        name, attempt, number = self._ranks.on_first(
            self._root, partial(self._next, step, checkpoint_dir_name), call=step
        )
        save = Save(
            metrics=_flat_metrics(metrics),
            client_state={} if client_state is None else client_state,
            before=(attempt, number),
            rank_state=rank_state,
            root_files={} if self._ranks.rank else {METRICS_OF_RAY: _as_json(metrics)},
        )
        self._manager.save_into(posixpath.join(self._root, name), engine, save, self._engines)
        self._pending = name, dict(metrics), validation
        if not self._manager.saves_in_background:
            self.finish()

    def _next(self, step: int, given: str | None) -> tuple[str, str, int]:
        """Return the directory of the next save, and attempt and number of the previous commit, which has another.

        Raises:
            ArgumentError: The given name cannot name a directory.
            StorageError: There is a checkpoint of that name.
        """
        if self._last is None:
            self._last = last_commit(self._storage, self._root)
        attempt, number = self._last
        if given is None:
            return directory_name(step, number + 1, secrets.token_hex(4)), attempt, number
        name, directory = checked_tag(given), posixpath.join(self._root, given)
        if "/" in name:
            raise ArgumentError("checkpoint_dir_name", f"is {brief(name)}, with several parts", "use one name")
        self._storage.refresh([])
        if any(one.committed or (one.is_tag and not one.marked) for one in scan(self._storage, directory, depth=1)):
            raise StorageError(directory, "is saved already", "give each checkpoint a checkpoint_dir_name of its own")
        return name, attempt, number

    def finish(self) -> None:
        """Wait for the save in the background, and report it to Ray Train; on every worker.

        Raises:
            CkptError: The save failed.
        """
        pending, self._pending = self._pending, None
        self._manager.wait()
        if pending is not None:
            name, metrics, validation = pending
            self._whole.add(name)
            self._last = self._manager.committed  # Ray may remove it before the next commit
            self._report(name, metrics, validation)
            self._collect()

    def _report(self, name: str, metrics: Mapping[str, Any], validation: Any = False) -> None:
        # Ray requires the run's own file system object.
        checkpoint = ray.train.Checkpoint(posixpath.join(self._run, name), filesystem=self._filesystem)
        mode = ray.train.CheckpointUploadMode.NO_UPLOAD
        ray.train.report(dict(metrics), checkpoint=checkpoint, checkpoint_upload_mode=mode, validation=validation)

    def _note(self, report: SaveReport) -> None:
        self.last_save = report

    # ------------------------------------------------------------------------------------------- restoring

    def restore(  # noqa: PLR0913  public API
        self,
        engine: Any,
        checkpoint: Any = None,
        *,
        strict: bool = True,
        weights_only: bool = False,
        optimizer: bool = True,
        scheduler: bool = True,
        require_committed: bool = False,
        require_signed: bool = False,
        prove: bool | None = None,
    ) -> dict[str, Any] | None:
        """Load a checkpoint into the engine, on every worker; number of workers and ZeRO stage may have changed.

        Args:
            engine: The engine that ``deepspeed.initialize`` returned; or several by the names that they were saved
                with, or by the names of their folders in a checkpoint of the documented way.
            checkpoint: A ``ray.train.Checkpoint``, a path or a URL, of another run's directory too. Default: the newest
                of this run: among the commits of ``report``, known to Ray or not, and the result of
                ``ray.train.get_checkpoint``. To begin a run with a given one:
                ``restore(engine) or restore(engine, given)``, which after a failure continues with the run's own.
            strict: As for ``ckpttool.load``.
            weights_only: As for ``ckpttool.load``.
            optimizer: As for ``ckpttool.load``.
            scheduler: As for ``ckpttool.load``.
            require_committed: As for ``CheckpointManager.restore``.
            require_signed: As for ``CheckpointManager.restore``.
            prove: As for ``ckpttool.load``.

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
            prove=prove,
            allow=tuple(self._allow),
        )
        required = {"committed": require_committed, "signed": require_signed}
        if checkpoint is not None:
            return self._restore_given(engine, checkpoint, options, required)
        found = self._manager.begin_restore(engine, self._found, options, self._engines, **required)
        opener = self._manager.opener(**required, module_only=weights_only)
        state = self._manager.restore_first(found, engine, options, fall_back=True, open_=opener)
        note_known(engines_by_name(engine), self._engines)
        self.restored = self._manager.restored
        if self._manager.restored is not None:
            self._report_unknown(found, self._manager.restored_path)
        return state

    def _restore_given(
        self, engine: Any, given: Any, options: LoadOptions, required: dict[str, bool]
    ) -> dict[str, Any] | None:
        if isinstance(given, ray.train.Checkpoint):
            storage, root = storage_of(given.filesystem), url_of(given.filesystem, given.path)
        else:
            storage, root = open_storage(str(given)), str(given)
        manager = CheckpointManager(
            root, timeout=self._timeout, storage=storage, allow=self._allow, sign_key=self._sign_key
        )
        found = manager.begin_restore(
            engine, lambda: _candidates(manager.source, manager.root), options, None, root=manager.root, **required
        )
        opener = manager.opener(**required, module_only=options.weights_only)
        state = manager.restore_first(found, engine, options, fall_back=len(found) > 1, open_=opener)
        self.restored = manager.restored
        return state

    def _found(self) -> list[str]:
        """Return the checkpoints to resume from, newest first."""
        newest = ray.train.get_checkpoint()
        reported = "" if newest is None else url_of(newest.filesystem, newest.path)
        return run_candidates(self._manager.source, self._root, reported, _known_to_ray() if reported else ())

    def _report_unknown(self, found: list[str], restored: str) -> None:
        """Report the restored checkpoint if Ray does not know it: a worker died between commit and report.

        Earlier commits unknown to Ray are reported too, in order, so that Ray's rules apply to them; except those older
        than a checkpoint known to Ray: Ray would treat them as the newest.
        """
        for name, metrics in self._ranks.on_first(self._root, partial(self._unreported, found, restored)):
            self._whole.add(name)
            self._report(name, metrics)

    def _unreported(self, found: list[str], restored: str) -> list[tuple[str, dict[str, Any]]]:
        storage, unheard = self._storage, []
        known = _known_to_ray()
        for path in found[found.index(restored) :]:
            root, tag = posixpath.split(path)
            name = posixpath.basename(root)
            if name in known or not is_commit(storage, path):
                break
            manifest = read_manifest(storage, path)
            if not size_problems(storage, path, manifest):
                settle(self._storage, root, tag)
                unheard.append((name, _metrics_in(storage, root) or dict(manifest.metrics)))
        return unheard[::-1]

    # ------------------------------------------------------------------------------------------- cleanup

    def _collect(self) -> None:
        """Remove the unfinished directories of killed workers."""
        if self._ranks.rank:
            return
        try:
            for directory, state in self._unfinished_directories().items():
                if remove_unchanged(self._storage, directory, state) is None:
                    LOG.info("removed %s", directory)
        except CkptError as error:
            LOG.warning("leftovers of killed workers were not removed: %s", error)

    def _unfinished_directories(self) -> dict[str, str]:
        """Return the directories of killed workers, with the state of each."""
        storage, found = self._storage, {}
        storage.refresh([])
        for one in ray_folders(storage, self._root):
            if one.tag in self._whole:  # known to be complete, not checked after every save
                continue
            directory, state = one.path, state_of(storage, one.path)
            if any(tag.committed for tag in scan(storage, directory, depth=1)):
                self._whole.add(one.tag)
                continue
            times = [one.modified, *(e.modified for _, e in walk(storage, directory))]
            newest = max((t for t in times if t is not None), default=math.inf)
            unfinished = unfinished_below(storage, directory)
            if not unfinished and not is_own_name(one.tag):
                continue  # the run's script wrote it
            alive = any(is_alive(read_mark(storage, marked)) for marked in unfinished)
            if newest < math.inf and is_old(newest, self._grace) and not alive:
                found[directory] = state
        return found

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


def _at_end(finish: Callable[[], None], abandon: Callable[[], None]) -> None:
    """Register functions to call in the thread of ``train_func`` when it returns or raises.

    When ``train_func`` returns, Ray waits for its own uploads and then ends the process; a failure there is an error of
    ``train_func``. An exception ends the process as soon as it is in the queue of the thread.

    Source: Ray 2.60, ray/train/v2/_internal/execution/worker_group/worker.py (``run_train_fn``) and thread_runner.py
    (``ThreadRunner.run``).

    Args:
        finish: Called after ``train_func`` returns.
        abandon: Called before Ray receives its exception.
    """
    from ray.train.v2._internal.execution.context import get_train_context

    context = get_train_context()
    uploads = getattr(context, "checkpoint_upload_threadpool", None)
    runner = getattr(getattr(context, "execution_context", None), "training_thread_runner", None)
    if uploads is None or runner is None or not hasattr(runner, "_exc_queue"):
        LOG.warning("this release of Ray does not announce the end of train_func: use RayTrainCheckpoints in a with")
        return
    runner._exc_queue = _Exceptions(runner._exc_queue, abandon)
    shutdown = uploads.shutdown

    def finished(*arguments: Any, **options: Any) -> None:
        finish()
        shutdown(*arguments, **options)

    uploads.shutdown = finished


class _Exceptions:
    """Wraps the queue of a worker's exceptions: passes each to Ray after the running save has ended.

    Args:
        queue: Ray's own queue.
        before: Called before an exception is put into the queue.
    """

    def __init__(self, queue: Any, before: Callable[[], None]) -> None:
        self._queue = queue
        self._before = before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def put(self, error: BaseException | None, *arguments: Any, **options: Any) -> None:
        """Pass an exception to Ray, or None for no exception."""
        try:
            if error is not None:
                self._before()
        finally:
            self._queue.put(error, *arguments, **options)


def _run_storage() -> Any:
    if not hasattr(ray.train, "get_preemption_info"):
        raise PlanError("ray.train", "is not Train V2", "use Ray 2.60 or later, without RAY_TRAIN_V2_ENABLED=0")
    try:
        return ray.train.get_context().get_storage()
    except NotImplementedError as error:
        problem = "runs in local mode, which has no storage"
        raise PlanError("ray.train", problem, "set ScalingConfig(num_workers=1) or more") from error
    except RuntimeError as error:
        raise PlanError("ray.train", "is not running here", "call this in train_func of a TorchTrainer") from error


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
        found = json.loads(find_text(storage, posixpath.join(root, METRICS_OF_RAY)) or "{}")
    except (CkptError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


_OF_RUN: weakref.WeakKeyDictionary[Any, RayTrainCheckpoints] = weakref.WeakKeyDictionary()
"""The object that implements the functions below, by the run's storage: each run of a worker process has its own."""


_ENGINES: weakref.WeakKeyDictionary[Any, dict[str, weakref.ref[Any]]] = weakref.WeakKeyDictionary()
"""The engines that a run saves and restores by default, by the run's storage."""


def _current() -> RayTrainCheckpoints:
    storage = _run_storage()
    if storage not in _OF_RUN:
        _OF_RUN[storage] = RayTrainCheckpoints()
    return _OF_RUN[storage]


def report(engine: Any, metrics: Mapping[str, Any], **options: Any) -> None:
    """Save, commit and report, on every worker; see ``RayTrainCheckpoints.report``."""
    _current().report(engine, metrics, **options)


def restore(engine: Any, checkpoint: Any = None, **options: bool) -> dict[str, Any] | None:
    """Load the newest commit of the run, or a given checkpoint; see ``RayTrainCheckpoints.restore``."""
    return _current().restore(engine, checkpoint, **options)


def restored() -> LoadReport | None:
    """Return the report of the last ``restore``, with the rank states; see ``RayTrainCheckpoints.restored``."""
    return _current().restored


def preempted() -> bool:
    """Return whether a node is about to be preempted; see ``RayTrainCheckpoints.preempted``."""
    return _current().preempted()


OWN = {"use_listings_cache": False, "skip_instance_cache": True}
"""fsspec options for a private instance, without cached listings."""


def storage_of(filesystem: Any) -> WritableStorage:
    """Return the storage of a run's file system.

    Args:
        filesystem: ``pyarrow.fs.FileSystem``.

    Raises:
        PlanError: Its root directory is unknown.
    """
    if isinstance(filesystem, pyarrow.fs.SubTreeFileSystem):
        problem = "is a SubTreeFileSystem, which hides its root directory"
        raise PlanError(
            "RunConfig(storage_filesystem=...)",
            problem,
            "pass the wrapped file system, and the whole storage_path",
        )
    if _is_local(filesystem):
        return LOCAL
    return _remote(_as_fsspec(filesystem))


def url_of(filesystem: Any, path: str) -> str:
    """Return a path of a file system as a URL for its ``storage_of``; on local disk, the path itself."""
    if _is_local(filesystem):
        return path
    protocol = _as_fsspec(filesystem).protocol
    scheme = protocol if isinstance(protocol, str) else protocol[0]
    return f"{scheme}://{path.lstrip('/')}"


def _is_local(filesystem: Any) -> bool:
    wrapped = _wrapped(filesystem)
    return isinstance(filesystem, pyarrow.fs.LocalFileSystem) or isinstance(wrapped, LocalFileSystem)


def _wrapped(filesystem: Any) -> Any:
    """Return the fsspec file system that a pyarrow file system wraps; None if it wraps none."""
    if isinstance(filesystem, pyarrow.fs.PyFileSystem) and isinstance(filesystem.handler, pyarrow.fs.FSSpecHandler):
        return filesystem.handler.fs
    return None


def _remote(fs: Any) -> RemoteStorage:
    if not _is_s3(fs):
        return RemoteStorage(fs)
    from ckpttool.storage.s3 import S3Storage  # imports s3fs

    return S3Storage(fs)


def _is_s3(fs: Any) -> bool:
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    return bool(protocols & {"s3", "s3a"}) and hasattr(fs, "call_s3")


def _as_fsspec(filesystem: Any) -> Any:
    """Open the same storage through fsspec.

    A second instance: Ray keeps using the first, whose cached listings other workers may have outdated. S3 is opened
    through s3fs, with pyarrow's endpoint and keys: pyarrow's client has no retries and no etag checks while reading.
    """
    wrapped = _wrapped(filesystem)
    if wrapped is not None:
        options = {**wrapped.storage_options, **OWN}
        if not _is_s3(wrapped):
            return type(wrapped)(*wrapped.storage_args, **options)
        from ckpttool.storage.s3 import single_attempt, with_defaults

        return single_attempt(type(wrapped))(*wrapped.storage_args, **with_defaults(options))
    if isinstance(filesystem, pyarrow.fs.S3FileSystem):
        try:
            from ckpttool.storage.s3 import SingleAttemptFileSystem, with_defaults
        except ImportError:
            problem = "is in S3, and s3fs is not installed"
            raise PlanError("RunConfig(storage_path=...)", problem, "pip install 'ckpttool[s3]'") from None

        # pyarrow exposes its arguments only in its pickle form.
        return SingleAttemptFileSystem(**with_defaults({**OWN, **s3_options(filesystem.__reduce__()[1][0])}))
    from fsspec.implementations.arrow import ArrowFSWrapper

    return ArrowFSWrapper(filesystem)


OF_OBJECTS = {
    "ACL": "ACL",
    "Cache-Control": "CacheControl",
    "Content-Language": "ContentLanguage",
    "Content-Type": "ContentType",
    "Expires": "Expires",
}
"""Parameters of S3's requests by the names in ``default_metadata``; pyarrow ignores other names.

Source: Arrow, cpp/src/arrow/filesystem/s3fs.cc (``ObjectMetadataSetter``)."""
WITHOUT_EFFECT = {
    "allow_bucket_creation",
    "allow_bucket_deletion",
    "allow_delayed_open",
    "background_writes",
    "check_directory_existence_before_creation",
    "external_id",
    "load_frequency",
    "session_name",
}
"""Options for operations that ckpttool does not use, and options that count only with ``role_arn``."""


def s3_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of s3fs that have the effect of the options of ``pyarrow.fs.S3FileSystem``.

    Args:
        given: All options of pyarrow's file system, as it pickles them.

    Raises:
        PlanError: An option has no counterpart in s3fs.
    """
    left = {name: value for name, value in given.items() if value and name not in WITHOUT_EFFECT}
    client: dict[str, Any] = {}
    config: dict[str, Any] = {}
    options: dict[str, Any] = {"client_kwargs": client, "config_kwargs": config}
    endpoint, scheme = left.pop("endpoint_override", ""), left.pop("scheme", "https")
    if endpoint:
        options["endpoint_url"] = endpoint if "://" in endpoint else f"{scheme}://{endpoint}"
    elif scheme == "http":
        options["use_ssl"] = False
    for where, own, name in (
        (options, "key", "access_key"),
        (options, "secret", "secret_key"),
        (options, "token", "session_token"),
        (options, "anon", "anonymous"),
        (client, "region_name", "region"),
        (client, "verify", "tls_ca_file_path"),
    ):
        if name in left:
            where[own] = left.pop(name)
    for own, name in (("connect_timeout", "connect_timeout"), ("read_timeout", "request_timeout")):
        seconds = left.pop(name, -1)
        config |= {own: seconds} if seconds > 0 else {}
    if left.pop("force_virtual_addressing", False):
        config["s3"] = {"addressing_style": "virtual"}
    proxy = left.pop("proxy_options", {})
    if proxy.get("host"):
        user = ":".join(quote(proxy[name], safe="") for name in ("username", "password") if proxy.get(name))
        url = f"{proxy['scheme']}://{user}{'@' if user else ''}{proxy['host']}:{proxy['port']}"
        config["proxies"] = {"http": url, "https": url}
    metadata = {name.decode(): value.decode() for name, value in dict(left.pop("default_metadata", {})).items()}
    if metadata:
        options["s3_additional_kwargs"] = {OF_OBJECTS[n]: value for n, value in metadata.items() if n in OF_OBJECTS}
    if left:
        problem = f"has the option {', '.join(left)} of pyarrow.fs.S3FileSystem, which s3fs does not have"
        hint = (
            "set it in a profile of the workers (AWS_PROFILE), or wrap an s3fs.S3FileSystem in pyarrow.fs.FSSpecHandler"
        )
        raise PlanError("RunConfig(storage_filesystem=...)", problem, hint)
    return options


class RayRun:
    """A run of Ray Train, in one of its workers.

    Args:
        context: Ray's ``StorageContext``.
    """

    def __init__(self, context: Any) -> None:
        self._filesystem = context.storage_filesystem
        self._path = context.experiment_fs_path
        self.root = url_of(self._filesystem, self._path)
        """Path or URL of the run's directory."""
        self.storage: WritableStorage = storage_of(self._filesystem)
        """Its storage."""

    def report(self, folder: str, metrics: Mapping[str, Any]) -> None:
        """Report a committed checkpoint of the run's directory to Ray by reference, on every worker."""
        # Ray requires the run's own file system object.
        path = posixpath.join(self._path, posixpath.relpath(folder, self.root))
        checkpoint = ray.train.Checkpoint(path, filesystem=self._filesystem)
        mode = ray.train.CheckpointUploadMode.NO_UPLOAD
        ray.train.report(dict(metrics), checkpoint=checkpoint, checkpoint_upload_mode=mode)

    def reported(self) -> set[str]:
        """Return the names of the checkpoints that Ray knows."""
        return _known_to_ray()


def _known_to_ray() -> set[str]:
    """Return the names of the checkpoints of this run that Ray has recorded."""
    mode = ray.train.CheckpointConsistencyMode.COMMITTED
    known = ray.train.get_all_reported_checkpoints(consistency_mode=mode)
    return {posixpath.basename(one.checkpoint.path.rstrip("/")) for one in known}
