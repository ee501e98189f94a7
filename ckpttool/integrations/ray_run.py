"""A run of Ray Train: its storage, the checkpoints that Ray knows, and reports to Ray.

Source: Ray 2.60, ray/train/v2 (Train V2): ``report``, ``CheckpointUploadMode.NO_UPLOAD``, ``get_storage``.
"""

from __future__ import annotations

import logging
import posixpath
import weakref
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pyarrow.fs
import ray.train
from fsspec.implementations.local import LocalFileSystem

from ckpttool.errors import PlanError
from ckpttool.storage import LOCAL
from ckpttool.storage.fsspec import RemoteStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckpttool.storage import WritableStorage

LOG = logging.getLogger(__name__)


class NoRunError(PlanError):
    """This process is not a worker of a run of Ray Train."""


class RayRun:
    """A run of Ray Train, in one of its workers.

    Raises:
        NoRunError: This process is not a worker of one.
        PlanError: Ray Train is not Train V2.
    """

    def __init__(self) -> None:
        if not hasattr(ray.train, "get_preemption_info"):
            raise PlanError("ray.train", "is not Train V2", "use Ray 2.60 or later, without RAY_TRAIN_V2_ENABLED=0")
        try:
            self.context: Any = ray.train.get_context().get_storage()
            """Ray's ``StorageContext``: each run of a worker process has its own."""
        except NotImplementedError as error:
            problem = "runs in local mode, which has no storage"
            raise NoRunError("ray.train", problem, "set ScalingConfig(num_workers=1) or more") from error
        except RuntimeError as error:
            hint = "call this in train_func of a TorchTrainer"
            raise NoRunError("ray.train", "is not running here", hint) from error
        self._filesystem = self.context.storage_filesystem
        self._path = self.context.experiment_fs_path

    @cached_property
    def root(self) -> str:
        """Path or URL of the run's directory."""
        return url_of(self._filesystem, self._path)

    @cached_property
    def storage(self) -> WritableStorage:
        """Its storage."""
        return storage_of(self._filesystem)

    @property
    def engines(self) -> dict[str, weakref.ref[Any]]:
        """The engines that the run saves and restores by default; they belong to the run, not to this object."""
        return _ENGINES.setdefault(self.context, {})

    def report(self, folder: str, metrics: Mapping[str, Any], *, validation: Any = False) -> None:
        """Report a committed checkpoint of the run's directory to Ray by reference, on every worker."""
        # Ray requires the run's own file system object.
        path = posixpath.join(self._path, posixpath.relpath(folder, self.root))
        checkpoint = ray.train.Checkpoint(path, filesystem=self._filesystem)
        mode = ray.train.CheckpointUploadMode.NO_UPLOAD
        ray.train.report(dict(metrics), checkpoint=checkpoint, checkpoint_upload_mode=mode, validation=validation)

    def newest(self) -> str:
        """Return path or URL of the checkpoint that Ray resumes from; "" without one."""
        newest = ray.train.get_checkpoint()
        return "" if newest is None else url_of(newest.filesystem, newest.path)

    def reported(self) -> set[str]:
        """Return the names of the checkpoints that Ray has recorded."""
        mode = ray.train.CheckpointConsistencyMode.COMMITTED
        known = ray.train.get_all_reported_checkpoints(consistency_mode=mode)
        return {posixpath.basename(one.checkpoint.path.rstrip("/")) for one in known}


_ENGINES: weakref.WeakKeyDictionary[Any, dict[str, weakref.ref[Any]]] = weakref.WeakKeyDictionary()


def at_end(finish: Callable[[], None], abandon: Callable[[], None]) -> None:
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
        from ckpttool.storage.s3_client import single_attempt, with_defaults

        return single_attempt(type(wrapped))(*wrapped.storage_args, **with_defaults(options))
    if isinstance(filesystem, pyarrow.fs.S3FileSystem):
        try:
            from ckpttool.storage.s3_client import SingleAttemptFileSystem, with_defaults
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
