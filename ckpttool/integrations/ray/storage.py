"""Open the storage of a Ray Train run.

Source: Ray 2.60, ray/train/v2/_internal/execution/storage.py (``StorageContext``), arguments of its ``RunConfig``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow.fs
from fsspec.implementations.local import LocalFileSystem

from ckpttool.errors import PlanError
from ckpttool.storage import LOCAL
from ckpttool.storage.fsspec import RemoteStorage
from ckpttool.storage.s3 import S3Storage, with_defaults

if TYPE_CHECKING:
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
