"""Read large ranges of S3 objects through obstore if it is installed, several times as fast as s3fs.

s3fs still finds the endpoint and the credentials, lists, writes, and reports errors. obstore is used only if it follows
all options as s3fs would.
"""

from __future__ import annotations

import os
import re
from datetime import timezone
from pathlib import Path
from typing import Any

from ckpttool.storage.retry import ShortReadError
from ckpttool.storage.s3_client import (
    AnswerError,
    certificates,
    check_options,
    credentials_of,
    is_plain,
    region_of,
)

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")


class ObstoreRanges:
    """Reads ranges of the objects of one bucket. Threads may share it.

    Args:
        fs: The file system of s3fs.
        bucket: The bucket.

    Raises:
        ImportError: obstore is not installed.
        ValueError: The file system has options that obstore does not follow.
        OSError: The file of CA certificates cannot be read.
    """

    def __init__(self, fs: Any, bucket: str) -> None:
        import obstore
        from obstore.store import S3Store

        check_options(fs)
        client = fs.s3
        config = client.meta.config
        self._process = os.getpid()
        self._fs = fs
        self._get = obstore.get
        self._works = False
        self._given_up = False
        self._refused: Exception | None = None
        client_options: Any = {"allow_http": True, "timeout": "1h", "pool_max_idle_per_host": "64"}
        client_options |= {"connect_timeout": f"{config.connect_timeout}s", "read_timeout": f"{config.read_timeout}s"}
        bundle = certificates()
        if bundle and client.meta.endpoint_url.startswith("https"):
            client_options["root_certificate"] = Path(bundle).read_bytes()
        signing = {"skip_signature": True} if fs.anon else {"credential_provider": self._credentials}
        self._store: Any = S3Store(
            bucket,
            endpoint=client.meta.endpoint_url,
            region=region_of(fs),
            client_options=client_options,
            retry_config={"max_retries": 0},  # retry.call retries all kinds of errors
            **signing,
        )

    def get(self, key: str, start: int, end: int, version: str) -> memoryview | None:
        """Return the bytes [start, end) of one version of an object; None if s3fs must read them.

        Raises:
            AnswerError: The store answered with an error.
            ShortReadError: The store sent another range.
            ConnectionError: The connection broke.
        """
        if self._given_up or os.getpid() != self._process:  # a forked process lacks its threads
            return None
        options: Any = {"range": (start, end)}
        if version:
            options["if_match"] = f'"{version}"'
        try:
            answer = self._get(self._store, key, options=options)
            got = answer.range
            data = memoryview(answer.bytes()) if got == (start, end) else None
        except Exception as error:
            self._raise_if_plain(str(error))
            return None
        if data is None:
            raise ShortReadError(f"{got[1] - got[0]:,} bytes instead of {end - start:,}")
        self._works = True
        return data

    def _raise_if_plain(self, text: str) -> None:
        """Raise the error for a text of obstore, unless s3fs may succeed or report it better."""
        found = _STATUS.search(text)
        status = int(found[1]) if found else 0
        if is_plain(status):
            code = _CODE.search(text)
            raise AnswerError(code[1] if code else "", status)
        if not status and self._works and self._refused is None:
            raise ConnectionError
        # obstore fails before its first success: certificates, proxies, regions or signatures may need s3fs.
        self._given_up = not self._works
        self._refused = None

    def _credentials(self) -> dict[str, Any]:
        from fsspec.asyn import sync

        try:
            found: dict[str, Any] = sync(self._fs.loop, self._find_credentials)
        except Exception as error:
            self._refused = error
            raise
        return found

    async def _find_credentials(self) -> dict[str, Any]:
        frozen, expires = await credentials_of(self._fs)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": expires and expires.astimezone(timezone.utc),  # obstore requires UTC
        }
