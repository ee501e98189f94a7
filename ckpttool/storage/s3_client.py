"""Share options, credentials and errors between s3fs and the faster S3 clients beside it, obstore and botocore.

s3fs finds the endpoint and the credentials, and reports errors. A faster client is used only if it follows all options
as s3fs would.
"""

from __future__ import annotations

import os
from typing import Any

KNOWN_OPTIONS = {
    "anon", "client_kwargs", "config_kwargs", "endpoint_url", "key", "profile", "secret", "token", "use_listings_cache",
}  # fmt: skip
"""Options of s3fs that the other clients follow. Other options may change requests."""
KNOWN_CLIENT_OPTIONS = {
    "aws_access_key_id", "aws_secret_access_key", "aws_session_token", "endpoint_url", "region_name",
}  # fmt: skip
KNOWN_CONFIGURATION = {"connect_timeout", "max_pool_connections", "read_timeout", "retries"}
CERTIFICATES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")
"""Environment variables with a file of CA certificates; the first takes precedence.

Source: botocore, session.py and endpoint.py.
"""
_PLAIN_STATUS = {404, 408, 412, 416, 429}
"""Status that s3fs would get too. After other 4xx s3fs may succeed, with another region or fresh credentials."""


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


def is_plain(status: int) -> bool:
    """Return whether s3fs would get the same answer."""
    return status in _PLAIN_STATUS or status >= 500


def check_options(fs: Any) -> None:
    """Check that the options of s3fs do not change requests in unknown ways.

    Raises:
        ValueError: An option may.
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


def certificates() -> str | None:
    """Return the file of CA certificates from the environment; None without."""
    return next(filter(None, map(os.environ.get, CERTIFICATES)), None)


def region_of(fs: Any) -> str:
    """Return the region for signatures of requests."""
    name = fs.s3.meta.region_name
    return "us-east-1" if name in {None, "aws-global"} else str(name)


async def credentials_of(fs: Any) -> tuple[Any, Any]:
    """Return the current credentials (``access_key``, ``secret_key``, ``token``) and their expiry time or None."""
    credentials = fs.s3._request_signer._credentials
    return await credentials.get_frozen_credentials(), getattr(credentials, "_expiry_time", None)
