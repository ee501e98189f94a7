"""Listings of a bucket: their entries, and the number of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ckpttool.errors import StorageError
from ckpttool.storage import find_text, open_storage
from ckpttool.storage.fsspec import RemoteStorage
from tests.wording import refused

if TYPE_CHECKING:
    from tests.faults.s3_proxy import Proxy
    from tests.storage.server import Bucket

BESIDE = ["out-1/latest", "out-2/latest", "out.json", "outer", "other", "run/latest"]
"""Names that begin as the one that is looked for, before and behind where it would be."""


def _storage(s3: Bucket) -> RemoteStorage:
    storage = open_storage(s3.url("out"))
    assert isinstance(storage, RemoteStorage)
    return storage


@pytest.mark.parametrize("above", ["", "runs/"])
def test_a_free_name_is_found_without_listing_the_root(above: str, s3: Bucket, proxy: Proxy) -> None:
    for name in BESIDE:
        s3.put(above + name, b"x")
    proxy.clear()
    storage, out = _storage(s3), s3.url(f"{above}out")
    assert not storage.is_dir(out)
    assert len(proxy.requests()) == 1
    assert not storage.exists(out)
    assert not storage.exists(out)
    assert not storage.is_dir(out)
    asked = proxy.requests("list_objects_v2")
    assert len(asked) == len(proxy.requests()) <= 3
    for request in asked:
        assert request.query["prefix"] == f"{above}out/" or int(request.query["max-keys"]) <= 2


def test_an_object_is_found_by_its_name_alone(s3: Bucket, proxy: Proxy) -> None:
    for name in [*BESIDE, "out"]:
        s3.put(name, b"data of " + name.encode())
    proxy.clear()
    storage, out = _storage(s3), s3.url("out")
    assert storage.exists(out)
    assert not storage.is_dir(out)
    with refused(StorageError):
        storage.listing(out)
    with storage.open(out) as reader:
        assert reader.read(0, reader.nbytes) == b"data of out"
    # To list is all that one may be allowed.
    assert {r.operation for r in proxy.requests()} == {"list_objects_v2", "get_object"}


def test_a_small_text_takes_one_request(s3: Bucket, proxy: Proxy) -> None:
    s3.put("run/latest", b"step1")
    proxy.clear()
    storage = _storage(s3)
    assert find_text(storage, s3.url("run/latest")) == "step1"
    assert [r.operation for r in proxy.requests()] == ["get_object"]
    assert find_text(storage, s3.url("run/none")) is None
    assert [r.operation for r in proxy.requests()] == ["get_object"] * 2
    storage.refresh([s3.url("run/latest")])
    proxy.clear()
    assert find_text(storage, s3.url("run/none")) is None
    assert not proxy.requests()


def test_a_prefix_takes_precedence_over_an_object_of_the_same_name(s3: Bucket) -> None:
    for name in ["out", "out/latest", *BESIDE]:
        s3.put(name, b"x")
    storage, out = _storage(s3), s3.url("out")
    assert storage.exists(out)
    assert storage.is_dir(out)
    assert [e.name for e in storage.listing(out)] == ["latest"]


def test_a_marker_as_consoles_leave_it_is_an_empty_directory(s3: Bucket) -> None:
    s3.put("out/", b"")
    storage = _storage(s3)
    assert not storage.exists(s3.url("out"))
    assert storage.listing(s3.url("out")) == []


def test_a_missing_bucket_is_named(s3: Bucket) -> None:
    storage = _storage(s3)
    for ask in (storage.is_dir, storage.exists, storage.listing):
        with refused(StorageError):
            ask(f"s3://{s3.name}-not/out")
