"""What the faster roads to S3 share, which are taken beside s3fs where that is sure to change nothing.

s3fs finds the endpoint and the credentials, and says what is wrong. What another road is not sure to do as s3fs would,
it is not asked for.
"""

from __future__ import annotations

import os
from typing import Any

KNOWN_OPTIONS = {
    "anon", "client_kwargs", "config_kwargs", "endpoint_url", "key", "profile", "secret", "token", "use_listings_cache",
}  # fmt: skip
"""s3fs's options that are followed. Others may change what a request says."""
KNOWN_CLIENT_OPTIONS = {
    "aws_access_key_id", "aws_secret_access_key", "aws_session_token", "endpoint_url", "region_name",
}  # fmt: skip
KNOWN_CONFIGURATION = {"connect_timeout", "max_pool_connections", "read_timeout", "retries"}
CERTIFICATES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")
"""Variables that name a file of certificates; the first counts. Source: botocore, session.py and endpoint.py."""
_PLAIN_STATUS = {404, 408, 412, 416, 429}
"""What s3fs would hear as well; after the rest of 4xx it may know what to do: another region, fresh credentials."""


class AnswerError(Exception):
    """A store's answer that is none of success.

    Args:
        code: What S3 calls it; "" if it does not say.
        status: HTTP's status.
    """

    def __init__(self, code: str, status: int) -> None:
        super().__init__(code or f"HTTP {status}")
        # As botocore has it, so that what is known of its errors holds for these.
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


def is_plain(status: int) -> bool:
    """Whether an answer means the same to s3fs: asking it would not help."""
    return status in _PLAIN_STATUS or status >= 500


def check_options(fs: Any) -> None:
    """See that nothing was asked of s3fs that may change requests.

    Raises:
        ValueError: Something was.
    """
    given = fs.storage_options
    unknown = set(given) - KNOWN_OPTIONS
    unknown |= set(given.get("client_kwargs") or {}) - KNOWN_CLIENT_OPTIONS
    unknown |= set(given.get("config_kwargs") or {}) - KNOWN_CONFIGURATION
    if unknown:
        raise ValueError(f"{sorted(unknown)} may change requests")
    config = fs.s3.meta.config
    if config.proxies or any((config.s3 or {}).values()):
        raise ValueError("configured in a way of its own")


def certificates() -> str | None:
    """The file of certificates that the environment names."""
    return next(filter(None, map(os.environ.get, CERTIFICATES)), None)


def region_of(fs: Any) -> str:
    """The region that requests are signed for."""
    name = fs.s3.meta.region_name
    return "us-east-1" if name in {None, "aws-global"} else str(name)


async def credentials_of(fs: Any) -> tuple[Any, Any]:
    """What requests are signed with now (``access_key``, ``secret_key``, ``token``), and until when; None: for ever."""
    held = fs.s3._request_signer._credentials
    return await held.get_frozen_credentials(), getattr(held, "_expiry_time", None)
