"""Fixtures of the tests of storage: a proxy in front of the server, and other clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ckpttool.storage import retry
from tests.faults.s3_proxy import Proxy
from tests.storage import places, server

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def proxy(s3: server.Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy in front of the server; clients of the test use it."""
    with Proxy(s3.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


@pytest.fixture(params=["blocking", "event loop"])
def s3_client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Client of S3: botocore's, or that of s3fs."""
    if request.param == "event loop":
        from ckpttool.storage.s3_client import EventLoopClient

        monkeypatch.setattr("ckpttool.storage.s3.client_of", EventLoopClient)
    return str(request.param)


@pytest.fixture(autouse=True)
def quick_and_fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No pauses between attempts; no test sees the memory storage of another."""
    import fsspec

    monkeypatch.setattr(retry, "FIRST_PAUSE", 0)
    yield
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


@pytest.fixture
def small_stream_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Size of the parts in which files of storages other than S3 are written; small."""
    monkeypatch.setattr("ckpttool.storage.fsspec.PART_BYTES", 1024)
    return 1024


@pytest.fixture(params=["local", "memory", "s3", *places.OTHERS])
def place(request: pytest.FixtureRequest) -> places.Place:
    """Each of the storages in turn."""
    return places.place(request.param, request)
