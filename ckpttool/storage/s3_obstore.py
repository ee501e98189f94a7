"""Large ranges of S3's objects through obstore, where it is installed: several times s3fs's bytes a second.

s3fs stays in charge: it finds the endpoint and the credentials, lists, writes, and says what is wrong. What obstore is
not sure to do as s3fs would, it is not asked for.
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
        fs: s3fs's file system.
        bucket: The bucket.

    Raises:
        ImportError: obstore is not installed.
        ValueError: Not all that this file system was told can be told obstore.
        OSError: There is no such file of certificates.
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
            retry_config={"max_retries": 0},  # failures.call tries again, once for all reasons
            **signing,
        )

    def get(self, key: str, start: int, end: int, version: str) -> memoryview | None:
        """The bytes [start, end) of one version of an object; None if s3fs is to be asked.

        Raises:
            AnswerError: The store refused.
            ShortReadError: It sent something else.
            ConnectionError: It was not heard to the end.
        """
        if self._given_up or os.getpid() != self._process:  # its threads are not there in a process that was forked
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
        """Raise what an error of obstore's means, unless s3fs may know more of it."""
        found = _STATUS.search(text)
        status = int(found[1]) if found else 0
        if is_plain(status):
            code = _CODE.search(text)
            raise AnswerError(code[1] if code else "", status)
        if not status and self._works and self._refused is None:
            raise ConnectionError
        # The first that is heard of a store that s3fs reaches: certificates, proxies, regions, signatures.
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
            "expires_at": expires and expires.astimezone(timezone.utc),  # it takes no other zone
        }
