"""Fixtures of the tests of saving."""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.saving.scenarios import Bench
from tests.storage import server

if TYPE_CHECKING:
    from collections.abc import Iterator

PART_BYTES = 8192
"""Size of a part of an upload: files of the small checkpoints have two or three."""
MEMORY = "/dev/shm"  # noqa: S108  nothing in it is trusted


@contextlib.contextmanager
def in_memory() -> Iterator[Path]:
    """An empty directory, in memory where there is such a place."""
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="ckpttool-tests-", dir=place) as path:
        yield Path(path)


@pytest.fixture
def directory() -> Iterator[Path]:
    """An empty directory; thousands are made and removed in it."""
    with in_memory() as path:
        yield path


@pytest.fixture
def bench(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Where scenarios are run."""
    return Bench(directory, monkeypatch)


@pytest.fixture(scope="session")
def small_parts() -> Iterator[tuple[str, Any]]:
    """A server that takes small parts."""
    server.share_descriptions()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("S3_UPLOAD_PART_MIN_SIZE", "1")
        with server.running() as endpoint:
            client = server.client(endpoint)
            yield endpoint, client
            client.close()


@pytest.fixture
def bucket(small_parts: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[server.Bucket]:
    """A new bucket on a server that takes small parts."""
    from ckpttool.storage import retry, s3, s3_client

    for name, value in server.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    endpoint, client = small_parts
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setattr(s3, "MIN_PART_BYTES", PART_BYTES)
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0)
    s3_client.SingleAttemptFileSystem.clear_instance_cache()
    bucket = server.Bucket(endpoint, f"bucket-{uuid.uuid4().hex[:12]}", client)
    client.create_bucket(Bucket=bucket.name)
    yield bucket
    server.forget_everything(endpoint)
