"""The run of Ray Train that this process is a worker of: its storage, and reports of committed checkpoints."""

from __future__ import annotations

import posixpath
import sys
from typing import TYPE_CHECKING, Any

import pyarrow.fs
from fsspec.implementations.local import LocalFileSystem

from ckpttool.errors import PlanError
from ckpttool.storage import LOCAL
from ckpttool.storage.fsspec import RemoteStorage
from ckpttool.storage.s3 import S3Storage, with_defaults

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpttool.storage import WritableStorage


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
    return S3Storage(fs) if _is_s3(fs) else RemoteStorage(fs)


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
        from ckpttool.storage.s3 import single_attempt

        return single_attempt(type(wrapped))(*wrapped.storage_args, **with_defaults(options))
    if isinstance(filesystem, pyarrow.fs.S3FileSystem):
        try:
            from ckpttool.storage.s3 import SingleAttemptFileSystem
        except ImportError:
            problem = "is in S3, and s3fs is not installed"
            raise PlanError("RunConfig(storage_path=...)", problem, "pip install 'ckpttool[s3]'") from None

        # pyarrow exposes its arguments only in its pickle form.
        given = filesystem.__reduce__()[1][0]
        endpoint = given.get("endpoint_override") or None
        if endpoint and "://" not in endpoint:
            endpoint = f"{given.get('scheme') or 'https'}://{endpoint}"
        client = {"region_name": given["region"]} if given.get("region") else {}
        keys = {"key": given.get("access_key"), "secret": given.get("secret_key"), "token": given.get("session_token")}
        known = {name: value for name, value in keys.items() if value}
        anonymous = {"anon": True} if given.get("anonymous") else {}
        options = {**OWN, "client_kwargs": client, **known, **anonymous}
        if endpoint:
            options["endpoint_url"] = endpoint
        return SingleAttemptFileSystem(**with_defaults(options))
    from fsspec.implementations.arrow import ArrowFSWrapper

    return ArrowFSWrapper(filesystem)


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
        import ray.train

        # Ray requires the run's own file system object.
        path = posixpath.join(self._path, posixpath.relpath(folder, self.root))
        checkpoint = ray.train.Checkpoint(path, filesystem=self._filesystem)
        mode = ray.train.CheckpointUploadMode.NO_UPLOAD
        ray.train.report(dict(metrics), checkpoint=checkpoint, checkpoint_upload_mode=mode)

    def reported(self) -> set[str]:
        """Return the names of the checkpoints that Ray knows."""
        import ray.train

        mode = ray.train.CheckpointConsistencyMode.COMMITTED
        known = ray.train.get_all_reported_checkpoints(consistency_mode=mode)
        return {posixpath.basename(one.checkpoint.path.rstrip("/")) for one in known}


def current_run() -> RayRun | None:
    """Return the run of Ray Train that this process is a worker of; None outside of one.

    Raises:
        PlanError: The worker is one of an old release of Ray Train.
    """
    train = sys.modules.get("ray.train")
    if train is None:
        return None
    if not hasattr(train, "get_preemption_info"):
        raise PlanError("ray.train", "is not Train V2", "use Ray 2.60 or later, without RAY_TRAIN_V2_ENABLED=0")
    try:
        return RayRun(train.get_context().get_storage())
    except (RuntimeError, NotImplementedError):
        return None
