"""Fixtures of the tests of storage: a server, a bucket for each test, and a proxy in front of the server."""

from __future__ import annotations

import sys
import uuid
from typing import TYPE_CHECKING, Any

import pytest

from ckpttool.storage import retry
from ckpttool.testing.s3_proxy import Proxy
from tests.storage import places, server

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def s3(s3_server: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[server.Bucket]:
    """A fresh bucket. Clients that the test, or a command that it runs, makes find what lets them in."""
    for name, value in server.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    endpoint, client = s3_server
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    bucket = server.Bucket(endpoint, f"bucket-{uuid.uuid4().hex[:12]}", client)
    client.create_bucket(Bucket=bucket.name)
    yield bucket
    server.forget_everything(endpoint)


@pytest.fixture
def proxy(s3: server.Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy in front of the server; clients of the test use it."""
    with Proxy(s3.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


@pytest.fixture(params=["s3fs", "obstore"])
def read_client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Client of ranged reads: s3fs only, as without obstore; or obstore, also for small ranges."""
    if request.param == "s3fs":
        monkeypatch.setitem(sys.modules, "obstore", None)
    else:
        monkeypatch.setattr("ckpttool.storage.s3.BULK_BYTES", 1)
    return str(request.param)


@pytest.fixture(autouse=True)
def quick_and_fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No pauses between attempts; no test sees the memory storage of another."""
    import fsspec

    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(retry, "LONGEST_PAUSE", 0.05)
    yield
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


@pytest.fixture(params=["local", "memory", "s3", *places.OTHERS])
def place(request: pytest.FixtureRequest) -> places.Place:
    """Each of the storages in turn."""
    return places.place(request.param, request)
