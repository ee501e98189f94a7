"""The storage that a Ray Train run has chosen, as one of ours.

Source: Ray 2.60, ray/train/_internal/storage.py (``StorageContext``) and what its ``RunConfig`` takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow.fs

from ckpttool.saving.bucket import Bucket
from ckpttool.saving.disk import Disk
from ckpttool.storage import LOCAL

if TYPE_CHECKING:
    from ckpttool.saving.protocol import Place
    from ckpttool.storage import Storage


def place_of(filesystem: Any) -> Place:
    """Where a run saves.

    Args:
        filesystem: ``pyarrow.fs.FileSystem``.
    """
    storage = storage_of(filesystem)
    return Disk() if storage is LOCAL else Bucket(storage)


def storage_of(filesystem: Any) -> Any:
    """The storage that a file system of pyarrow's reaches."""
    if isinstance(filesystem, pyarrow.fs.SubTreeFileSystem):
        raise _unsupported(filesystem)
    if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        return LOCAL
    return _remote(_as_fsspec(filesystem))


def url_of(filesystem: Any, path: str) -> str:
    """A path of a file system as a URL that ``storage_of`` the same understands; a plain path on local disk."""
    if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        return path
    protocol = _as_fsspec(filesystem).protocol
    scheme = protocol if isinstance(protocol, str) else protocol[0]
    return f"{scheme}://{path.lstrip('/')}"


def _remote(fs: Any) -> Storage:
    from ckpttool.storage.remote import RemoteStorage

    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    if protocols & {"s3", "s3a"} and hasattr(fs, "call_s3"):
        from ckpttool.storage.s3 import S3Storage

        return S3Storage(fs)
    return RemoteStorage(fs)


def _as_fsspec(filesystem: Any) -> Any:
    """The same storage through fsspec.

    S3 is opened anew through s3fs, with pyarrow's own endpoint and keys: pyarrow's client retries nothing, and checks
    no version of what it reads.
    """
    if isinstance(filesystem, pyarrow.fs.PyFileSystem) and isinstance(filesystem.handler, pyarrow.fs.FSSpecHandler):
        return filesystem.handler.fs
    if isinstance(filesystem, pyarrow.fs.S3FileSystem):
        import s3fs

        from ckpttool.storage.s3 import with_defaults

        # How pyarrow pickles it: nothing else tells what it was made with.
        given = filesystem.__reduce__()[1][0]
        endpoint = given.get("endpoint_override") or None
        if endpoint and "://" not in endpoint:
            endpoint = f"{given.get('scheme') or 'https'}://{endpoint}"
        client = {"region_name": given["region"]} if given.get("region") else {}
        keys = {"key": given.get("access_key"), "secret": given.get("secret_key"), "token": given.get("session_token")}
        known = {name: value for name, value in keys.items() if value}
        anonymous = {"anon": True} if given.get("anonymous") else {}
        options = {"client_kwargs": client, **known, **anonymous}
        if endpoint:
            options["endpoint_url"] = endpoint
        return s3fs.S3FileSystem(**with_defaults(options))
    from fsspec.implementations.arrow import ArrowFSWrapper

    return ArrowFSWrapper(filesystem)


def _unsupported(filesystem: Any) -> Exception:
    from ckpttool.errors import PlanError

    return PlanError(
        "RunConfig(storage_filesystem=...)",
        f"is a {type(filesystem).__name__}, which says not where it begins",
        "pass the file system itself, and the whole path as storage_path",
    )
