"""Fixtures of the tests of live engines."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pytest

from tests.storage import server

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def bucket(s3_server: tuple[str, Any]) -> Iterator[server.Bucket]:
    """A bucket for all jobs of a module; their processes find what lets them in."""
    with pytest.MonkeyPatch.context() as patch:
        endpoint, client = s3_server
        for name, value in (server.ENVIRONMENT | {"AWS_ENDPOINT_URL": endpoint}).items():
            patch.setenv(name, value)
        own = server.Bucket(endpoint, f"bucket-{uuid.uuid4().hex[:12]}", client)
        client.create_bucket(Bucket=own.name)
        yield own
