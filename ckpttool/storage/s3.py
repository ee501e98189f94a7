"""Amazon's S3 and what speaks its language, through s3fs: reads of one version, and uploads in parts."""

from __future__ import annotations

import base64
import contextlib
import io
import secrets
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.checksums import crc32
from ckpttool.errors import CkptError
from ckpttool.storage.error_texts import ExistsError
from ckpttool.storage.fsspec import CONNECTIONS, RemoteStorage
from ckpttool.storage.listings import entry_of
from ckpttool.storage.retry import NO_BUCKET, ShortReadError, explain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ckpttool.storage.s3_obstore import ObstoreRanges
    from ckpttool.storage.s3_parts import PartClient

MAX_PARTS = 10_000
"""S3's own limits: parts of one upload,"""
MIN_PART_BYTES = 5 << 20
"""and bytes of each but the last."""
BULK_BYTES = 1 << 20
"""Ranges from this size on are read through obstore, if it is installed."""


def with_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """s3fs's options with what suits ranges and retries of our own; what the user says counts more.

    Raises:
        ValueError: An option has the wrong form.
    """
    config = {
        "max_pool_connections": 2 * CONNECTIONS,  # botocore's own default is 10
        "connect_timeout": 10,
        "read_timeout": 20,
        "retries": {"total_max_attempts": 1},  # failures.call tries again, once for all reasons
        **dict(options.get("config_kwargs", {})),
    }
    return {**options, "config_kwargs": config}


UPLOADED_BY = "ckpttool-upload"
"""Metadata of an object that must be known again: whether it is this upload's or another's."""
CONFLICT, PRECONDITION_FAILED = 409, 412
"""Status of answers to conditional writes."""
NO_CONDITIONS = {"NotImplemented", "InvalidArgument", "InvalidRequest"}
"""Codes of answers of servers that know no conditional writes."""


class S3Storage(RemoteStorage):
    """A bucket.

    Args:
        fs: s3fs's file system.
    """

    reads_versions = True
    parts_from_anywhere = True

    def __init__(self, fs: Any) -> None:
        super().__init__(fs)
        fs.retries = 1
        self._ranges: dict[str, ObstoreRanges | None] = {}
        self._part_client: PartClient | None = None
        self._has_part_client = False

    def look(self, key: str) -> list[dict[str, Any]]:
        """What s3fs tells of all that lies in a directory, or of the object that lies there instead.

        Where there is nothing s3fs lists all that lies beside it, which may be very much.
        """
        if "/" not in key:
            return super().look(key)
        found = self._below(key) or self._itself(key)
        if not found:
            raise FileNotFoundError(key)
        return found

    def is_dir(self, path: str) -> bool:
        """Whether anything lies below the path; one request."""
        key = self.key(path).rstrip("/")
        if self._lookup(path)[0] or "/" not in key:
            return super().is_dir(path)
        found = self.call(path, partial(self._below, key))
        return bool(found and self._remember(path, key, found))

    def is_file(self, path: str) -> bool:
        """Whether an object is at a path that was found to be no directory; one request."""
        key = self.key(path).rstrip("/")
        if "/" not in key:
            return False
        found = self.call(path, partial(self._itself, key))
        if found:
            self._single[key] = entry_of(found[0])
        else:
            self._listed[key] = []  # nothing is there: not to be asked again
        return bool(found)

    def _below(self, key: str) -> list[dict[str, Any]]:
        from fsspec.asyn import sync

        found: list[dict[str, Any]] = sync(self.fs.loop, self.fs._lsdir, key)
        return found

    def _itself(self, key: str) -> list[dict[str, Any]]:
        """The object of this very name; of all that begin so it is the first in a listing, for which rights suffice."""
        from fsspec.asyn import sync

        above, _, name = key.rpartition("/")
        found = sync(self.fs.loop, self.fs._lsdir, above, prefix=name, delimiter="", max_items=1)
        return [info for info in found if info["name"] == key]

    def get(self, path: str, start: int, end: int, version: str) -> bytes | memoryview:
        """The bytes [start, end) of one version of an object; one request.

        The ETag goes along, so that an object that was written anew is not taken for the one that was listed.
        """
        from fsspec.asyn import sync

        bucket, key = self._names(path)
        if end - start >= BULK_BYTES and (ranges := self._ranges_of(bucket)) is not None:
            data = ranges.get(key, start, end, version)
            if data is not None:
                return data
        only = {"IfMatch": f'"{version}"'} if version else {}
        return bytes(sync(self.fs.loop, self._get, bucket, key, start, end, only))

    def _ranges_of(self, bucket: str) -> ObstoreRanges | None:
        with self._lock:
            if bucket not in self._ranges:
                from ckpttool.storage.s3_obstore import ObstoreRanges

                self._ranges[bucket] = None
                # Whatever keeps it from being made, s3fs will do, or say what is wrong.
                with contextlib.suppress(Exception):
                    self._ranges[bucket] = ObstoreRanges(self.fs, bucket)
            return self._ranges[bucket]

    async def _get(self, bucket: str, key: str, start: int, end: int, only: dict[str, str]) -> bytes:
        wanted = f"bytes={start}-{end - 1}"
        response = await self.fs._call_s3("get_object", Bucket=bucket, Key=key, Range=wanted, **only)
        try:
            # Looked at first: a server that knows no ranges would send all of a file that may be larger than memory.
            if response["ContentLength"] != end - start:
                raise ShortReadError(f"{response['ContentLength']:,} bytes instead of {end - start:,}")
            return bytes(await response["Body"].read())
        finally:
            response["Body"].close()

    def part_client(self) -> PartClient | None:
        """A client that sends parts from any thread; None if only s3fs can follow the options."""
        with self._lock:
            if not self._has_part_client:
                from ckpttool.storage.s3_parts import PartClient

                self._has_part_client = True
                # Without this client s3fs sends the parts, or says what is wrong.
                with contextlib.suppress(Exception):
                    self._part_client = PartClient(self.fs)
            return self._part_client

    def checksum_of(self, data: bytes | memoryview) -> dict[str, str]:
        """What a store is to compare a part with, if it is to.

        It is what botocore would compute itself, a few times slower. Not with every store: some know no checksums.
        """
        if getattr(self.fs.s3.meta.config, "request_checksum_calculation", None) != "when_supported":
            return {}
        return {"ChecksumCRC32": base64.b64encode(crc32(data).to_bytes(4, "big")).decode()}

    def upload(self, path: str, nbytes: int, key: str = "", *, new: bool = False) -> S3Writer:
        """Begin an upload in parts, or go on with upload number ``key``.

        Raises:
            StorageError: The store fails.
        """
        bucket, name = self._names(path)
        return S3Writer(self, path, bucket, name, part_bytes(nbytes), key, new=new)

    def put(self, path: str, *parts: bytes | memoryview, mode: int = 0o666) -> None:
        """Write a small object, or replace it.

        Raises:
            StorageError: It cannot be written.
        """
        bucket, name = self._names(path)
        data = b"".join(parts)
        self.call(path, lambda: self.fs.call_s3("put_object", Bucket=bucket, Key=name, Body=io.BytesIO(data)))
        self.forget()

    def put_new(self, path: str, *parts: bytes | memoryview, over: str | None = None, mode: int = 0o666) -> bool:
        """Write a small object only if no other writer was faster; see ``WritableStorage.put_new``.

        Source: Amazon S3, PutObject (``If-None-Match``, ``If-Match``); where a server knows neither, it is
        looked at first.

        Raises:
            StorageError: It cannot be written.
        """
        bucket, name = self._names(path)
        data = b"".join(parts)
        only = {"IfNoneMatch": "*"} if over is None else {"IfMatch": f'"{over}"'}

        def write() -> bool:
            try:
                self.fs.call_s3("put_object", Bucket=bucket, Key=name, Body=io.BytesIO(data), **only)
            except FileNotFoundError:
                if over is None:
                    raise  # the bucket
                return False
            except OSError as error:
                code, answer = _answer_of(error)
                if answer in NO_CONDITIONS:
                    return super(S3Storage, self).put_new(path, data, over=over)
                if code not in {CONFLICT, PRECONDITION_FAILED}:
                    raise
                return False
            return True

        written = self.call(path, write)
        self.forget()
        # The answer to an attempt before may have been lost, of the HTTP client's own too: then what is there is ours.
        return written or (self.exists(path) and self._holds(path, data))

    def _holds(self, path: str, data: bytes) -> bool:
        entry = self.entry(path)
        if entry.nbytes != len(data):
            return False
        return not data or bytes(self.call(path, partial(self.get, path, 0, len(data), entry.version))) == data

    def part_bytes(self, nbytes: int) -> int:
        """How large the parts of an object of this size are."""
        return part_bytes(nbytes)

    def object_name(self, path: str) -> str:
        """The key of an object in its bucket."""
        return self._names(path)[1]

    def uploads(self, path: str) -> dict[str, str]:
        """Uploads that were begun below a path and not ended: key of the object to number of its newest upload."""
        bucket, prefix = self._names(path)
        return dict(self.pending(path, bucket, f"{prefix}/" if prefix else ""))

    def pending(self, path: str, bucket: str, prefix: str) -> list[tuple[str, str]]:
        """Key and number of every upload that was begun and not ended; of one object there may be several."""
        markers = ("KeyMarker", "UploadIdMarker")
        pages = self._pages(path, "list_multipart_uploads", markers, Bucket=bucket, Prefix=prefix)
        return [(u["Key"], u["UploadId"]) for page in pages for u in page.get("Uploads", [])]

    def abort_uploads(self, path: str, names: Iterable[str]) -> None:
        """Give up all uploads of these files below a path that were begun and not ended."""
        bucket, prefix = self._names(path)
        keys = {f"{prefix}/{name}" if prefix else name for name in names}
        found = self.pending(path, bucket, f"{prefix}/" if prefix else "")
        self.at_once([partial(self.abort, path, bucket, *one) for one in found if one[0] in keys])

    def abort(self, path: str, bucket: str, name: str, number: str) -> bool:
        """Give up an upload; what it stored so far is removed. Whether there still was one."""
        return self.call(path, partial(self._abort, bucket, name, number))

    def _abort(self, bucket: str, name: str, number: str) -> bool:
        try:
            self.fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=name, UploadId=number)
        except FileNotFoundError as error:
            found = explain(name, error)
            if found is not None and found.problem == NO_BUCKET:
                raise
            return False  # it is complete, or an attempt before this one was heard
        return True

    def parts(self, path: str, bucket: str, name: str, number: str) -> dict[int, tuple[str, int]]:
        """The parts of an upload that are stored: number to ETag and size."""
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


def _answer_of(error: BaseException) -> tuple[int, str]:
    """The status of the answer behind an error, and its code; 0 and "" if there was none."""
    response = getattr(error.__cause__, "response", None) or {}
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return int(status), str(response.get("Error", {}).get("Code", ""))


def part_bytes(nbytes: int) -> int:
    """How large the parts of an object of this size are; a multiple of 64, so that no element is cut."""
    return max(MIN_PART_BYTES, -(-nbytes // MAX_PARTS // 64) * 64)


@dataclass(frozen=True, slots=True)
class S3Parts:
    """Writes parts of an upload that was begun, in this process or another."""

    storage: S3Storage
    """Where."""
    path: str
    """URL of the object."""
    where: Mapping[str, str]
    """Its bucket, its key there and the number of the upload."""
    part_bytes: int
    """Size of every part but the last."""

    def write(self, start: int, data: bytes | memoryview) -> str:
        """Write the part that begins at a byte, in place of what was written of it before; returns its ETag.

        Raises:
            StorageError: It cannot be written.
        """
        return self.storage.call(self.path, partial(self._send, start // self.part_bytes + 1, data))

    def _send(self, number: int, data: bytes | memoryview) -> str:
        sums = self.storage.checksum_of(data)
        if (client := self.storage.part_client()) is not None:
            return client.send(data, number, self.where, sums.get("ChecksumCRC32", ""))
        # As a stream: bytes would be sent in one go, and nothing else be done meanwhile.
        body = io.BytesIO(data)
        answer = self.storage.fs.call_s3("upload_part", PartNumber=number, Body=body, **sums, **self.where)
        return str(answer["ETag"])


class S3Writer:
    """An upload in parts, in any order. Nobody sees the object before it is committed.

    Args:
        storage: Where.
        path: URL of the object.
        bucket: Its bucket.
        name: Its key there.
        part_bytes: Size of every part but the last.
        number: Of an upload to go on with; "" for a new one.
        new: Whether it must replace no object.
    """

    def __init__(
        self, storage: S3Storage, path: str, bucket: str, name: str, part_bytes: int, number: str, *, new: bool = False
    ) -> None:
        self._storage = storage
        self.path = path
        self._where = {"Bucket": bucket, "Key": name}
        self.part_bytes = part_bytes
        self._lock = threading.Lock()
        self._attempts = 0
        self._new = new
        self._token = secrets.token_hex(8)
        self._parts: dict[int, tuple[str, int]] = {}
        if number:
            self._parts = storage.parts(path, bucket, name, number)
        else:
            number = storage.call(path, self._begin)
            if self._attempts > 1:
                self._abort_others(number)
        self._where["UploadId"] = number
        self._committing = False

    def _abort_others(self, number: str) -> None:
        """Give up what attempts have begun whose answer was lost; it may lack the rights to see them."""
        bucket, name = self._where["Bucket"], self._where["Key"]
        with contextlib.suppress(CkptError):
            for key, other in self._storage.pending(self.path, bucket, name):
                if key == name and other != number:
                    self._storage.abort(self.path, bucket, name, other)

    def _begin(self) -> str:
        self._attempts += 1
        told = {"Metadata": {UPLOADED_BY: self._token}} if self._new else {}
        return str(self._storage.fs.call_s3("create_multipart_upload", **told, **self._where)["UploadId"])

    def has(self, start: int, nbytes: int) -> bool:
        """Whether the part that begins at a byte is there already."""
        return self._parts.get(start // self.part_bytes + 1, ("", -1))[1] == nbytes

    def write(self, start: int, data: bytes | memoryview) -> None:
        """Write the part that begins at a byte.

        Raises:
            StorageError: It cannot be written.
        """
        self.accept(start, len(data), self.part_writer().write(start, data))

    def part_writer(self) -> S3Parts:
        """An object that writes parts, in this process or another."""
        return S3Parts(self._storage, self.path, self._where, self.part_bytes)

    def accept(self, start: int, nbytes: int, result: str) -> None:
        """Record the ETag of a part."""
        with self._lock:
            self._parts[start // self.part_bytes + 1] = (result, nbytes)

    def commit(self) -> None:
        """Let the object be seen.

        Raises:
            ExistsError: It is to be new, and there is one.
            StorageError: The store fails.
        """
        parts = [{"PartNumber": n, "ETag": etag} for n, (etag, _) in sorted(self._parts.items())]
        self._committing = True
        self._storage.call(self.path, partial(self._complete, {"Parts": parts}))
        self._storage.forget()

    def _complete(self, parts: dict[str, Any]) -> None:
        """Complete the upload, over no object if it is to be new.

        Source: Amazon S3, CompleteMultipartUpload (``If-None-Match``); where a server does not know it, it is looked
        at first.
        """
        complete = partial(self._storage.fs.call_s3, "complete_multipart_upload", MultipartUpload=parts, **self._where)
        try:
            if self._new:
                self._complete_new(complete)
            else:
                complete()
        except FileNotFoundError:
            # The answer to an attempt before this one was lost: the upload is gone because it is complete.
            if not self._is_whole():
                raise

    def _complete_new(self, complete: Callable[..., Any]) -> None:
        try:
            complete(IfNoneMatch="*")
        except FileNotFoundError:
            raise
        except OSError as error:
            code, name = _answer_of(error)
            if code in {CONFLICT, PRECONDITION_FAILED} and not self._is_whole():
                raise ExistsError(self.path, "is there already", "see who else writes there") from error
            if name in NO_CONDITIONS:
                self._storage.forget()
                if self._storage.exists(self.path):
                    raise ExistsError(self.path, "is there already", "see who else writes there") from error
                complete()
            elif code not in {CONFLICT, PRECONDITION_FAILED}:
                raise

    def _is_whole(self) -> bool:
        """Whether the object is there, and what this upload has made; if it may replace one, by its size alone."""
        fs = self._storage.fs
        try:
            if self._new:
                head = fs.call_s3("head_object", Bucket=self._where["Bucket"], Key=self._where["Key"])
                return bool(head.get("Metadata", {}).get(UPLOADED_BY) == self._token)
            found = fs.info(self._storage.key(self.path))
        except FileNotFoundError:
            return False
        return bool(found["size"] == sum(size for _, size in self._parts.values()))

    def fail(self, error: BaseException) -> None:
        """Nothing: parts come in any order, no thread waits."""

    def discard(self) -> None:
        """Give it up, and leave nothing of it."""
        aborted = self._storage.abort(self.path, self._where["Bucket"], self._where["Key"], self._where["UploadId"])
        if not aborted and self._committing and self._storage.call(self.path, self._is_whole):
            self._storage.delete([self.path])
