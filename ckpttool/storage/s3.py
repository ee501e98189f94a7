"""The storage of S3 and compatible stores."""

from __future__ import annotations

import base64
import contextlib
import secrets
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.checksums import crc32
from ckpttool.errors import CkptError
from ckpttool.storage.base import Entry, ExistsError, Writer, check_text, decode_text
from ckpttool.storage.fsspec import RemoteStorage, entry_of
from ckpttool.storage.retry import NO_BUCKET, ShortReadError, explain
from ckpttool.storage.s3_client import client_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

MAX_PARTS = 10_000
"""Most parts of one upload; a limit of S3."""
MIN_PART_BYTES = 5 << 20
"""Least bytes of each part but the last; a limit of S3."""
UPLOADED_BY = "ckpttool-upload"
"""Metadata key that identifies the upload that has created an object."""
MAX_COPY_BYTES = 5 << 30
"""Most bytes of an object to copy with one request; a limit of S3."""
CONFLICT, PRECONDITION_FAILED = 409, 412
"""HTTP status of refused conditional writes."""
NO_CONDITIONS = {"NotImplemented", "InvalidArgument", "InvalidRequest"}
"""Error codes of servers that do not support conditional writes."""


class S3Storage(RemoteStorage):
    """The storage of S3 buckets. Threads may share it.

    Args:
        fs: The file system of s3fs.
    """

    reads_versions = True
    parts_from_anywhere = True

    def __init__(self, fs: Any) -> None:
        super().__init__(fs)
        self.client = client_of(fs)

    def look(self, key: str) -> list[dict[str, Any]]:
        """Return s3fs's infos of a directory's entries, or of the object at that key.

        Not ``fs.ls``: for a missing key s3fs lists the parent directory, which may contain very many objects.
        """
        if not key:
            return super().look(key)  # all buckets
        found = self._below(key)
        if found or "/" not in key:
            return found
        if not (found := self._object(key)):
            raise FileNotFoundError(key)
        return found

    def find(self, key: str) -> list[dict[str, Any]]:
        """Return s3fs's infos of all objects below a directory."""
        return [info for page in self._list(f"{key}/") for info in page]

    def info(self, key: str) -> dict[str, Any]:
        """Return s3fs's info of an object or a directory.

        HEAD, because the credentials may have no right to list.
        """
        bucket, _, name = key.partition("/")
        if not name:
            return super().info(key)
        try:
            head = self.client.request("head_object", Bucket=bucket, Key=name)
        except FileNotFoundError:
            if not self._below(key.rstrip("/")):
                raise
            return {"name": key, "size": 0, "type": "directory"}
        return {**head, "name": key, "size": head["ContentLength"], "type": "file"}

    def remove(self, key: str) -> None:
        """Delete an object."""
        bucket, _, name = key.partition("/")
        self.client.request("delete_object", Bucket=bucket, Key=name)

    def is_dir(self, path: str) -> bool:
        """Return whether there is any object below the path; one request."""
        key = self.key(path).rstrip("/")
        if self._lookup(path)[0] or "/" not in key:
            return super().is_dir(path)
        found = self.call(path, self._below, key)
        return bool(found and self._remember(path, key, found))

    def is_file(self, path: str) -> bool:
        """Return whether a path that is not a directory is an object; one request."""
        key = self.key(path).rstrip("/")
        if "/" not in key:
            return False
        found = self.call(path, self._object, key)
        if found:
            self._single[key] = entry_of(found[0])
        else:
            self._listed[key] = []  # cached: the path does not exist
        return bool(found)

    def _below(self, key: str) -> list[dict[str, Any]]:
        return [info for page in self._list(f"{key}/", Delimiter="/") for info in page]

    def _object(self, key: str) -> list[dict[str, Any]]:
        """Return the info of the object with exactly this key: the first of a listing with that prefix.

        A listing, because the credentials may have no right to HEAD.
        """
        return [info for info in next(self._list(key, MaxKeys=1)) if info["name"] == key and info["type"] == "file"]

    def _list(self, prefix: str, **how: Any) -> Iterator[list[dict[str, Any]]]:
        """Yield pages of s3fs's infos of objects and common prefixes."""
        bucket, _, prefix = prefix.partition("/")
        after: dict[str, str] = {}
        while True:
            page = self.client.request("list_objects_v2", Bucket=bucket, Prefix=prefix, **how, **after)
            yield [
                *(
                    {"name": f"{bucket}/{p['Prefix'][:-1]}", "size": 0, "type": "directory"}
                    for p in page.get("CommonPrefixes", [])
                ),
                *(
                    {**c, "name": f"{bucket}/{c['Key']}", "size": c["Size"], "type": "file"}
                    for c in page.get("Contents", [])
                ),
            ]
            if not page.get("IsTruncated"):
                return
            after = {"ContinuationToken": page["NextContinuationToken"]}

    def copy(self, key: str, to: str, entry: Entry) -> None:
        """Copy an object."""
        if entry.nbytes > MAX_COPY_BYTES:
            super().copy(key, to, entry)
            return
        bucket, _, name = to.partition("/")
        old_bucket, _, old = key.partition("/")
        self.client.request("copy_object", Bucket=bucket, Key=name, CopySource={"Bucket": old_bucket, "Key": old})

    def read_text(self, path: str) -> str:
        """Return the content of a small text file; one request if no cached listing covers it.

        Raises:
            StorageError: The file cannot be read, is larger than 1 MiB or is not text.
        """
        if self._lookup(path)[0]:
            return super().read_text(path)
        return decode_text(path, self.call(path, self._read_small, path))

    def _read_small(self, path: str) -> bytes:
        bucket, key = self._names(path)
        return bytes(self.client.read(lambda nbytes: check_text(path, nbytes), Bucket=bucket, Key=key))

    def get(self, path: str, start: int, end: int, version: str) -> memoryview:
        """Return the bytes [start, end) of one version of an object; one request.

        The request has the ETag of the listing, so that the store refuses it if the object was rewritten.
        """
        bucket, key = self._names(path)
        given = {"Bucket": bucket, "Key": key, "Range": f"bytes={start}-{end - 1}"}
        if version:
            given["IfMatch"] = f'"{version}"'

        def check(nbytes: int) -> None:  # a server without ranges would send the whole file, too large for memory
            if nbytes != end - start:
                raise ShortReadError(f"{nbytes:,} bytes instead of {end - start:,}")

        return self.client.read(check, **given)

    def checksum_of(self, data: bytes | memoryview) -> dict[str, str]:
        """Return the checksum parameters of a part; empty if the store gets none.

        botocore would compute the same checksum a few times slower. Some stores do not support checksums.
        """
        if not self.client.sends_checksums():
            return {}
        return {"ChecksumCRC32": base64.b64encode(crc32(data).to_bytes(4, "big")).decode()}

    def upload(self, path: str, nbytes: int, key: str = "", *, new: bool = False) -> S3Writer:
        """Begin a multipart upload, or resume the upload with identifier ``key``.

        Raises:
            StorageError: The store fails.
        """
        bucket, name = self._names(path)
        return S3Writer(self, path, bucket, name, self.part_bytes(nbytes), key, new=new)

    def put(self, path: str, *parts: bytes | memoryview, mode: int = 0o666) -> None:
        """Write or replace a small object.

        Raises:
            StorageError: The object cannot be written.
        """
        bucket, name = self._names(path)
        data, kind = b"".join(parts), _content_type(name)
        self.call(path, self.client.request, "put_object", Bucket=bucket, Key=name, Body=data, **kind)
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
                self.client.request("put_object", Bucket=bucket, Key=name, Body=data, **given)
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
        return not data or bytes(self.call(path, self.get, path, 0, len(data), entry.version)) == data

    def part_bytes(self, nbytes: int) -> int:
        """Return the part size in bytes for an object of ``nbytes`` bytes; a multiple of 64: no element is split."""
        return max(MIN_PART_BYTES, -(-nbytes // MAX_PARTS // 64) * 64)

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
        return self.call(path, self._abort, bucket, name, number)

    def _abort(self, bucket: str, name: str, number: str) -> bool:
        try:
            self.client.request("abort_multipart_upload", Bucket=bucket, Key=name, UploadId=number)
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
            page = self.call(path, self.client.request, method, **given, **after)
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


def answer_of(error: BaseException) -> tuple[int, str]:
    """Return HTTP status and error code of the answer that caused an error; 0 and "" without an answer."""
    response = getattr(error.__cause__, "response", None) or {}
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return int(status), str(response.get("Error", {}).get("Code", ""))


@dataclass(frozen=True, slots=True)
class S3Parts:
    """Writes parts of a pending upload in any process."""

    storage: S3Storage
    """Storage of the object."""
    path: str
    """URL of the object."""
    where: Mapping[str, str]
    """Parameters ``Bucket``, ``Key`` and ``UploadId`` of requests."""
    part_bytes: int
    """Size of every part but the last, in bytes."""

    def write(self, start: int, data: bytes | memoryview) -> str:
        """Write or replace the part that begins at byte ``start``; return its ETag.

        Raises:
            StorageError: The part cannot be written.
        """
        return self.storage.call(self.path, self._send, start // self.part_bytes + 1, data)

    def _send(self, number: int, data: bytes | memoryview) -> str:
        sums = self.storage.checksum_of(data)
        given = {"PartNumber": number, "Body": data, **sums, **self.where}
        answer = self.storage.client.request("upload_part", **given)
        return str(answer["ETag"])


class S3Writer(Writer):
    """Writes an object by a multipart upload, in any order. No reader sees the object before ``commit``.

    Args:
        storage: Storage of the object.
        path: URL of the object.
        bucket: Its bucket.
        name: Its key in the bucket.
        part_bytes: Size of every part but the last, in bytes.
        number: Identifier of the upload to resume; "" for a new one.
        new: Whether the upload must not replace an object.

    Raises:
        StorageError: The store fails.
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
        """Abort the uploads of earlier attempts with lost answers; the credentials may lack the right to list them."""
        bucket, name = self._where["Bucket"], self._where["Key"]
        with contextlib.suppress(CkptError):
            for key, other in self._storage.pending(self.path, bucket, name):
                if key == name and other != number:
                    self._storage.abort(self.path, bucket, name, other)

    def _begin(self) -> str:
        self._attempts += 1
        metadata = {"Metadata": {UPLOADED_BY: self._token}} if self._new else {}
        return str(self._storage.client.request("create_multipart_upload", **metadata, **self._where)["UploadId"])

    def has(self, start: int, nbytes: int) -> bool:
        """Return whether the part that begins at byte ``start`` is stored."""
        return self._parts.get(start // self.part_bytes + 1, ("", -1))[1] == nbytes

    def write(self, start: int, data: bytes | memoryview) -> None:
        """Write the part that begins at byte ``start``.

        Raises:
            StorageError: The part cannot be written.
        """
        self.accept(start, len(data), self.part_writer().write(start, data))

    def part_writer(self) -> S3Parts:
        """Return an object that writes parts in any process."""
        return S3Parts(self._storage, self.path, self._where, self.part_bytes)

    def accept(self, start: int, nbytes: int, result: str) -> None:
        """Record the ETag of a part."""
        with self._lock:
            self._parts[start // self.part_bytes + 1] = (result, nbytes)

    def commit(self) -> None:
        """Make the complete object visible to readers.

        Raises:
            ExistsError: ``new`` is set, and the object exists.
            StorageError: The store fails.
        """
        parts = [{"PartNumber": n, "ETag": etag} for n, (etag, _) in sorted(self._parts.items())]
        self._committing = True
        self._storage.call(self.path, self._complete, {"Parts": parts})
        self._storage.forget()

    def _complete(self, parts: dict[str, Any]) -> None:
        """Complete the upload; with ``new`` never replace an object.

        On servers without conditional writes, checks for the object before the write.

        Source: Amazon S3, CompleteMultipartUpload (``If-None-Match``).
        """
        complete = partial(
            self._storage.client.request, "complete_multipart_upload", MultipartUpload=parts, **self._where
        )
        try:
            if self._new:
                self._complete_new(complete)
            else:
                complete()
        except FileNotFoundError:
            # The answer to an earlier attempt may be lost: the upload does not exist any more because it is complete.
            if not self._is_complete():
                raise

    def _complete_new(self, complete: Callable[..., Any]) -> None:
        try:
            complete(IfNoneMatch="*")
        except FileNotFoundError:
            raise
        except OSError as error:
            code, name = answer_of(error)
            if code in {CONFLICT, PRECONDITION_FAILED} and not self._is_complete():
                raise ExistsError(self.path, "exists already", "check which other process writes it") from error
            if name in NO_CONDITIONS:
                self._storage.forget()
                if self._storage.exists(self.path):
                    raise ExistsError(self.path, "exists already", "check which other process writes it") from error
                complete()
            elif code not in {CONFLICT, PRECONDITION_FAILED}:
                raise

    def _is_complete(self) -> bool:
        """Return whether this upload has created the object; without ``new`` only its size is compared."""
        where = {name: self._where[name] for name in ("Bucket", "Key")}
        try:
            head = self._storage.client.request("head_object", **where)
        except FileNotFoundError:
            return False
        if self._new:
            return bool(head.get("Metadata", {}).get(UPLOADED_BY) == self._token)
        return bool(head["ContentLength"] == sum(size for _, size in self._parts.values()))

    def discard(self) -> None:
        """Abort the upload; delete the object if this upload has completed it."""
        aborted = self._storage.abort(self.path, self._where["Bucket"], self._where["Key"], self._where["UploadId"])
        if not aborted and self._committing and self._storage.call(self.path, self._is_complete):
            self._storage.delete([self.path])
