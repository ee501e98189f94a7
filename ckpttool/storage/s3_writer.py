"""Write objects in S3 by multipart uploads: parts in any order, one commit, never over an object of another process."""

from __future__ import annotations

import contextlib
import io
import secrets
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.errors import CkptError
from ckpttool.storage.error_texts import ExistsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckpttool.storage.s3 import S3Storage

UPLOADED_BY = "ckpttool-upload"
"""Metadata key that identifies the upload that has created an object."""
CONFLICT, PRECONDITION_FAILED = 409, 412
"""HTTP status of refused conditional writes."""
NO_CONDITIONS = {"NotImplemented", "InvalidArgument", "InvalidRequest"}
"""Error codes of servers that do not support conditional writes."""


def answer_of(error: BaseException) -> tuple[int, str]:
    """Return HTTP status and error code of the answer behind an error; 0 and "" without an answer."""
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
        return self.storage.call(self.path, partial(self._send, start // self.part_bytes + 1, data))

    def _send(self, number: int, data: bytes | memoryview) -> str:
        sums = self.storage.checksum_of(data)
        if (client := self.storage.part_client()) is not None:
            return client.send(data, number, self.where, sums.get("ChecksumCRC32", ""))
        # A stream, because the event loop would send bytes in one call and block meanwhile.
        body = io.BytesIO(data)
        answer = self.storage.fs.call_s3("upload_part", PartNumber=number, Body=body, **sums, **self.where)
        return str(answer["ETag"])


class S3Writer:
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
        return str(self._storage.fs.call_s3("create_multipart_upload", **metadata, **self._where)["UploadId"])

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
        self._storage.call(self.path, partial(self._complete, {"Parts": parts}))
        self._storage.forget()

    def _complete(self, parts: dict[str, Any]) -> None:
        """Complete the upload; with ``new`` never replace an object.

        On servers without conditional writes, checks for the object before the write.

        Source: Amazon S3, CompleteMultipartUpload (``If-None-Match``).
        """
        complete = partial(self._storage.fs.call_s3, "complete_multipart_upload", MultipartUpload=parts, **self._where)
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
        """Do nothing: no thread waits for the part of another."""

    def discard(self) -> None:
        """Abort the upload; delete the object if this upload has completed it."""
        aborted = self._storage.abort(self.path, self._where["Bucket"], self._where["Key"], self._where["UploadId"])
        if not aborted and self._committing and self._storage.call(self.path, self._is_complete):
            self._storage.delete([self.path])
