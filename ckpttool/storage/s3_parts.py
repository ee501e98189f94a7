"""Sends parts of uploads to S3 from the threads that hold them, with botocore's own client.

s3fs sends everything from one thread, which computes and copies for each request: of many parts at once each waits for
the others.
"""

from __future__ import annotations

import io
import os
import threading
from typing import TYPE_CHECKING, Any

from ckpttool.storage.s3_client import check_options

if TYPE_CHECKING:
    from collections.abc import Mapping

_CREDENTIALS = {"key": "aws_access_key_id", "secret": "aws_secret_access_key", "token": "aws_session_token"}
"""Options of s3fs, and what botocore calls them."""


class PartClient:
    """Sends parts of uploads. Threads may share it.

    Args:
        fs: s3fs's file system.

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
        # urllib3 grants what it sends no more time than connecting: a slow link needs more.
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
        """Send a part; returns its ETag.

        Args:
            data: Its bytes.
            number: Its number, from 1 on.
            where: Bucket, key and number of the upload.
            checksum: CRC-32 in base 64 that the store compares the part with; "" for none.

        Raises:
            Exception: botocore's, as ``retry.explain`` knows them.
        """
        sums = {"ChecksumCRC32": checksum} if checksum else {}
        # As a stream: a socket must take what it is given at once within its timeout, however slow the link is.
        answer = self._opened().upload_part(PartNumber=number, Body=io.BytesIO(data), **sums, **where)
        return str(answer["ETag"])

    def _opened(self) -> Any:
        """The client of this process: a forked one must not share connections."""
        with self._lock:
            if self._process != os.getpid():
                from botocore.session import Session

                self._client = Session(profile=self._profile).create_client("s3", **self._client_options)
                self._process = os.getpid()
            return self._client
