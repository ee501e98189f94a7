"""Send parts of multipart uploads to S3 with botocore's client, from several threads.

s3fs sends all requests from one thread, which also computes and copies for each: concurrent parts wait for each other.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from ckpttool.storage.s3_client import check_options

if TYPE_CHECKING:
    from collections.abc import Mapping

_CREDENTIALS = {"key": "aws_access_key_id", "secret": "aws_secret_access_key", "token": "aws_session_token"}
"""botocore's names of options of s3fs."""


class _PartBody:
    """The body of a request: a readable stream over a buffer, which it does not copy as ``io.BytesIO`` does.

    A stream, because a single send of all bytes must end within the socket's timeout, however slow the link is.
    """

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self._at = 0

    def __len__(self) -> int:
        return len(self._data)

    def read(self, nbytes: int | None = None) -> memoryview:
        """Return the next bytes, at most ``nbytes``; valid as long as the buffer is."""
        end = len(self._data) if nbytes is None or nbytes < 0 else self._at + nbytes
        found = self._data[self._at : end]
        self._at += len(found)
        return found

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}[whence]
        return self._at


class PartClient:
    """Sends parts of multipart uploads. Threads may share it.

    Args:
        fs: The file system of s3fs.

    Raises:
        ImportError: botocore is not installed.
        ValueError: The file system has options that this client does not follow.
    """

    def __init__(self, fs: Any) -> None:
        from botocore.config import Config

        check_options(fs)
        if fs.anon:
            raise ValueError("requests are not signed")
        given = fs.storage_options
        settings = dict(given.get("config_kwargs") or {})
        # urllib3 limits each send by the connect timeout, which is too short for a slow link.
        settings["connect_timeout"] = max(settings.get("connect_timeout", 60), settings.get("read_timeout", 60))
        self._profile = given.get("profile")
        self._client_options = {
            **{theirs: given[ours] for ours, theirs in _CREDENTIALS.items() if given.get(ours)},
            **({"endpoint_url": given["endpoint_url"]} if given.get("endpoint_url") else {}),
            **(given.get("client_kwargs") or {}),
            "config": Config(**settings),
        }
        self._lock = threading.Lock()
        self._process = -1
        self._client: Any = None

    def send(self, data: bytes | memoryview, number: int, where: Mapping[str, str], checksum: str) -> str:
        """Send a part; return its ETag.

        Args:
            data: Its bytes.
            number: Its number, from 1 on.
            where: Parameters ``Bucket``, ``Key`` and ``UploadId``.
            checksum: CRC-32 of the part in base 64, for the store to check; "" for none.

        Raises:
            Exception: An error of botocore, for ``retry.explain``.
        """
        sums = {"ChecksumCRC32": checksum} if checksum else {}
        answer = self._opened().upload_part(PartNumber=number, Body=_PartBody(data), **sums, **where)
        return str(answer["ETag"])

    def _opened(self) -> Any:
        """Return the client of this process; a forked process must not share connections."""
        with self._lock:
            if self._process != os.getpid():
                from botocore.session import Session

                self._client = Session(profile=self._profile).create_client("s3", **self._client_options)
                self._process = os.getpid()
            return self._client
