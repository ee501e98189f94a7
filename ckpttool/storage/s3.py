"""Read and write objects in S3 and compatible stores through s3fs: ranges of one version, and small objects."""

from __future__ import annotations

import base64
import contextlib
import io
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.checksums import crc32
from ckpttool.storage.base import check_text, decode_text
from ckpttool.storage.fsspec import CONNECTIONS, RemoteStorage
from ckpttool.storage.listings import entry_of
from ckpttool.storage.retry import NO_BUCKET, ShortReadError, explain
from ckpttool.storage.s3_writer import CONFLICT, NO_CONDITIONS, PRECONDITION_FAILED, S3Writer, answer_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ckpttool.storage.s3_obstore import ObstoreRanges
    from ckpttool.storage.s3_parts import PartClient

MAX_PARTS = 10_000
"""Most parts of one upload; a limit of S3."""
MIN_PART_BYTES = 5 << 20
"""Least bytes of each part but the last; a limit of S3."""
BULK_BYTES = 1 << 20
"""Least bytes of a range to read through obstore, if it is installed."""


def with_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Add defaults for concurrent ranges and for retries by ckpttool to s3fs's options; given options take precedence.

    Raises:
        ValueError: An option has the wrong form.
    """
    config = {
        "max_pool_connections": 2 * CONNECTIONS,  # botocore's own default is 10
        "connect_timeout": 10,
        "read_timeout": 20,
        "retries": {"total_max_attempts": 1},  # retry.call retries all kinds of errors
        **dict(options.get("config_kwargs", {})),
    }
    return {**options, "config_kwargs": config}


class S3Storage(RemoteStorage):
    """The storage of S3 buckets. Threads may share it.

    Args:
        fs: The file system of s3fs.
    """

    reads_versions = True
    parts_from_anywhere = True

    def __init__(self, fs: Any) -> None:
        super().__init__(fs)
        self._ranges: dict[str, ObstoreRanges | None] = {}
        self._part_client: PartClient | None = None
        self._has_part_client = False

    def look(self, key: str) -> list[dict[str, Any]]:
        """Return s3fs's infos of a directory's entries, or of the object at that key.

        Not ``fs.ls``: for a missing key s3fs lists the parent directory, which may hold very many objects.
        """
        if "/" not in key:
            return super().look(key)
        found = self._below(key) or self._object(key)
        if not found:
            raise FileNotFoundError(key)
        return found

    def is_dir(self, path: str) -> bool:
        """Return whether any object lies below the path; one request."""
        key = self.key(path).rstrip("/")
        if self._lookup(path)[0] or "/" not in key:
            return super().is_dir(path)
        found = self.call(path, partial(self._below, key))
        return bool(found and self._remember(path, key, found))

    def is_file(self, path: str) -> bool:
        """Return whether a path that is not a directory is an object; one request."""
        key = self.key(path).rstrip("/")
        if "/" not in key:
            return False
        found = self.call(path, partial(self._object, key))
        if found:
            self._single[key] = entry_of(found[0])
        else:
            self._listed[key] = []  # cached: the path does not exist
        return bool(found)

    def _below(self, key: str) -> list[dict[str, Any]]:
        from fsspec.asyn import sync

        found: list[dict[str, Any]] = sync(self.fs.loop, self.fs._lsdir, key)
        return found

    def _object(self, key: str) -> list[dict[str, Any]]:
        """Return the info of the object with exactly this key: the first of a listing with that prefix.

        A listing, because the credentials may have no right to HEAD.
        """
        from fsspec.asyn import sync

        above, _, name = key.rpartition("/")
        found = sync(self.fs.loop, self.fs._lsdir, above, prefix=name, delimiter="", max_items=1)
        return [info for info in found if info["name"] == key]

    def read_text(self, path: str) -> str:
        """Return the content of a small text file; one request if no cached listing covers it.

        Raises:
            StorageError: The file cannot be read, is larger than 1 MiB or is not text.
        """
        if self._lookup(path)[0]:
            return super().read_text(path)
        return decode_text(path, self.call(path, partial(self._read_small, path)))

    def _read_small(self, path: str) -> bytes:
        from fsspec.asyn import sync

        return bytes(sync(self.fs.loop, self._get_small, path, *self._names(path)))

    async def _get_small(self, path: str, bucket: str, key: str) -> bytes:
        response = await self.fs._call_s3("get_object", Bucket=bucket, Key=key)
        try:
            check_text(path, response["ContentLength"])
            return bytes(await response["Body"].read())
        finally:
            response["Body"].close()

    def get(self, path: str, start: int, end: int, version: str) -> bytes | memoryview:
        """Return the bytes [start, end) of one version of an object; one request.

        The request has the ETag of the listing, so that the store refuses it if the object was rewritten.
        """
        from fsspec.asyn import sync

        bucket, key = self._names(path)
        if end - start >= BULK_BYTES and (ranges := self._ranges_of(bucket)) is not None:
            data = ranges.get(key, start, end, version)
            if data is not None:
                return data
        condition = {"IfMatch": f'"{version}"'} if version else {}
        return bytes(sync(self.fs.loop, self._get, bucket, key, start, end, condition))

    def _ranges_of(self, bucket: str) -> ObstoreRanges | None:
        with self._lock:
            if bucket not in self._ranges:
                from ckpttool.storage.s3_obstore import ObstoreRanges

                self._ranges[bucket] = None
                # After any failure here s3fs reads the ranges, or reports the error.
                with contextlib.suppress(Exception):
                    self._ranges[bucket] = ObstoreRanges(self.fs, bucket)
            return self._ranges[bucket]

    async def _get(self, bucket: str, key: str, start: int, end: int, condition: dict[str, str]) -> bytes:
        wanted = f"bytes={start}-{end - 1}"
        response = await self.fs._call_s3("get_object", Bucket=bucket, Key=key, Range=wanted, **condition)
        try:
            # Checked first: a server without support for ranges would send the whole file, which may exceed the memory.
            if response["ContentLength"] != end - start:
                raise ShortReadError(f"{response['ContentLength']:,} bytes instead of {end - start:,}")
            return bytes(await response["Body"].read())
        finally:
            response["Body"].close()

    def part_client(self) -> PartClient | None:
        """Return a client that sends parts from any thread; None if only s3fs supports the options."""
        with self._lock:
            if not self._has_part_client:
                from ckpttool.storage.s3_parts import PartClient

                self._has_part_client = True
                # Without this client s3fs sends the parts, or reports the error.
                with contextlib.suppress(Exception):
                    self._part_client = PartClient(self.fs)
            return self._part_client

    def checksum_of(self, data: bytes | memoryview) -> dict[str, str]:
        """Return the checksum parameters of a part; empty if the store gets none.

        botocore would compute the same checksum a few times slower. Some stores do not support checksums.
        """
        if getattr(self.fs.s3.meta.config, "request_checksum_calculation", None) != "when_supported":
            return {}
        return {"ChecksumCRC32": base64.b64encode(crc32(data).to_bytes(4, "big")).decode()}

    def upload(self, path: str, nbytes: int, key: str = "", *, new: bool = False) -> S3Writer:
        """Begin a multipart upload, or resume the upload with identifier ``key``.

        Raises:
            StorageError: The store fails.
        """
        bucket, name = self._names(path)
        return S3Writer(self, path, bucket, name, part_bytes(nbytes), key, new=new)

    def put(self, path: str, *parts: bytes | memoryview, mode: int = 0o666) -> None:
        """Write or replace a small object.

        Raises:
            StorageError: The object cannot be written.
        """
        bucket, name = self._names(path)
        data, kind = b"".join(parts), _content_type(name)
        self.call(path, lambda: self.fs.call_s3("put_object", Bucket=bucket, Key=name, Body=io.BytesIO(data), **kind))
        self.forget()

    def put_new(self, path: str, *parts: bytes | memoryview, over: str | None = None, mode: int = 0o666) -> bool:
        """Write a small object only if no other process has written it; see ``WritableStorage.put_new``.

        On servers without conditional writes, checks for the object before the write.

        Source: Amazon S3, PutObject (``If-None-Match``, ``If-Match``).

        Raises:
            StorageError: The object cannot be written.
        """
        bucket, name = self._names(path)
        data = b"".join(parts)
        given = {"IfNoneMatch": "*"} if over is None else {"IfMatch": f'"{over}"'}
        given |= _content_type(name)

        def write() -> bool:
            try:
                self.fs.call_s3("put_object", Bucket=bucket, Key=name, Body=io.BytesIO(data), **given)
            except FileNotFoundError:
                if over is None:
                    raise  # the bucket does not exist
                return False
            except OSError as error:
                code, answer = answer_of(error)
                if answer in NO_CONDITIONS:
                    return super(S3Storage, self).put_new(path, data, over=over)
                if code not in {CONFLICT, PRECONDITION_FAILED}:
                    raise
                return False
            return True

        written = self.call(path, write)
        self.forget()
        # The answer to an earlier attempt, also one of the HTTP client, may be lost: then the object has these bytes.
        return written or (self.exists(path) and self._holds(path, data))

    def _holds(self, path: str, data: bytes) -> bool:
        entry = self.entry(path)
        if entry.nbytes != len(data):
            return False
        return not data or bytes(self.call(path, partial(self.get, path, 0, len(data), entry.version))) == data

    def part_bytes(self, nbytes: int) -> int:
        """Return the part size in bytes for an object of ``nbytes`` bytes."""
        return part_bytes(nbytes)

    def object_name(self, path: str) -> str:
        """Return the key of an object in its bucket."""
        return self._names(path)[1]

    def uploads(self, path: str) -> dict[str, str]:
        """Return the pending uploads below a path: key of the object to identifier of its newest upload."""
        bucket, prefix = self._names(path)
        return dict(self.pending(path, bucket, f"{prefix}/" if prefix else ""))

    def pending(self, path: str, bucket: str, prefix: str) -> list[tuple[str, str]]:
        """Return key and identifier of every pending upload; one object may have several."""
        markers = ("KeyMarker", "UploadIdMarker")
        pages = self._pages(path, "list_multipart_uploads", markers, Bucket=bucket, Prefix=prefix)
        return [(u["Key"], u["UploadId"]) for page in pages for u in page.get("Uploads", [])]

    def abort_uploads(self, path: str, names: Iterable[str]) -> None:
        """Abort all pending uploads of these files below a path."""
        bucket, prefix = self._names(path)
        keys = {f"{prefix}/{name}" if prefix else name for name in names}
        found = self.pending(path, bucket, f"{prefix}/" if prefix else "")
        self.at_once([partial(self.abort, path, bucket, *one) for one in found if one[0] in keys])

    def abort(self, path: str, bucket: str, name: str, number: str) -> bool:
        """Abort an upload and remove its parts; return False if the upload does not exist."""
        return self.call(path, partial(self._abort, bucket, name, number))

    def _abort(self, bucket: str, name: str, number: str) -> bool:
        try:
            self.fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=name, UploadId=number)
        except FileNotFoundError as error:
            found = explain(name, error)
            if found is not None and found.problem == NO_BUCKET:
                raise
            return False  # the upload is complete, or an earlier attempt has aborted it
        return True

    def parts(self, path: str, bucket: str, name: str, number: str) -> dict[int, tuple[str, int]]:
        """Return the stored parts of an upload: part number to ETag and size in bytes."""
        pages = self._pages(path, "list_parts", ("PartNumberMarker",), Bucket=bucket, Key=name, UploadId=number)
        return {p["PartNumber"]: (p["ETag"], p["Size"]) for page in pages for p in page.get("Parts", [])}

    def _pages(self, path: str, method: str, markers: tuple[str, ...], **given: Any) -> Iterator[dict[str, Any]]:
        after: dict[str, Any] = {}
        while True:
            page = self.call(path, partial(self.fs.call_s3, method, **given, **after))
            yield page
            if not page.get("IsTruncated"):
                return
            after = {m: page[f"Next{m}"] for m in markers}

    def _names(self, path: str) -> tuple[str, str]:
        bucket, key, _ = self.fs.split_path(self.key(path))
        return bucket, key


def _content_type(name: str) -> dict[str, str]:
    """Return the arguments of PutObject with which a browser shows a page instead of saving it."""
    return {"ContentType": "text/html; charset=utf-8"} if name.endswith((".html", ".htm")) else {}


def part_bytes(nbytes: int) -> int:
    """Return the part size in bytes for an object of ``nbytes`` bytes; a multiple of 64, which splits no element."""
    return max(MIN_PART_BYTES, -(-nbytes // MAX_PARTS // 64) * 64)
