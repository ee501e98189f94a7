"""The s3fs file system of ckpttool: one attempt for each request, because ``retry.call`` retries."""

from __future__ import annotations

from typing import Any

import s3fs


class SingleAttemptFileSystem(s3fs.S3FileSystem):  # type: ignore[misc]
    """s3fs without retries of its own.

    A class of its own has a cache of instances of its own: the user's instances with the same options keep their
    retries. Source: s3fs 2026, core.py (``S3FileSystem.retries``).
    """

    retries = 1


def single_attempt(kind: type[Any]) -> type[Any]:
    """Return the class to use in the place of a file system class of S3."""
    return SingleAttemptFileSystem if kind is s3fs.S3FileSystem else kind
