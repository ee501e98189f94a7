"""Parts of uploads to S3, each signed and sent by the thread that has it.

s3fs sends everything from one thread, which computes and copies for each request: of many parts at once each waits for
the others.

Source: AWS, "Authenticating Requests: Using the Authorization Header (AWS Signature Version 4)".
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

from ckpttool.storage.s3_client import (
    AnswerError,
    certificates,
    check_options,
    credentials_of,
    is_plain,
    region_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_CODE = re.compile(rb"<Code>(\w+)</Code>")
_UNSIGNED = "UNSIGNED-PAYLOAD"
_PIECE_BYTES = 1 << 18
_SAME_FOR_ALL = {
    "AccessDenied", "AllAccessDisabled", "ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidToken",
    "TokenRefreshRequired",
}  # fmt: skip
"""What s3fs would hear as well, with the same credentials."""


def _signer() -> Any:
    from botocore.auth import S3SigV4Auth

    class Signer(S3SigV4Auth):  # type: ignore[misc]  # botocore is not followed
        """Takes the payload's digest as it is told."""

        def payload(self, request: Any) -> str:
            return str(request.context["digest"])

    return Signer


def _pieces(data: bytes | memoryview) -> Iterator[memoryview]:
    """A part as it is sent: what a socket is given at once has to be gone within its timeout, however slow the link."""
    view = memoryview(data)
    for start in range(0, len(view), _PIECE_BYTES):
        yield view[start : start + _PIECE_BYTES]


class SignedParts:
    """Sends parts of uploads. Threads may share it.

    Args:
        fs: s3fs's file system.
        connections: How many are kept open.

    Raises:
        ImportError: urllib3 is not installed.
        ValueError: Not all that this file system was told can be followed.
    """

    def __init__(self, fs: Any, connections: int) -> None:
        import urllib3
        from botocore.httpsession import get_cert_path

        check_options(fs)
        endpoint = urlsplit(fs.s3.meta.endpoint_url)
        if fs.anon or (getproxies().get(endpoint.scheme) and not proxy_bypass(endpoint.hostname or "")):
            raise ValueError("nothing is signed, or a proxy stands between")
        config = fs.s3.meta.config
        self._process = os.getpid()
        self._fs = fs
        self._region = region_of(fs)
        self._signer = _signer()
        self._held: Any = None
        self._addresses: dict[tuple[str, str], str] = {}
        self._works = False
        self._given_up = False
        self._failures = urllib3.exceptions.HTTPError
        self._pool = urllib3.PoolManager(
            maxsize=connections,
            retries=False,  # failures.call tries again, once for all reasons
            # A fresh connection grants what it sends no more time than connecting.
            timeout=urllib3.Timeout(connect=max(config.connect_timeout, config.read_timeout), read=config.read_timeout),
            ca_certs=certificates() or get_cert_path(True),
        )

    def send(self, data: bytes | memoryview, number: int, where: Mapping[str, str], checksum: str) -> str | None:
        """Send a part; its ETag, or None if s3fs is to be asked.

        Args:
            data: Its bytes.
            number: Its number, from 1 on.
            where: Bucket, key and number of the upload.
            checksum: What the store is to compare it with, CRC-32 in base 64; "" if it is not to.

        Raises:
            AnswerError: The store refused.
            ConnectionError: It was not heard to the end.
        """
        if self._given_up or os.getpid() != self._process:
            return None
        url, headers = self._signed(data, number, where, checksum)
        headers["Content-Length"] = str(len(data))
        try:
            # urllib3's types do not know memory's views, its connections do.
            body: Any = _pieces(data)
            answer = self._pool.request("PUT", url, body=body, headers=headers, redirect=False)
        except self._failures as error:
            if not self._works:  # s3fs may reach it: certificates, names
                self._given_up = True
                return None
            raise ConnectionError from error
        etag = answer.headers.get("ETag")
        if answer.status == 200 and etag:
            self._works = True
            return str(etag)
        found = _CODE.search(answer.data)
        code = found[1].decode() if found else ""
        if is_plain(answer.status) or code in _SAME_FOR_ALL:
            raise AnswerError(code, answer.status)
        self._given_up = not self._works  # regions, signatures
        return None

    def _signed(
        self, data: bytes | memoryview, number: int, where: Mapping[str, str], checksum: str
    ) -> tuple[str, dict[str, str]]:
        from botocore.awsrequest import AWSRequest

        address = self._address(where["Bucket"], where["Key"])
        url = f"{address}?partNumber={number}&uploadId={quote(where['UploadId'], safe='')}"
        # As botocore does it: a checksum is enough where nobody can change what is on its way.
        unsigned = checksum and url.startswith("https:")
        digest = _UNSIGNED if unsigned else hashlib.sha256(data).hexdigest()
        headers = {"x-amz-checksum-crc32": checksum} if checksum else {}
        request = AWSRequest("PUT", url, headers=headers)
        request.context["digest"] = digest
        self._signer(self._credentials(), "s3", self._region).add_auth(request)
        return url, dict(request.headers.items())

    def _credentials(self) -> Any:
        from fsspec.asyn import sync

        if self._held is not None:
            return self._held
        credentials, expires = sync(self._fs.loop, credentials_of, self._fs)
        if expires is None:
            self._held = credentials
        return credentials

    def _address(self, bucket: str, key: str) -> str:
        """Where an object is, as s3fs's client would have it."""
        from fsspec.asyn import sync

        found = self._addresses.get((bucket, key))
        if found is None:
            ask = self._fs.s3.generate_presigned_url
            found = str(sync(self._fs.loop, ask, "put_object", {"Bucket": bucket, "Key": key})).partition("?")[0]
            self._addresses[bucket, key] = found
        return found
