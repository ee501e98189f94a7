"""Read large ranges of S3 objects through obstore if it is installed, several times as fast as s3fs.

s3fs still finds the endpoint and the credentials, lists, writes, and reports errors. obstore is used only if it follows
all options as s3fs would.
"""

from __future__ import annotations

import os
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Literal

from ckpttool.storage.retry import ShortReadError

KNOWN_OPTIONS = {
    "anon",
    "client_kwargs",
    "config_kwargs",
    "endpoint_url",
    "key",
    "profile",
    "secret",
    "token",
    "use_listings_cache",
}
"""Options of s3fs that the other clients follow. Other options may change requests."""
KNOWN_CLIENT_OPTIONS = {
    "aws_access_key_id",
    "aws_secret_access_key",
    "aws_session_token",
    "endpoint_url",
    "region_name",
}
KNOWN_CONFIGURATION = {"connect_timeout", "max_pool_connections", "read_timeout", "retries"}
CREDENTIAL_SECONDS = 1
"""Seconds until obstore asks for the credentials again; botocore keeps them."""
_CREDENTIALS = (
    ("key", "aws_access_key_id", "access_key_id"),
    ("secret", "aws_secret_access_key", "secret_access_key"),
    ("token", "aws_session_token", "session_token"),
)
"""Names of credentials: options of s3fs, of botocore's client, and of obstore."""
CERTIFICATES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")
"""Environment variables with a file of CA certificates; the first takes precedence.

Source: botocore, session.py and endpoint.py.
"""
_PLAIN_STATUS = {404, 408, 412, 416, 429}
"""Status that s3fs would get too. After other 4xx s3fs may succeed, with another region or fresh credentials."""
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")


class AnswerError(Exception):
    """The store answered with an error.

    Args:
        code: Error code of S3; "" if the answer has none.
        status: HTTP status.
    """

    def __init__(self, code: str, status: int) -> None:
        super().__init__(code or f"HTTP {status}")
        # The same attribute as in botocore's errors, so that retry.explain reads it.
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


def _check_options(fs: Any) -> None:
    """Check that the options of s3fs do not change requests in unknown ways.

    Raises:
        ValueError: An option may change them.
    """
    given = fs.storage_options
    unknown = set(given) - KNOWN_OPTIONS
    unknown |= set(given.get("client_kwargs") or {}) - KNOWN_CLIENT_OPTIONS
    unknown |= set(given.get("config_kwargs") or {}) - KNOWN_CONFIGURATION
    if unknown:
        raise ValueError(f"{sorted(unknown)} may change requests")
    config = fs.s3.meta.config
    if config.proxies or any((config.s3 or {}).values()):
        raise ValueError("proxies or S3 settings are configured")


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
        from botocore.session import Session
        from obstore.store import S3Store

        _check_options(fs)
        client = fs.s3
        config = client.meta.config
        self._process = os.getpid()
        self._get = obstore.get
        self._state: Literal["untried", "works", "given up"] = "untried"
        self._lacked_credentials = False
        client_options: Any = {"allow_http": True, "timeout": "1h", "pool_max_idle_per_host": "64"}
        client_options |= {"connect_timeout": f"{config.connect_timeout}s", "read_timeout": f"{config.read_timeout}s"}
        bundle = next(filter(None, map(os.environ.get, CERTIFICATES)), None)
        if bundle and client.meta.endpoint_url.startswith("https"):
            client_options["root_certificate"] = Path(bundle).read_bytes()
        signing: dict[str, Any] = {"skip_signature": True} if fs.anon else _signing(fs)
        if not signing:
            self._found = Session(profile=fs.storage_options.get("profile")).get_credentials()
            signing = {"credential_provider": self._credentials}
        self._store: Any = S3Store(
            bucket,
            endpoint=client.meta.endpoint_url,
            region="us-east-1" if client.meta.region_name in {None, "aws-global"} else str(client.meta.region_name),
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
        if self._state == "given up" or os.getpid() != self._process:  # a forked process lacks its threads
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
        if self._state == "untried":
            self._state = "works"
        return data

    def _raise_if_plain(self, text: str) -> None:
        """Raise the error for a text of obstore, unless s3fs may succeed or report it better."""
        found = _STATUS.search(text)
        status = int(found[1]) if found else 0
        if status in _PLAIN_STATUS or status >= 500:
            code = _CODE.search(text)
            raise AnswerError(code[1] if code else "", status)
        if not status and self._state == "works" and not self._lacked_credentials:
            raise ConnectionError
        if self._state == "untried":  # certificates, proxies, regions or signatures may need s3fs
            self._state = "given up"
        self._lacked_credentials = False

    def _credentials(self) -> dict[str, Any]:
        """Return credentials as botocore finds and renews them; obstore asks again when they are about to expire."""
        try:
            frozen = self._found.get_frozen_credentials()
        except Exception:
            self._lacked_credentials = True
            raise
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(timezone.utc) + timedelta(seconds=CREDENTIAL_SECONDS),
        }


def _signing(fs: Any) -> dict[str, Any]:
    """Return the credentials in s3fs's options as arguments of ``S3Store``; empty without.

    Source: s3fs 2026, core.py (``S3FileSystem.set_session``).
    """
    given = fs.storage_options
    client = given.get("client_kwargs") or {}
    return {
        theirs: str(value) for ours, botos, theirs in _CREDENTIALS if (value := given.get(ours) or client.get(botos))
    }
